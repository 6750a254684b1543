"""The two guides: every block runs, in order, on files of the kind they speak of; the table names every format."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from h3_mapper.lora import FORMATS, Statement, read, write
from h3_mapper.lora.files import save_adapter
from h3_mapper.spec import Layout
from lora_testkit import diffusers_lora
from mapper_testkit import TINY
from merge_testkit import save_base

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize("page", ["lora.md", "weight-sync.md"])
def test_every_block_of_the_guide_runs(tmp_path, monkeypatch, page):
    monkeypatch.chdir(tmp_path)
    save_base(tmp_path / "base", Layout.DIFFUSERS)
    adapter = read(diffusers_lora(), TINY, statement=Statement(alpha=6.0))
    save_adapter(write(adapter, "kohya", TINY), tmp_path / "my-lora.safetensors", tmp_path / "none")
    shim = tmp_path / "bin" / "h3-mapper"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m h3_mapper "$@"\n')
    shim.chmod(0o755)
    source = REPOSITORY / "packages" / "h3-mapper" / "src"
    env = os.environ | {"PATH": f"{shim.parent}:{os.environ['PATH']}", "PYTHONPATH": str(source)}
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```", (REPOSITORY / "docs" / page).read_text(), re.S | re.M)
    assert len(blocks) >= 2
    python = ""  # a guide's Python blocks build on each other
    for kind, code in blocks:
        python += code if kind == "python" else ""
        command = ["sh", "-e", "-c", code] if kind == "sh" else [sys.executable, "-c", python]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{code}\n{done.stderr}"


def test_the_table_of_formats_is_the_table():
    text = (REPOSITORY / "docs" / "lora.md").read_text()
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    assert rows.keys() == FORMATS.keys()
    for name, line in rows.items():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        format_ = FORMATS[name]
        assert (cells[3] == format_.qkv) if format_.qkv else (cells[3] == "-"), name
        assert cells[6].startswith("yes") == bool(format_.dora), name
        if format_.fc1:
            assert cells[4] == str(format_.fc1).replace("-", " "), name
