"""The node and attention kernels in Triton's interpreter: suites of their own, which this runs in child processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreter import assert_passes_interpreted

pytest.importorskip("triton")
SUITES = ("triton_nodes_interpreted.py", "triton_attention_interpreted.py")


@pytest.mark.parametrize("suite", SUITES)
def test_kernels_in_the_interpreter(suite: str) -> None:
    assert_passes_interpreted(Path(__file__).with_name(suite))
