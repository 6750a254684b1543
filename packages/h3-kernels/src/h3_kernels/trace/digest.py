"""Digests of rows: one 64-bit number per row, from integer arithmetic, so that any device and any order
agree.

digest(row) = sum over columns of bits(value) * odd(column), modulo 2**64. It is exact in two ways. Two rows
that differ in one value always differ (an odd factor is invertible). And it is additive over columns: the
digests of a tensor-parallel rank's columns, taken at their place in the whole row, add up to the digest of
the row. +0 and -0 differ, as do NaNs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from h3_kernels.errors import InputError

# Eight-byte values are two columns: a sign bit times any odd factor would be the same 2**63 in every column.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
# 2**64 / golden ratio and a second odd constant, as signed 64-bit numbers.
_STEP, _MIX = -7046029254386353131, -4417276706812531889
_BLOCK_ELEMENTS = 1 << 24


def row_digests(x: Tensor, first_column: int = 0) -> Tensor:
    """int64 [T] on the CPU: the digest of each row of ``x`` [T, ...], whose columns start at
    ``first_column``.

    Raises InputError for a scalar.
    """
    if x.dim() == 0:
        raise InputError("row_digests: a scalar has no rows; expected [rows, ...]")
    flat = x.detach().reshape(x.shape[0], x.shape[1:].numel()).contiguous().view(_BITS[x.element_size()])
    wide = x.element_size() // flat.element_size()
    factors = _column_factors(first_column * wide, flat.shape[1], x.device)
    rows = max(1, _BLOCK_ELEMENTS // max(1, flat.shape[1]))
    blocks = [(block.to(torch.int64) * factors).sum(1) for block in torch.split(flat, rows)]
    return torch.cat(blocks).cpu() if blocks else torch.zeros(0, dtype=torch.int64)


def _column_factors(first: int, count: int, device: torch.device) -> Tensor:
    column = torch.arange(first, first + count, dtype=torch.int64, device=device)
    mixed = (column + 1) * _STEP
    return ((mixed ^ (mixed >> 29)) * _MIX) | 1


def group_digests(rows: Tensor, size: int) -> Tensor:
    """Fold runs of ``size`` row digests into one number each (the last run may be shorter); ``size`` 1 keeps
    them.
    """
    if size == 1:
        return rows
    missing = -rows.shape[0] % size
    padded = torch.cat([rows, rows.new_zeros(missing)]).view(-1, size)
    return (padded * _column_factors(0, size, rows.device)).sum(1)


def digest_of(rows: Tensor, shape: Sequence[int], dtype: str) -> str:
    """One hexadecimal digest of a tensor, from its row digests, its shape and its dtype."""
    text = f"{list(shape)} {dtype} ".encode()
    return hashlib.blake2b(text + rows.numpy().tobytes(), digest_size=16).hexdigest()
