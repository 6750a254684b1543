"""The node kernels in Triton's interpreter: see triton_nodes_interpreted.py, which this runs in a child process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SUITE = Path(__file__).with_name("triton_nodes_interpreted.py")


def test_node_kernels_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(SUITE)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]
    assert "passed" in child.stdout
    assert "skipped" not in child.stdout
