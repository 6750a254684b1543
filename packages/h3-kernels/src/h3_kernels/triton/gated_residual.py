"""CUDA kernels of `nodes.gated_residual`: plain, gated, and gated then normalised and modulated in one launch.

Elementwise in fp32 with one rounding of each stored tensor. The fused forward normalises the rounded residual and
the fused backward (`rms_norm.norm_backward` with a residual) rounds where autograd would between the two nodes, so
both have the bits of the two nodes one after the other. Table gradients take the order of `sum_rows.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from h3_kernels.triton.rms_norm import modulation_gradients, norm_backward
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
from h3_kernels.triton.sum_rows import sum_rows_by_index

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def gated_residual_kernel(
    y_ptr, x_ptr, gate_ptr, branch_ptr, index_ptr, y_stride, x_stride, gate_stride, branch_stride,
    RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    COLS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """One row per program; without RESIDUAL it is the backward, gate[index] * dy."""
    row = tl.program_id(0).to(tl.int64)
    if GATED:
        gate_ptr += tl.load(index_ptr + row) * gate_stride
    out = ()
    for i in tl.static_range(CHUNKS):
        y = load_chunk(branch_ptr + row * branch_stride, i, COLS, CHUNK)
        if GATED:
            y = load_chunk(gate_ptr, i, COLS, CHUNK) * y
        if RESIDUAL:
            y = load_chunk(x_ptr + row * x_stride, i, COLS, CHUNK) + y
        out = out + (y,)
    for i in tl.static_range(CHUNKS):
        store_chunk(y_ptr + row * y_stride, out[i], i, COLS, CHUNK)


@triton.jit
def gated_residual_norm_kernel(
    y_ptr, h_ptr, x_ptr, gate_ptr, branch_ptr, weight_ptr, shift_ptr, scale_ptr, index_ptr,
    y_stride, h_stride, x_stride, gate_stride, branch_stride, shift_stride, scale_stride, eps,
    COLS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LEVELS: tl.constexpr, STORE_LAST: tl.constexpr,
):  # fmt: skip
    """One row per program: the new residual y and its modulated norm h. STORE_LAST as in `rms_norm_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(index_ptr + row)
    gate_ptr += index * gate_stride
    shift_ptr += index * shift_stride
    scale_ptr += index * scale_stride
    x = ()
    for i in tl.static_range(CHUNKS):
        branch = load_chunk(gate_ptr, i, COLS, CHUNK) * load_chunk(
            branch_ptr + row * branch_stride, i, COLS, CHUNK
        )
        y = load_chunk(x_ptr + row * x_stride, i, COLS, CHUNK) + branch
        if not STORE_LAST:
            store_chunk(y_ptr + row * y_stride, y, i, COLS, CHUNK)
        x = x + (y.to(y_ptr.dtype.element_ty).to(tl.float32),)
    if STORE_LAST:
        for i in tl.static_range(CHUNKS):
            store_chunk(y_ptr + row * y_stride, x[i], i, COLS, CHUNK)
    squares = x[0] * x[0]
    for i in tl.static_range(1, CHUNKS):
        squares += x[i] * x[i]
    r = inverse_rms(pair_sum(squares, LEVELS), COLS, eps)
    out = ()
    for i in tl.static_range(CHUNKS):
        n = x[i] * r * load_chunk(weight_ptr, i, COLS, CHUNK)
        h = n * (1.0 + load_chunk(scale_ptr, i, COLS, CHUNK)) + load_chunk(shift_ptr, i, COLS, CHUNK)
        if STORE_LAST:
            out = out + (h,)
        else:
            store_chunk(h_ptr + row * h_stride, h, i, COLS, CHUNK)
    if STORE_LAST:
        for i in tl.static_range(CHUNKS):
            store_chunk(h_ptr + row * h_stride, out[i], i, COLS, CHUNK)


def _gated(x: Tensor | None, gate: Tensor | None, branch: Tensor, index: Tensor | None) -> Tensor:
    y = torch.empty(branch.shape, dtype=branch.dtype, device=branch.device)
    if branch.shape[0]:
        gated_residual_kernel[(branch.shape[0],)](
            y, x, gate, branch, index, y.stride(0), row_stride(x), row_stride(gate), branch.stride(0),
            RESIDUAL=x is not None, GATED=gate is not None, **chunking(branch.shape[1]), **options(branch.shape[0]),
        )  # fmt: skip
    return y


def _gate_gradient(dy: Tensor, branch: Tensor, gate: Tensor, index: Tensor, order: Tensor | None) -> Tensor:
    return sum_rows_by_index(dy.float() * branch.float(), index, gate.shape[0], order).to(gate.dtype)


@launcher
def launch_residual(x: Tensor, branch: Tensor) -> Tensor:
    """See `nodes.gated_residual.residual`."""
    return _gated(x, None, branch, None)


def launch_residual_backward(
    dy: Tensor, x: Tensor, branch: Tensor, *, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of (x, branch)."""
    return dy if needs[0] else None, dy if needs[1] else None


@launcher
def launch_gated_residual(
    x: Tensor, gate: Tensor, branch: Tensor, index: Tensor, order: Tensor | None
) -> Tensor:
    """See `nodes.gated_residual.gated_residual`."""
    return _gated(x, gate, branch, index)


@launcher
def launch_gated_residual_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    branch: Tensor,
    index: Tensor,
    order: Tensor | None,
    *,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of (x, gate, branch, index, order)."""
    dgate = _gate_gradient(dy, branch, gate, index, order) if needs[1] else None
    dbranch = _gated(None, gate, dy, index) if needs[2] else None
    return dy if needs[0] else None, dgate, dbranch, None, None


@launcher
def launch_gated_residual_norm(
    x: Tensor,
    gate: Tensor,
    branch: Tensor,
    weight: Tensor,
    shift: Tensor,
    scale: Tensor,
    index: Tensor,
    order: Tensor | None,
    *,
    eps: float,
) -> tuple[Tensor, ...]:
    """(y, h) of `nodes.gated_residual.gated_residual_norm`, and y again, which its backward keeps."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = torch.empty_like(y)
    if x.shape[0]:
        gated_residual_norm_kernel[(x.shape[0],)](
            y, h, x, gate, branch, weight, shift, scale, index,
            y.stride(0), h.stride(0), x.stride(0), gate.stride(0), branch.stride(0), shift.stride(0), scale.stride(0),
            eps, STORE_LAST=x.shape[0] < FEW_ROWS, **chunking(x.shape[1]), **options(x.shape[0]),
        )  # fmt: skip
    return y, h, y


@launcher
def launch_gated_residual_norm_backward(
    dy: Tensor,
    dh: Tensor,
    x: Tensor,
    gate: Tensor,
    branch: Tensor,
    weight: Tensor,
    shift: Tensor,
    scale: Tensor,
    index: Tensor,
    order: Tensor | None,
    y: Tensor,
    *,
    needs: tuple[bool, ...],
    eps: float,
) -> tuple[Tensor | None, ...]:
    """Gradients of (x, gate, branch, weight, shift, scale, index, order)."""
    dx, dbranch, *terms = norm_backward(dh, y, weight, scale, index, eps, (needs[3], needs[5]), (dy, gate))
    dgate = _gate_gradient(dx, branch, gate, index, order) if needs[1] else None
    tables = modulation_gradients(dh, weight, shift, scale, index, order, (terms[0], terms[1]), needs[4])
    return dx if needs[0] else None, dgate, dbranch if needs[2] else None, *tables, None, None
