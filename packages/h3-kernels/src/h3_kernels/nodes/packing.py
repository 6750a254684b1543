"""Scatter embedded rows into the packed sequence and select rows out of it: bytes move, nothing is computed.

Every packed row is written at most once; rows that nobody writes (padding) are +0. A copy, not the
``index_add_`` onto zeros of vLLM-Omni 0.30, which would turn a -0 into +0.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
        check(fits, "scatter_rows", f"rows {list(rows.shape)} do not fit positions {list(positions.shape)}")
    packed = parts[0][0].new_zeros((length, parts[0][0].shape[1]), dtype=dtype)
    for rows, positions in parts:
        packed.index_copy_(0, positions, rows.to(dtype))
    return packed


def select_rows(x: Tensor, positions: Tensor) -> Tensor:
    """Return the rows of ``x`` [T, H] at ``positions`` [n] int64, in that order."""
    return x.index_select(0, positions)
