"""Scatter embedded rows into the packed sequence and select rows out of it: bytes move, nothing is computed.

Every packed row is written at most once; rows that nobody writes (padding) are +0. A copy, not the
``index_add_`` onto zeros of vLLM-Omni 0.30, which would turn a -0 into +0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from h3_kernels.nodes._op import check


def scatter_rows(length: int, dtype: torch.dtype, *parts: tuple[Tensor, Tensor]) -> Tensor:
    """Return [length, H] of ``dtype`` holding each part's rows at its positions.

    ``parts``: (rows [n, H] of any float dtype, rounded once to ``dtype``; positions [n] int64), one per
    modality. Positions must not repeat across parts. Differentiable in the rows. Raises InputError on a
    length mismatch.
    """
    check(bool(parts), "scatter_rows", "needs at least one part")
    for rows, positions in parts:
        fits = rows.dim() == 2 and rows.shape[1] == parts[0][0].shape[1] and positions.shape == rows.shape[:1]
        check(fits, "scatter_rows", "rows {} do not fit positions {}", rows, positions)
    packed = parts[0][0].new_zeros((length, parts[0][0].shape[1]), dtype=dtype)
    for rows, positions in parts:
        packed.index_copy_(0, positions, rows.to(dtype))
    return packed


def column_blocks(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Cut [T, count * W] into ``count`` views [T, W], the outputs of one fused linear.

    The gradient joins the blocks' gradients: without a copy where they lie side by side in one tensor, as
    ``swiglu`` leaves them on CUDA. Slices would each allocate the whole width and add. Raises InputError if
    the width does not divide.
    """
    check(x.dim() == 2 and x.shape[1] % count == 0, "column_blocks", "{} into {} blocks", x, count)
    if count == 1:
        return (x,)
    if torch.is_grad_enabled() and x.requires_grad:
        return _ColumnBlocks.apply(x, count)  # type: ignore[no-untyped-call, no-any-return]
    return x.chunk(count, dim=1)


class _ColumnBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, ...]:
        return x.chunk(count, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _side_by_side(grads), None


def _side_by_side(blocks: tuple[Tensor, ...]) -> Tensor:
    """[T, count * W] of blocks [T, W]: the tensor they are column blocks of, or their concatenation."""
    first, (rows, width) = blocks[0], blocks[0].shape
    place = (first.untyped_storage().data_ptr(), first.dtype, (len(blocks) * width, 1))
    for i, block in enumerate(blocks):
        here = (block.untyped_storage().data_ptr(), block.dtype, block.stride())
        if here != place or block.storage_offset() != first.storage_offset() + i * width:
            return torch.cat(blocks, dim=1)
    return first.as_strided((rows, len(blocks) * width), (len(blocks) * width, 1))


def join_columns(blocks: tuple[Tensor, ...]) -> Tensor:
    """[T, count * W] of ``blocks`` [T, W]: the inverse of ``column_blocks``; no copy where they lie side by side.

    Its gradient is cut into views, which ``column_blocks`` then joins without a copy.
    """
    if len(blocks) == 1:
        return blocks[0]
    if torch.is_grad_enabled() and any(block.requires_grad for block in blocks):
        return _JoinColumns.apply(*blocks)  # type: ignore[no-untyped-call, no-any-return]
    return _side_by_side(blocks)


class _JoinColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *blocks: Tensor) -> Tensor:
        ctx.count = len(blocks)
        return _side_by_side(blocks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad.chunk(ctx.count, dim=1)


def select_rows(x: Tensor, positions: Tensor) -> Tensor:
    """Return the rows of ``x`` [T, H] at ``positions`` [n] int64, in that order."""
    return x.index_select(0, positions)
