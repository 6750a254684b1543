"""CUDA kernels of `nodes.qk_norm_rope`: per-head RMSNorm of q and k and the rotary embedding in one launch.

q and k are read where the qkv projection left them (any row and head stride) and written once. The expressions are
those of the node's written order, fp32 with one rounding. A head of D dimensions is rotated in its first 2 * HALF,
dimension d with d + HALF; MiniMax-H3 has D = 128, HALF = 48, so 96..127 pass through. The kernel splits a head into
two vectors of D / 2 lanes that hold the two members of each pair, a = [0..47, 96..111] and b = [48..95, 112..127]:
every dimension is loaded once and both members of a pair sit in one thread. (HALF = 0 splits the head in its two
halves.)

Order of a head's sum: f(a) + f(b) lane by lane; then Triton's reduction of D / 2 lanes held 8 to a thread, first within
threads, then between them by shuffles. It is fixed by HEADS, WARPS and 16-byte alignment, which the launchers ensure,
and so by no other head, row, stride or position. (Writing the tree out, as `rows.py` does, costs the backward half its
speed: the compiler then moves whole tiles between layouts.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from h3_kernels.nodes._order import sum_heads
from h3_kernels.triton.rows import inverse_rms, launcher
from h3_kernels.triton.sum_rows import sum_rows

if TYPE_CHECKING:
    from torch import Tensor

HEADS = 8
WARPS = 1
"""Heads of one step of a program (56 heads are 7 steps) and its warps; part of the bits. Fastest of five on an H200."""

ONE_PROGRAM_A_ROW = 512
"""Rows from which a program takes all heads of its row; with fewer, more programs hide more latency."""


@triton.jit
def lane_dims(D: tl.constexpr, HALF: tl.constexpr):
    """Dimensions held by the lanes of a and of b, and which lanes rotate."""
    lane = tl.arange(0, D // 2)
    rotates = lane < HALF
    return tl.where(rotates, lane, lane + HALF), tl.where(rotates, lane + HALF, lane + D // 2), rotates


@triton.jit
def load_angles(table_row, rotates, D: tl.constexpr, HALF: tl.constexpr):
    """cos and sin [1, D / 2] of one row; 1 and 0 where a lane passes through."""
    lane = tl.arange(0, D // 2)
    # One return: the compiler visits what follows a return inside an `if`, where there is no table to load from.
    if HALF == 0:
        cos = tl.full((D // 2,), 1.0, tl.float32)
        sin = tl.zeros((D // 2,), tl.float32)
    else:
        cos = tl.load(table_row + lane, mask=rotates, other=1.0).to(tl.float32)
        sin = tl.load(table_row + HALF + lane, mask=rotates, other=0.0).to(tl.float32)
    return cos[None, :], sin[None, :]


@triton.jit
def norm_rope_heads(
    y_row, x_row, weight_ptr, table_row, y_head, x_head, heads, eps,
    D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """This program's heads of one row of q or of k."""
    dim_a, dim_b, rotates = lane_dims(D, HALF)
    weight_a = tl.load(weight_ptr + dim_a).to(tl.float32)[None, :]
    weight_b = tl.load(weight_ptr + dim_b).to(tl.float32)[None, :]
    cos, sin = load_angles(table_row, rotates, D, HALF)
    for first in tl.range(tl.program_id(2) * HEADS, heads, HEADS * tl.num_programs(2)):
        head = (first + tl.arange(0, HEADS))[:, None]
        live = head < heads
        a = tl.load(x_row + head * x_head + dim_a[None, :], mask=live, other=0.0).to(tl.float32)
        b = tl.load(x_row + head * x_head + dim_b[None, :], mask=live, other=0.0).to(tl.float32)
        r = inverse_rms(tl.sum(a * a + b * b, axis=1), D, eps)[:, None]
        a = a * r * weight_a
        b = b * r * weight_b
        rotated_a = tl.where(rotates[None, :], a * cos - b * sin, a)
        rotated_b = tl.where(rotates[None, :], b * cos + a * sin, b)
        dtype = y_row.dtype.element_ty
        tl.store(y_row + head * y_head + dim_a[None, :], rotated_a.to(dtype), mask=live)
        tl.store(y_row + head * y_head + dim_b[None, :], rotated_b.to(dtype), mask=live)


