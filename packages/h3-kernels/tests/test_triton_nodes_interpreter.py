"""The node kernels in Triton's interpreter: see triton_nodes_interpreted.py, which this runs in a child process."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreter import assert_passes_interpreted

pytest.importorskip("triton")
SUITE = Path(__file__).with_name("triton_nodes_interpreted.py")


def test_node_kernels_in_the_interpreter() -> None:
    assert_passes_interpreted(SUITE)
