"""Runs a suite in Triton's interpreter: in a process of its own, as a kernel chooses it when it is defined."""

import os
import subprocess
import sys
from pathlib import Path


def assert_passes_interpreted(suite: Path) -> None:
    """Every test of ``suite`` passes, and none is skipped."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(suite)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]
    assert "passed" in child.stdout
    assert "skipped" not in child.stdout
