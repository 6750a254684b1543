"""Sums over rows in a fixed order: gradients of norm weights and of modulation tables.

Order: the tree of neighbours over the rows' ranks, (x0 + x1) + (x2 + x3) and so on, missing leaves being zero, and
a last add of +0; with an index, one tree for each table row over the rows that use it. A block of BLOCK consecutive
ranks is a subtree, so the tree is cut into launches of one level of blocks each and no atomic is needed. Same order
and bits as `nodes._order`. Ranks come from `order` (positions of the active rows, ascending); rows outside it do
not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from h3_kernels.triton.rows import columns_contiguous

if TYPE_CHECKING:
    from torch import Tensor

OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
BLOCK_ROWS = 128
BLOCK_COLS = 32


@triton.jit
def sum_rows_kernel(
    out_ptr, x_ptr, position_ptr, bound_ptr, x_stride, columns, blocks,
    GATHER: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Program (column block, block, segment) adds its ranks' rows into out[segment, block]."""
    block = tl.program_id(1)
    segment = tl.program_id(2)
    start = tl.load(bound_ptr + segment)
    end = tl.load(bound_ptr + segment + 1)
    column = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    rank = start + block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    if GATHER:
        row = tl.load(position_ptr + rank, mask=rank < end, other=0)
    else:
        row = rank.to(tl.int64)
    live = (rank < end)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=live, other=0.0).to(tl.float32)
    for _ in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (x.shape[0] // 2, 2, BLOCK_COLS)), axis=1)
    out = out_ptr + (segment * blocks + block).to(tl.int64) * columns + column
    tl.store(out, tl.reshape(x, (BLOCK_COLS,)), mask=column < columns)


def sum_rows(x: Tensor, order: Tensor | None = None) -> Tensor:
    """x [T, C] -> fp32 [C]: the rows at `order` (all, if None) by the tree of neighbours."""
    count = x.shape[0] if order is None else order.shape[0]
    bounds = torch.zeros(2, dtype=torch.int64, device=x.device)
    bounds[1:].fill_(count)  # on the device: a copy from the host could not be captured in a graph
    return _tree(x, order, bounds, count)[0]


def sum_rows_by_index(x: Tensor, index: Tensor, rows: int, order: Tensor | None) -> Tensor:
    """x [T, C], index [T] in [0, rows) -> fp32 [rows, C]: for each table row, the tree over the rows that use it."""
    used = index if order is None else index.index_select(0, order)
    by_row, positions = torch.sort(used, stable=True)
    if order is not None:
        positions = order.index_select(0, positions)
    bounds = torch.searchsorted(by_row, torch.arange(rows + 1, dtype=by_row.dtype, device=x.device))
    return _tree(x, positions, bounds, used.shape[0])


def _tree(x: Tensor, positions: Tensor | None, bounds: Tensor, longest: int) -> Tensor:
    x, segments = columns_contiguous(x), bounds.shape[0] - 1
    while True:
        blocks = max(1, triton.cdiv(longest, BLOCK_ROWS))
        out = torch.empty((segments, blocks, x.shape[-1]), dtype=torch.float32, device=x.device)
        sum_rows_kernel[(triton.cdiv(x.shape[-1], BLOCK_COLS), blocks, segments)](
            out, x, positions, bounds, x.stride(0), x.shape[-1], blocks,
            GATHER=positions is not None, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=BLOCK_COLS,
            LEVELS=BLOCK_ROWS.bit_length() - 1, **OPTIONS,
        )  # fmt: skip
        if blocks == 1:
            return out.view(segments, -1) + 0.0
        x, positions, longest = out.view(segments * blocks, -1), None, blocks
        bounds = torch.arange(0, segments * blocks + 1, blocks, device=x.device)
