"""Stores into and loads from the memory of peer GPUs. Values travel as they are; nothing here adds.

``pointers`` is int64 [ranks] on this device: where each rank's buffer is mapped in this process, on 16-byte boundaries.
Every rank begins with its own buffer and goes on with the next rank's, so no two ranks load one link at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 2048
"""Elements a program moves: 128 threads of four 16-byte vectors of fp32."""


@triton.jit(do_not_specialize=["rank"])
def push_kernel(source, pointers, block, total, step, rank, ranks, BLOCK: tl.constexpr):
    """source[step p + i] to element ``rank block + i`` of rank p's buffer, for i < block and step p + i < total."""
    p = (tl.program_id(1) + rank) % ranks
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start = p.to(tl.int64) * step
    inside = (i < block) & (start + i < total)
    target = tl.multiple_of(tl.load(pointers + p).to(tl.pointer_type(source.dtype.element_ty)), 16)
    tl.store(target + rank.to(tl.int64) * block + i, tl.load(source + start + i, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["rank"])
def pull_kernel(target, pointers, block, total, rank, ranks, BLOCK: tl.constexpr):
    """target[block p + i] = element i of rank p's buffer, for i < block and block p + i < total."""
    p = (tl.program_id(1) + rank) % ranks
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start = p.to(tl.int64) * block
    inside = (i < block) & (start + i < total)
    source = tl.multiple_of(tl.load(pointers + p).to(tl.pointer_type(target.dtype.element_ty)), 16)
    tl.store(target + start + i, tl.load(source + i, mask=inside), mask=inside)


def push(source: Tensor, pointers: Tensor, *, block: int, step: int, rank: int) -> None:
    """Give every rank ``block`` elements of contiguous ``source``: those from ``step`` times its number on.

    They land at ``rank`` times ``block`` in its buffer. step 0 gives all ranks the same elements.
    """
    ranks = pointers.shape[0]
    grid = (triton.cdiv(block, BLOCK), ranks)
    push_kernel[grid](source, pointers, block, source.numel(), step, rank, ranks, BLOCK=BLOCK, num_warps=4)


def pull(target: Tensor, pointers: Tensor, *, block: int, rank: int) -> None:
    """Fill contiguous ``target`` with ``block`` elements from the start of every rank's buffer, in rank order."""
    ranks = pointers.shape[0]
    grid = (triton.cdiv(block, BLOCK), ranks)
    pull_kernel[grid](target, pointers, block, target.numel(), rank, ranks, BLOCK=BLOCK, num_warps=4)
