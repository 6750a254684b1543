"""The fixed summation orders of the nodes, from elementwise adds only.

``sum_columns`` reduces inside a row, so its order depends on the width alone. ``sum_rows`` reduces over rows:
its order depends on each row's rank among the rows it is given, and rows of zeros behind them change nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sum_columns(x: Tensor) -> Tensor:
    """Sum the last axis by halving: x[i] + x[i + w/2], the width padded with zeros to a power of two.

    ``x``: [..., W] float32. Returns [...] float32.
    """
    width = x.shape[-1]
    full = 1 << (width - 1).bit_length()
    if full != width:
        x = torch.nn.functional.pad(x, (0, full - width))
    while full > 1:
        full //= 2
        x = x[..., :full] + x[..., full:]
    return x[..., 0]


def sum_rows(x: Tensor) -> Tensor:
    """Sum the first axis by the tree of neighbours: (x0 + x1) + (x2 + x3) ..., missing leaves being zero.

    The last add of +0 makes a zero sum +0 whatever the signs of its terms. ``x``: [T, ...] float32, T >= 0.
    """
    if x.shape[0] == 0:
        return x.new_zeros(x.shape[1:])
    while x.shape[0] > 1:
        if x.shape[0] % 2:
            x = torch.cat([x, torch.zeros_like(x[:1])])
        x = x[0::2] + x[1::2]
    return x[0] + 0.0


def sum_heads(x: Tensor, groups: int) -> Tensor:
    """Sum over heads, [heads, D] float32 -> [D]: ``groups`` equal runs of heads, each by the tree of
    neighbours, then the runs by the same tree. A rank that holds 1/tp of the heads and groups holds a whole
    subtree. Runs on any device.
    """
    runs = x.view(groups, x.shape[0] // groups, *x.shape[1:])
    return sum_rows(sum_rows(runs.transpose(0, 1)))


def in_order(x: Tensor, order: Tensor | None) -> Tensor:
    """Take the rows of ``x`` in ascending logical order: ``order`` lists row positions, None means as they
    lie.
    """
    return x if order is None else x.index_select(0, order)


def sum_rows_by_index(x: Tensor, index: Tensor, rows: int, order: Tensor | None) -> Tensor:
    """Sum the rows of ``x`` [T, W] that share a table row: result [rows, W], each by ``sum_rows`` over its
    own rows.
    """
    x, index = in_order(x, order), in_order(index, order)
    return torch.stack([sum_rows(x[index == row]) for row in range(rows)])
