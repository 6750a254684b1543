"""What the row-wise kernels share: one row per program, read in chunks of CHUNK columns, and one summation order.

Order of a row sum: columns are cut into chunks of CHUNK (the last one zero-padded); the chunk vectors are added in
ascending order, lane by lane, from the first; the CHUNK lanes are then added as a tree of adjacent pairs, (l0 + l1)
+ (l2 + l3) and so on. Every step is an fp32 add written out in the kernel, so the order does not depend on the
number of warps, on Triton's choice of layout, on the number of rows or on where the row lies. (The CPU's written
order halves the whole row instead; a lane-wise tree keeps all but three steps of the sum inside registers and
warps.)

No kernel here lets the compiler contract a product and a sum (`enable_fp_fusion=False`); division and square root
of the row statistics are the IEEE ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

Result = TypeVar("Result")

CHUNK = 2048
"""Columns added lane by lane, part of the bits; 5376 is 2 chunks and five eighths. Of 512, 1024 and 2048 columns on 2,
4 and 8 warps, 2048 on 4 has the least time over the four norm kernels on an H200 (docs/measured-facts-nodes.md)."""

FEW_ROWS = 2048
"""Below this, a launch lives on latency: more warps share a row. Above, on bandwidth. No bit depends on it."""


def options(rows: int) -> dict[str, Any]:
    """Launch options of a row kernel; products and sums stay separate roundings."""
    return {"num_warps": 8 if rows < FEW_ROWS else 4, "num_stages": 1, "enable_fp_fusion": False}


def chunking(columns: int) -> dict[str, int]:
    """Compile-time shape of a row of `columns`: CHUNK, its log2 and the number of chunks."""
    chunk = min(CHUNK, triton.next_power_of_2(columns))
    return {
        "COLS": columns,
        "CHUNK": chunk,
        "CHUNKS": triton.cdiv(columns, chunk),
        "LEVELS": chunk.bit_length() - 1,
    }


def columns_contiguous(x: Tensor) -> Tensor:
    """x itself if its last axis is contiguous, else a copy that is (a gradient may arrive expanded)."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def launcher(launch: Callable[..., Result]) -> Callable[..., Result]:
    """``launch`` for tensors of any strides on any device.

    Kernels step along a last axis by 1, so tensors with gaps there are copied first; and Triton launches on the current
    device and its stream, which may not be the tensors'.
    """

    @functools.wraps(launch)
    def where_the_tensors_are(*tensors: Tensor | None, **settings: Any) -> Result:
        readable = [None if t is None else columns_contiguous(t) for t in tensors]
        device = next(t.device for t in tensors if t is not None)
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return launch(*readable, **settings)
        return launch(*readable, **settings)

    return where_the_tensors_are


def row_stride(x: Tensor | None) -> int:
    """Elements between two rows of x, 0 where there is no tensor."""
    return 0 if x is None else x.stride(0)


@triton.jit
def load_chunk(row_ptr, i: tl.constexpr, COLS: tl.constexpr, CHUNK: tl.constexpr):
    """Chunk i of a row as fp32 [CHUNK]; zero past the last column."""
    columns = i * CHUNK + tl.arange(0, CHUNK)
    if (i + 1) * CHUNK <= COLS:
        x = tl.load(row_ptr + columns)
    else:
        x = tl.load(row_ptr + columns, mask=columns < COLS, other=0.0)
    return x.to(tl.float32)


@triton.jit
def store_chunk(row_ptr, x, i: tl.constexpr, COLS: tl.constexpr, CHUNK: tl.constexpr):
    """Store fp32 [CHUNK] as chunk i of a row, rounded once to the row's dtype."""
    columns = i * CHUNK + tl.arange(0, CHUNK)
    if (i + 1) * CHUNK <= COLS:
        tl.store(row_ptr + columns, x.to(row_ptr.dtype.element_ty))
    else:
        tl.store(row_ptr + columns, x.to(row_ptr.dtype.element_ty), mask=columns < COLS)


@triton.jit
def pair_sum(x, LEVELS: tl.constexpr):
    """Sum of x [2**LEVELS] as the tree of adjacent pairs."""
    for _ in tl.static_range(LEVELS - 1):
        x = tl.sum(tl.reshape(x, (x.shape[0] // 2, 2)), axis=1)
    return tl.sum(x, axis=0)


@triton.jit
def inverse_rms(square_sum, COLS: tl.constexpr, eps):
    """1 / sqrt(square_sum / COLS + eps), each step an IEEE rounding."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square_sum, COLS * 1.0) + eps))
