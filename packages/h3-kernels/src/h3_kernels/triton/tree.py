"""The canonical tree over unit partials in memory: the portable twin of csrc/tree_reduce.cu, same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024
"""Elements a program adds: 128 threads of 8."""


@triton.jit
def subtree(base, offsets, inside, size, START: tl.constexpr, UNITS: tl.constexpr):
    """fp32 root of units [START, START + UNITS): the left half's root plus the right half's."""
    if UNITS == 1:
        root = tl.load(base + START * size + offsets, mask=inside, other=0.0)
    else:
        left = subtree(base, offsets, inside, size, START, UNITS // 2)
        root = left + subtree(base, offsets, inside, size, START + UNITS // 2, UNITS // 2)
    return root


@triton.jit
def tree_kernel(partials, y, bias, size, N, UNITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """y[i] = round(tree over u of partials[u, i] (+ bias[i mod N])) for one block of ``size`` elements."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    root = subtree(partials, offsets, inside, size, 0, UNITS)
    if BIAS:
        root += tl.load(bias + offsets % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + offsets, root.to(y.dtype.element_ty), mask=inside)


def tree_reduce(partials: Tensor, *, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """[M, N] of contiguous fp32 partials [units, M, N]: canonical tree, bias [N] in fp32, one rounding."""
    units, m, n = partials.shape
    y = torch.empty(m, n, dtype=out_dtype, device=partials.device)
    size = m * n
    tree_kernel[(triton.cdiv(size, BLOCK),)](
        partials, y, bias if bias is not None else y, size, n,
        UNITS=units, BIAS=bias is not None, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return y
