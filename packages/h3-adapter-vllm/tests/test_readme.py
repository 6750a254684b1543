"""What the README shows is so: its Python runs, its variables are the plugin's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from h3_adapter_vllm import plugin
from h3_kernels.modes import Scope

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


@pytest.mark.engine
def test_python_blocks_run_in_order():
    """In a process of their own, as a reader would run them."""
    code = "\n".join(blocks("python"))
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert "Bound(contract='h3-parallel-v1-u8', provider='reference'" in done.stdout
    assert "External(operator='SDPA attention')" in done.stdout


def test_variables_are_the_plugins():
    named = set(re.findall(r"\bH3_[A-Z]+\b", README))
    assert named == {"H3_MODE", plugin.REPORT, *plugin.ARGUMENTS}
    (command,) = blocks("shell")
    assert set(re.findall(r"\bH3_[A-Z]+(?==)", command)) <= named


def test_scopes_are_the_packages():
    row = next(line for line in README.splitlines() if line.startswith("| `H3_SCOPE`"))
    assert re.findall(r"`([a-z]+)`", row) == [scope.value for scope in Scope]
