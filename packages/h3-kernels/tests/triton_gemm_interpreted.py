"""The Triton GEMM in the interpreter on the CPU: every element written once, right within rounding, in any grid.

Run by test_triton_gemm.py in a process of its own with TRITON_INTERPRET=1, because the interpreter is chosen when a
kernel is defined. The interpreter adds a block's products in numpy's order, so bits are the gpu tests' subject.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from bf16_interpreter import bf16_arithmetic
from h3_kernels import reference
from h3_kernels.triton import gemm as subject
from h3_kernels.tuning import Tile

__all__ = ["bf16_arithmetic"]  # an autouse fixture

PROGRAMS = 6
TILES = {
    "plain": Tile(64, 32, 32, 2, 4),
    "persistent": Tile(64, 32, 32, 2, 4, persistent=True, band=2),
    "tail": Tile(64, 64, 32, 2, 4, persistent=True, flatten=True, band=1, tail=16),
}


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(subject, "processors", lambda device: PROGRAMS)


def stored(t: torch.Tensor, transposed: bool) -> torch.Tensor:
    return t.t().contiguous().t() if transposed else t


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "sizes", [(70, 72, 256, 1), (33, 40, 256, 8), (5, 7, 33, 1), (9, 1, 100, 1), (130, 200, 64, 1)], ids=str
)
def test_every_element_is_written_and_right(sizes, dtype, tile):
    m, n, k, units = sizes
    generator = torch.Generator().manual_seed(m)
    x, weight = (torch.randn(size, k, generator=generator).to(dtype) for size in (m, n))
    for a_transposed, b_transposed, biased in itertools.product((False, True), (False, True), (False, True)):
        bias = torch.randn(n, generator=generator) if biased else None
        operands = (stored(x, a_transposed), stored(weight, b_transposed))
        y = subject.gemm(*operands, units=units, out_dtype=dtype, bias=bias, tile=tile)
        exact = reference.truth(x, weight, bias)
        assert (y.double() - exact).norm() / exact.norm() < (4e-3 if dtype == torch.bfloat16 else 1e-6)


def test_a_tail_whose_grid_is_larger_than_the_whole_waves_is_complete():
    """Once the grid was cut to the number of wide tiles, and the narrow tiles beyond it stayed unwritten."""
    tile = TILES["tail"]
    m, n, k = 5 * tile.m, 64 * 2 - 16, 32  # 10 tiles on 6 programs: one wave of 5 wide tiles in one column
    x, weight = (torch.randn(size, k).bfloat16() for size in (m, n))
    assert subject.whole_columns(m, n, tile, PROGRAMS) in (tile.n, n)
    y = subject.gemm(x, weight, units=1, out_dtype=torch.bfloat16, bias=None, tile=tile)
    exact = reference.truth(x, weight)
    assert (y.double() - exact).norm() / exact.norm() < 4e-3


def test_the_tree_kernel_adds_in_canonical_order():
    partials = torch.randn(8, 33, 40) * torch.exp2(torch.randint(-12, 12, (8, 33, 40)).float())
    for units in (2, 4, 8):
        root = reference.fold_tree(partials[:units])
        for out in (torch.float32, torch.bfloat16):
            y = subject.tree_reduce(partials[:units].contiguous(), out_dtype=out, bias=None)
            assert torch.equal(y, root.to(out))
    assert not torch.equal(partials.sum(0), reference.fold_tree(partials))  # twin: torch's own order
