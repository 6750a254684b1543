"""CUDA kernels of `nodes.rms_norm`: RMSNorm, alone or fused with the indexed modulation; one read and one write.

The expressions are those of the node's written order, all in fp32 with one rounding to x's dtype; the row sums take
the order of `rows.py`. The backward recomputes the row's statistics from x, so nothing is kept but x. The gradients
of the weight and of the tables sum fp32 terms, written only when asked for, in the order of `sum_rows.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from h3_kernels.triton.rows import (
    FEW_ROWS,
    chunking,
    inverse_rms,
    launcher,
    load_chunk,
    options,
    pair_sum,
    row_stride,
    store_chunk,
)
from h3_kernels.triton.sum_rows import sum_rows, sum_rows_by_index

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def rms_norm_kernel(
    y_ptr, x_ptr, weight_ptr, shift_ptr, scale_ptr, index_ptr, y_stride, x_stride, shift_stride, scale_stride, eps,
    MODULATED: tl.constexpr, COLS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LEVELS: tl.constexpr,
    STORE_LAST: tl.constexpr,
):  # fmt: skip
    """One row per program. With STORE_LAST no load waits behind a store, for more registers."""
    row = tl.program_id(0).to(tl.int64)
    if MODULATED:
        index = tl.load(index_ptr + row)
        shift_ptr += index * shift_stride
        scale_ptr += index * scale_stride
    x = ()
    for i in tl.static_range(CHUNKS):
        x = x + (load_chunk(x_ptr + row * x_stride, i, COLS, CHUNK),)
    squares = x[0] * x[0]
    for i in tl.static_range(1, CHUNKS):
        squares += x[i] * x[i]
    r = inverse_rms(pair_sum(squares, LEVELS), COLS, eps)
    out = ()
    for i in tl.static_range(CHUNKS):
        y = x[i] * r * load_chunk(weight_ptr, i, COLS, CHUNK)
        if MODULATED:
            y = y * (1.0 + load_chunk(scale_ptr, i, COLS, CHUNK)) + load_chunk(shift_ptr, i, COLS, CHUNK)
        if STORE_LAST:
            out = out + (y,)
        else:
            store_chunk(y_ptr + row * y_stride, y, i, COLS, CHUNK)
    if STORE_LAST:
        for i in tl.static_range(CHUNKS):
            store_chunk(y_ptr + row * y_stride, out[i], i, COLS, CHUNK)


@triton.jit
def store_weight_terms(
    term_row, dy_row, scale_row, x, r, COLS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Terms of the weight's gradient, fp32: (dy * (1 + scale)) * (x * r); no scale_row without modulation."""
    for i in tl.static_range(CHUNKS):
        dn = load_chunk(dy_row, i, COLS, CHUNK)
        if scale_row is not None:
            dn = dn * (1.0 + load_chunk(scale_row, i, COLS, CHUNK))
        store_chunk(term_row, dn * (x[i] * r), i, COLS, CHUNK)


