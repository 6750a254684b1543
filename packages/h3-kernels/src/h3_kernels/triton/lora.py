"""CUDA kernel of the LoRA term's last step: y = base + B h in one pass over y.

One tile of y is one chain over the rank (``tl.dot`` issues ascending 16-wide tensor-core steps into one fp32
accumulator, as in ``gemm``), added in fp32 to base and rounded once. So the fp32 term, twice the size of y, is never
written, and the bits are those of the product and the addition apart; `lora_expand` proves that on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from h3_kernels.triton.rows import launcher

if TYPE_CHECKING:
    from torch import Tensor

RANKS = (16, 32, 64, 128)
"""Ranks of one ``tl.dot``; others take the product and the addition apart."""

TILE = {"ROWS": 128, "COLS": 128, "num_warps": 8, "num_stages": 1, "enable_fp_fusion": False}
"""No bit depends on it, as long as a warp group has 64 rows (``wgmma``)."""


@triton.jit
def lora_expand_kernel(
    y_ptr, base_ptr, h_ptr, b_ptr, rows, columns, y_stride, base_stride, h_stride, b_stride, zero,
    RANK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """ROWS x COLS of y; columns go fastest, so that a block of h stays where it is."""
    across = tl.cdiv(columns, COLS)
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLS + tl.arange(0, COLS)
    k = tl.arange(0, RANK)
    at = row.to(tl.int64)[:, None]
    live = (row < rows)[:, None] & (column < columns)[None, :]
    base = tl.load(base_ptr + at * base_stride + column[None, :], mask=live, other=0.0)
    h = tl.load(h_ptr + at * h_stride + k[None, :], mask=(row < rows)[:, None], other=0.0)
    b = tl.load(
        b_ptr + column.to(tl.int64)[:, None] * b_stride + k[None, :],
        mask=(column < columns)[:, None],
        other=0.0,
    )
    # The compiler makes x + dot(a, b) a dot that starts from x, another chain; not if it starts from what may not be 0.
    term = tl.dot(h, b.T, tl.zeros((ROWS, COLS), tl.float32) + zero)
    y = base.to(tl.float32) + term
    tl.store(y_ptr + at * y_stride + column[None, :], y.to(y_ptr.dtype.element_ty), mask=live)


@launcher
def lora_expand(base: Tensor, h: Tensor, b: Tensor) -> Tensor:
    """y [T, N] contiguous = base [T, N] + h [T, r] b [N, r]^T, all bf16; rows of any stride, r one of RANKS."""
    (rows, columns), rank = base.shape, h.shape[1]
    y = torch.empty((rows, columns), dtype=base.dtype, device=base.device)
    if y.numel():
        grid = triton.cdiv(rows, TILE["ROWS"]) * triton.cdiv(columns, TILE["COLS"])
        strides = (t.stride(0) for t in (y, base, h, b))
        lora_expand_kernel[(grid,)](y, base, h, b, rows, columns, *strides, 0.0, RANK=rank, **TILE)
    return y
