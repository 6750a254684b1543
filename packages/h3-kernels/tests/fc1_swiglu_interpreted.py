"""fc1 and SwiGLU in one kernel, interpreted on the CPU: every element is the one of the two nodes apart.

Run by test_fc1_swiglu.py in a process of its own with TRITON_INTERPRET=1. Operands are whole numbers, whose sums are
exact in any order, because the interpreter adds a block's products in numpy's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bf16_interpreter import bf16_arithmetic
from h3_kernels import tuning
from h3_kernels.testing import assert_bitwise_equal, count_differing
from h3_kernels.triton import fc1_swiglu as subject
from h3_kernels.triton.swiglu import launch_swiglu

__all__ = ["bf16_arithmetic"]  # an autouse fixture

TILE = replace(tuning.FC1_SWIGLU, m=64, n=32, k=32, band=2)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "processors", lambda device: 3)


def operands(rows: int, features: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    draw = torch.randint(-3, 4, (rows + 2 * features, k), generator=generator).bfloat16()
    return draw[:rows].contiguous(), draw[rows:].contiguous() * 0.125


def apart(x: torch.Tensor, weight: torch.Tensor, gate_first: bool) -> torch.Tensor:
    first, second = (x.float() @ weight.float().t()).bfloat16().chunk(2, dim=1)
    return launch_swiglu(first, second) if gate_first else launch_swiglu(second, first)


@pytest.mark.parametrize("gate_first", [True, False], ids=["gate first", "value first"])
@pytest.mark.parametrize("sizes", [(1, 32, 32), (70, 64, 40), (129, 96, 72), (200, 48, 136)], ids=str)
def test_every_element_is_the_one_of_the_two_nodes(sizes: tuple[int, int, int], gate_first: bool) -> None:
    """Tiles that reach over every edge, and programs with several tiles and with none."""
    x, weight = operands(*sizes)
    expected = apart(x, weight, gate_first)
    assert_bitwise_equal(subject.launch(x, weight, gate_first=gate_first, tile=TILE), expected)
    twin = subject.launch(x, weight, gate_first=not gate_first, tile=TILE)  # halves swapped
    assert count_differing(twin, expected) > 0