@triton.jit
def store_scale_terms(
    term_row, dy_row, weight_ptr, x, r, COLS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Terms of the scale table's gradient, fp32: dy * ((x * r) * weight)."""
    for i in tl.static_range(CHUNKS):
        n = x[i] * r * load_chunk(weight_ptr, i, COLS, CHUNK)
        store_chunk(term_row, load_chunk(dy_row, i, COLS, CHUNK) * n, i, COLS, CHUNK)


@triton.jit
def rms_norm_backward_kernel(
    dx_ptr, dbranch_ptr, weight_term_ptr, scale_term_ptr,
    dy_ptr, dout_ptr, x_ptr, weight_ptr, scale_ptr, gate_ptr, index_ptr,
    dx_stride, dbranch_stride, dy_stride, dout_stride, x_stride, scale_stride, gate_stride, eps,
    MODULATED: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT_TERM: tl.constexpr, SCALE_TERM: tl.constexpr,
    COLS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Gradient of one row.

    With RESIDUAL, x is the stored result of a gated residual whose own gradient is `dout`: dx becomes the sum of both
    gradients, each rounded, and `dbranch` = gate[index] * dx, as the two nodes' backwards one after the other.
    """
    row = tl.program_id(0).to(tl.int64)
    if MODULATED:
        index = tl.load(index_ptr + row)
        scale_ptr += index * scale_stride
        if RESIDUAL:
            gate_ptr += index * gate_stride
    x = ()
    g = ()
    for i in tl.static_range(CHUNKS):
        x = x + (load_chunk(x_ptr + row * x_stride, i, COLS, CHUNK),)
        gi = load_chunk(dy_ptr + row * dy_stride, i, COLS, CHUNK)
        if MODULATED:
            gi = gi * (1.0 + load_chunk(scale_ptr, i, COLS, CHUNK))
        g = g + (gi * load_chunk(weight_ptr, i, COLS, CHUNK),)
    squares = x[0] * x[0]
    for i in tl.static_range(1, CHUNKS):
        squares += x[i] * x[i]
    r = inverse_rms(pair_sum(squares, LEVELS), COLS, eps)
    products = g[0] * (x[0] * r)
    for i in tl.static_range(1, CHUNKS):
        products += g[i] * (x[i] * r)
    mean = tl.div_rn(pair_sum(products, LEVELS), COLS * 1.0)
    dtype = dx_ptr.dtype.element_ty
    dx = ()
    gate = ()
    for i in tl.static_range(CHUNKS):
        dxi = (g[i] - x[i] * r * mean) * r
        if RESIDUAL:
            dxi = load_chunk(dout_ptr + row * dout_stride, i, COLS, CHUNK) + dxi.to(dtype).to(tl.float32)
            gate = gate + (load_chunk(gate_ptr, i, COLS, CHUNK),)
        dx = dx + (dxi.to(dtype).to(tl.float32),)
    for i in tl.static_range(CHUNKS):
        store_chunk(dx_ptr + row * dx_stride, dx[i], i, COLS, CHUNK)
        if RESIDUAL:
            store_chunk(dbranch_ptr + row * dbranch_stride, gate[i] * dx[i], i, COLS, CHUNK)
    if WEIGHT_TERM:
        scale_row = scale_ptr if MODULATED else None
        store_weight_terms(
            weight_term_ptr + row * COLS, dy_ptr + row * dy_stride, scale_row, x, r, COLS, CHUNK, CHUNKS
        )
    if SCALE_TERM:
        store_scale_terms(
            scale_term_ptr + row * COLS, dy_ptr + row * dy_stride, weight_ptr, x, r, COLS, CHUNK, CHUNKS
        )


def norm_forward(
    x: Tensor, weight: Tensor, shift: Tensor | None, scale: Tensor | None, index: Tensor | None, eps: float
) -> Tensor:
    """y [T, W] of x's dtype; shift, scale [R, W] and index [T] are None together for the plain norm."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        rms_norm_kernel[(x.shape[0],)](
            y, x, weight, shift, scale, index, y.stride(0), x.stride(0), row_stride(shift), row_stride(scale), eps,
            MODULATED=index is not None, STORE_LAST=x.shape[0] < FEW_ROWS,
            **chunking(x.shape[1]), **options(x.shape[0]),
        )  # fmt: skip
    return y


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    index: Tensor | None,
    eps: float,
    terms: tuple[bool, bool],
    residual: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(dx, d branch, weight terms, scale terms): [T, W], the terms fp32 and only where `terms` asks for them.

    `residual` = (d out, gate) completes the backward of a gated residual that x came from.
    """
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dout, gate = (None, None) if residual is None else residual
    dbranch = None if residual is None else torch.empty_like(dx)
    weight_terms, scale_terms = (
        torch.empty_like(dx, dtype=torch.float32) if term else None for term in terms
    )
    if x.shape[0]:
        rms_norm_backward_kernel[(x.shape[0],)](
            dx, dbranch, weight_terms, scale_terms, dy, dout, x, weight, scale, gate, index,
            dx.stride(0), row_stride(dbranch), dy.stride(0), row_stride(dout), x.stride(0),
            row_stride(scale), row_stride(gate), eps,
            MODULATED=index is not None, RESIDUAL=residual is not None, WEIGHT_TERM=terms[0], SCALE_TERM=terms[1],
            **chunking(x.shape[1]), **options(x.shape[0]),
        )  # fmt: skip
    return dx, dbranch, weight_terms, scale_terms


def modulation_gradients(
    dy: Tensor,
    weight: Tensor,
    shift: Tensor,
    scale: Tensor,
    index: Tensor,
    order: Tensor | None,
    terms: tuple[Tensor | None, Tensor | None],
    needs_shift: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(d weight, d shift, d scale) from the terms of `norm_backward`; None where not asked for."""
    weight_terms, scale_terms = terms
    rows = shift.shape[0]
    dweight = None if weight_terms is None else sum_rows(weight_terms, order).to(weight.dtype)
    dshift = sum_rows_by_index(dy, index, rows, order).to(shift.dtype) if needs_shift else None
    dscale = (
        None if scale_terms is None else sum_rows_by_index(scale_terms, index, rows, order).to(scale.dtype)
    )
    return dweight, dshift, dscale


@launcher
def launch_rms_norm(x: Tensor, weight: Tensor, order: Tensor | None, *, eps: float) -> Tensor:
    """See `nodes.rms_norm.rms_norm`."""
    return norm_forward(x, weight, None, None, None, eps)


@launcher
def launch_rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, order: Tensor | None, *, needs: tuple[bool, ...], eps: float
) -> tuple[Tensor | None, ...]:
    """Gradients of (x, weight, order)."""
    dx, _, terms, _ = norm_backward(dy, x, weight, None, None, eps, (needs[1], False))
    dweight = None if terms is None else sum_rows(terms, order).to(weight.dtype)
    return dx if needs[0] else None, dweight, None


@launcher
def launch_rms_norm_modulate(
    x: Tensor,
    weight: Tensor,
    shift: Tensor,
    scale: Tensor,
    index: Tensor,
    order: Tensor | None,
    *,
    eps: float,
) -> Tensor:
    """See `nodes.rms_norm.rms_norm_modulate`."""
    return norm_forward(x, weight, shift, scale, index, eps)


@launcher
def launch_rms_norm_modulate_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    shift: Tensor,
    scale: Tensor,
    index: Tensor,
    order: Tensor | None,
    *,
    needs: tuple[bool, ...],
    eps: float,
) -> tuple[Tensor | None, ...]:
    """Gradients of (x, weight, shift, scale, index, order)."""
    dx, _, *terms = norm_backward(dy, x, weight, scale, index, eps, (needs[1], needs[3]))
    tables = modulation_gradients(dy, weight, shift, scale, index, order, (terms[0], terms[1]), needs[2])
    return dx if needs[0] else None, *tables, None, None
