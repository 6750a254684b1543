"""Stand-ins for a GPU run: a device that is always there, packages of three tests, benchmarks of one record.

The runner, its processes and the files it writes are the real ones. Fixtures are in conftest.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import gpu_matrix

import evidence

ROOT = Path(__file__).parent.parent
SCHEMA = json.loads((ROOT / "evidence" / "schema.json").read_text())

SEEN = {"head": "unknown"}

PASSES = "import pytest\npytestmark = pytest.mark.gpu\ndef test_one(): pass\n"
CRASHES = f"import os\n{PASSES}def test_two(): os.abort()\ndef test_three(): pass\n"
FAILS = f"{PASSES}def test_two(): assert False\n"

WRITES = """
import argparse, sys, time
from pathlib import Path
from records import Writer
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path)
parser.add_argument("--gates", type=Path)
arguments = parser.parse_args()
writer = Writer(arguments.out)
"""
ONE = WRITES + 'writer.add({"ratio": 0.9})\n'
TWO_THEN_SLEEPS = ONE + 'writer.add({"ratio": 0.8})\ntime.sleep(60)\nwriter.add({"ratio": 0.7})\n'
SLEEPS_THEN_ONE = WRITES + 'time.sleep(60)\nwriter.add({"ratio": 0.9})\n'


def matrix(tmp_path: Path, *words: str) -> int:
    return gpu_matrix.main(["h200", "--out", str(tmp_path / "evidence"), *words])


def filed(tmp_path: Path) -> evidence.Folder:
    (folder,) = evidence.folders(tmp_path / "evidence")
    assert evidence.problems(folder, SCHEMA) == []
    return folder