@triton.jit
def qk_norm_rope_kernel(
    q_out_ptr, k_out_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, table_ptr,
    q_out_row, q_out_head, k_out_row, k_out_head, q_row, q_head, k_row, k_head, table_row, heads, eps,
    D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Program (row, 0, i) takes q, program (row, 1, i) takes k; i strides over groups of HEADS heads."""
    row = tl.program_id(0).to(tl.int64)
    table = table_ptr
    if HALF > 0:
        table += row * table_row
    if tl.program_id(1) == 0:
        norm_rope_heads(
            q_out_ptr + row * q_out_row, q_ptr + row * q_row, q_weight_ptr, table, q_out_head, q_head, heads, eps,
            D, HALF, HEADS,
        )  # fmt: skip
    else:
        norm_rope_heads(
            k_out_ptr + row * k_out_row, k_ptr + row * k_row, k_weight_ptr, table, k_out_head, k_head, heads, eps,
            D, HALF, HEADS,
        )  # fmt: skip


@triton.jit
def norm_rope_heads_backward(
    dx_row, term_row, dy_row, x_row, weight_ptr, table_row, dx_head, dy_head, x_head, heads, eps,
    TERM: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Gradient of this program's heads of one row of q or of k; with TERM also the weight's terms, fp32."""
    dim_a, dim_b, rotates = lane_dims(D, HALF)
    weight_a = tl.load(weight_ptr + dim_a).to(tl.float32)[None, :]
    weight_b = tl.load(weight_ptr + dim_b).to(tl.float32)[None, :]
    cos, sin = load_angles(table_row, rotates, D, HALF)
    for first in tl.range(tl.program_id(2) * HEADS, heads, HEADS * tl.num_programs(2)):
        head = (first + tl.arange(0, HEADS))[:, None]
        live = head < heads
        a = tl.load(x_row + head * x_head + dim_a[None, :], mask=live, other=0.0).to(tl.float32)
        b = tl.load(x_row + head * x_head + dim_b[None, :], mask=live, other=0.0).to(tl.float32)
        dy_a = tl.load(dy_row + head * dy_head + dim_a[None, :], mask=live, other=0.0).to(tl.float32)
        dy_b = tl.load(dy_row + head * dy_head + dim_b[None, :], mask=live, other=0.0).to(tl.float32)
        r = inverse_rms(tl.sum(a * a + b * b, axis=1), D, eps)[:, None]
        a = a * r
        b = b * r
        g_a = tl.where(rotates[None, :], dy_a * cos + dy_b * sin, dy_a)
        g_b = tl.where(rotates[None, :], dy_b * cos - dy_a * sin, dy_b)
        if TERM:
            tl.store(term_row + head * D + dim_a[None, :], g_a * a, mask=live)
            tl.store(term_row + head * D + dim_b[None, :], g_b * b, mask=live)
        g_a = g_a * weight_a
        g_b = g_b * weight_b
        mean = tl.div_rn(tl.sum(g_a * a + g_b * b, axis=1), D * 1.0)[:, None]
        dtype = dx_row.dtype.element_ty
        tl.store(dx_row + head * dx_head + dim_a[None, :], ((g_a - a * mean) * r).to(dtype), mask=live)
        tl.store(dx_row + head * dx_head + dim_b[None, :], ((g_b - b * mean) * r).to(dtype), mask=live)


@triton.jit
def qk_norm_rope_backward_kernel(
    dq_ptr, dk_ptr, q_term_ptr, k_term_ptr, dq_out_ptr, dk_out_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, table_ptr,
    dq_row, dq_head, dk_row, dk_head, dq_out_row, dq_out_head, dk_out_row, dk_out_head,
    q_row, q_head, k_row, k_head, table_row, heads, eps, Q_TERM: tl.constexpr, K_TERM: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Program (row, 0, i) takes q, program (row, 1, i) takes k; i strides over groups of HEADS heads."""
    row = tl.program_id(0).to(tl.int64)
    table = table_ptr
    if HALF > 0:
        table += row * table_row
    if Q_TERM:
        q_term_ptr += row * heads * D
    if K_TERM:
        k_term_ptr += row * heads * D
    if tl.program_id(1) == 0:
        norm_rope_heads_backward(
            dq_ptr + row * dq_row, q_term_ptr, dq_out_ptr + row * dq_out_row, q_ptr + row * q_row, q_weight_ptr, table,
            dq_head, dq_out_head, q_head, heads, eps, Q_TERM, D, HALF, HEADS,
        )  # fmt: skip
    else:
        norm_rope_heads_backward(
            dk_ptr + row * dk_row, k_term_ptr, dk_out_ptr + row * dk_out_row, k_ptr + row * k_row, k_weight_ptr, table,
            dk_head, dk_out_head, k_head, heads, eps, K_TERM, D, HALF, HEADS,
        )  # fmt: skip


@launcher
def launch_qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    table: Tensor | None,
    order: Tensor | None,
    *,
    eps: float,
    groups: int,
) -> tuple[Tensor, Tensor]:
    """See `nodes.qk_norm_rope.qk_norm_rope`. D must be a power of two of at least 16."""
    q, k = _aligned(q), _aligned(k)
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if q.shape[0]:
        qk_norm_rope_kernel[_grid(q)](
            q_out, k_out, q, k, q_weight, k_weight, table,
            *_strides(q_out, k_out, q, k), 0 if table is None else table.stride(0), q.shape[1], eps,
            **_head_shape(q, table),
        )  # fmt: skip
    return q_out, k_out


@launcher
def launch_qk_norm_rope_backward(
    dq_out: Tensor,
    dk_out: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    table: Tensor | None,
    order: Tensor | None,
    *,
    needs: tuple[bool, ...],
    eps: float,
    groups: int,
) -> tuple[Tensor | None, ...]:
    """Gradients of (q, k, q_weight, k_weight, table, order); the weights' sum over rows, then over heads."""
    q, k, dq_out, dk_out = (_aligned(x) for x in (q, k, dq_out, dk_out))
    dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    terms = [
        torch.empty(q.shape, dtype=torch.float32, device=q.device) if need else None for need in needs[2:4]
    ]
    if q.shape[0]:
        qk_norm_rope_backward_kernel[_grid(q)](
            dq, dk, *terms, dq_out, dk_out, q, k, q_weight, k_weight, table,
            *_strides(dq, dk, dq_out, dk_out, q, k), 0 if table is None else table.stride(0), q.shape[1], eps,
            Q_TERM=needs[2], K_TERM=needs[3], **_head_shape(q, table),
        )  # fmt: skip
    weights = (
        _weight_gradient(t, order, w, groups) for t, w in zip(terms, (q_weight, k_weight), strict=True)
    )
    return dq if needs[0] else None, dk if needs[1] else None, *weights, None, None


def _weight_gradient(
    terms: Tensor | None, order: Tensor | None, weight: Tensor, groups: int
) -> Tensor | None:
    if terms is None:
        return None
    per_head = sum_rows(terms.flatten(1), order).view(terms.shape[1:])
    return sum_heads(per_head, groups).to(weight.dtype)


def _aligned(x: Tensor) -> Tensor:
    """x if its heads can be read 16 bytes at a time, which the order of their sums relies on; else a copy."""
    strided = x.stride(2) == 1 and x.stride(0) % 16 == 0 and x.stride(1) % 16 == 0 and x.data_ptr() % 16 == 0
    return x if strided else x.clone(memory_format=torch.contiguous_format)


def _grid(q: Tensor) -> tuple[int, int, int]:
    groups = triton.cdiv(q.shape[1], HEADS)
    return q.shape[0], 2, 1 if q.shape[0] >= ONE_PROGRAM_A_ROW else groups


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]


def _head_shape(q: Tensor, table: Tensor | None) -> dict[str, object]:
    dims = q.shape[2]
    return {
        "D": dims,
        "HALF": 0 if table is None else table.shape[1] // 2,
        "HEADS": HEADS,
        "num_warps": WARPS,
        "num_stages": 1,
        "enable_fp_fusion": False,
    }
