"""Backward of attention in one fixed order, without atomics: each gradient is a chain of its own.

From the forward's out and lse (natural log, any provider), for each document and head, in bf16 products and fp32
sums:

    delta_i = sum over d of dout_i,d * out_i,d              tree of adjacent pairs over the head's dimensions
    P_ij = exp(scale * q_i.k_j - lse_i);  dP_ij = dout_i.v_j;  dS_ij = P_ij * (dP_ij - delta_i)
    dv_j = chain over ascending i of bf16(P_ij) * dout_i
    dk_j = chain over ascending i of bf16(dS_ij) * q_i, times scale
    dq_i = chain over ascending j of bf16(dS_ij) * k_j, times scale

A chain is one fp32 accumulator that consumes the document's rows in ascending 16-wide MMA steps from its first row,
so its bits do not depend on the tile sizes below (measured: docs/measured-facts-nodes.md), on the head split, on
other documents or on padding. dq is a second kernel that computes P and dS again: 7 products instead of the 5 of
kernels that add dq with atomics or in per-SM partial sums, whose order depends on heads x documents. The only
workspace is delta.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from h3_kernels.triton.attention import LOG2_E, descriptor, load_rows, rows_view, store_rows

if TYPE_CHECKING:
    from torch import Tensor

DKDV_TILE = {"KEYS": 64, "ROWS": 64, "num_warps": 4, "num_stages": 2}
DQ_TILE = {"ROWS": 128, "KEYS": 64, "num_warps": 8, "num_stages": 3}
"""Tiles: speed only, no bit depends on them. The fastest of seven each on an H200, 8349 rows: 574 and 676 TFLOP/s."""

DELTA_HEADS = 8


@triton.jit
def delta_kernel(
    delta_ptr, out_ptr, dout_ptr, rows, heads, out_stride, dout_stride,
    D: tl.constexpr, HEADS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """All heads of one row: delta [heads, T]."""
    row = tl.program_id(0).to(tl.int64)
    for first in tl.range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        live = (head < heads)[:, None]
        at = head[:, None] * D + tl.arange(0, D)[None, :]
        out = tl.load(out_ptr + row * out_stride + at, mask=live, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + row * dout_stride + at, mask=live, other=0.0).to(tl.float32)
        x = out * dout
        for _ in tl.static_range(LEVELS - 1):
            x = tl.sum(tl.reshape(x, (HEADS, x.shape[1] // 2, 2)), axis=2)
        tl.store(delta_ptr + head.to(tl.int64) * rows + row, tl.sum(x, axis=1), mask=head < heads)


@triton.jit
def dkdv_step(k, v, q, dout, lse, delta, dk, dv, live, scale_log2, ROWS: tl.constexpr, TAIL: tl.constexpr):
    """One block of query rows; with TAIL only its first `live` rows count."""
    p = tl.math.exp2(tl.fma(tl.dot(k, q.T), scale_log2, -lse[None, :] * 1.4426950408889634))
    if TAIL:
        p = tl.where(tl.arange(0, ROWS)[None, :] < live, p, 0.0)
    dv = tl.dot(p.to(q.dtype), dout, dv)
    ds = p * (tl.dot(v, dout.T) - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def dkdv_kernel(
    q_desc, k_desc, v_desc, dout_desc, q_ptr, dout_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, bound_ptr,
    rows, q_stride, dout_stride, dk_stride, dv_stride, scale, scale_log2,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Program (block of keys, head, document): dk and dv of its keys."""
    head = tl.program_id(1)
    column = head * D
    start = tl.load(bound_ptr + tl.program_id(2))
    end = tl.load(bound_ptr + tl.program_id(2) + 1)
    key = start + tl.program_id(0) * KEYS
    if key >= end:
        return
    lse_ptr += head.to(tl.int64) * rows
    delta_ptr += head.to(tl.int64) * rows
    k = k_desc.load([key, column])
    v = v_desc.load([key, column])
    dk = tl.zeros((KEYS, D), tl.float32)
    dv = tl.zeros((KEYS, D), tl.float32)
    tail = start + (end - start) // ROWS * ROWS
    for row in tl.range(start, tail, ROWS):
        q = q_desc.load([row, column])
        dout = dout_desc.load([row, column])
        at = row + tl.arange(0, ROWS)
        lse = tl.load(lse_ptr + at)
        delta = tl.load(delta_ptr + at)
        dk, dv = dkdv_step(k, v, q, dout, lse, delta, dk, dv, ROWS, scale_log2, ROWS, False)
    if tail < end:
        q = load_rows(q_ptr, tail, q_stride, column, end, ROWS, D)
        dout = load_rows(dout_ptr, tail, dout_stride, column, end, ROWS, D)
        at = tail + tl.arange(0, ROWS)
        lse = tl.load(lse_ptr + at, mask=at < end, other=0.0)
        delta = tl.load(delta_ptr + at, mask=at < end, other=0.0)
        dk, dv = dkdv_step(k, v, q, dout, lse, delta, dk, dv, end - tail, scale_log2, ROWS, True)
    store_rows(dk_ptr, dk * scale, key, dk_stride, column, end, KEYS, D)
    store_rows(dv_ptr, dv, key, dv_stride, column, end, KEYS, D)


@triton.jit
def dq_step(q, dout, k, v, lse, delta, dq, live, scale_log2, KEYS: tl.constexpr, TAIL: tl.constexpr):
    """One block of keys; with TAIL only its first `live` keys count."""
    p = tl.math.exp2(tl.fma(tl.dot(q, k.T), scale_log2, -lse[:, None] * 1.4426950408889634))
    ds = p * (tl.dot(dout, v.T) - delta[:, None])
    if TAIL:
        ds = tl.where(tl.arange(0, KEYS)[None, :] < live, ds, 0.0)
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit
def dq_kernel(
    q_desc, k_desc, v_desc, dout_desc, k_ptr, v_ptr, dq_ptr, lse_ptr, delta_ptr, bound_ptr,
    rows, k_stride, v_stride, dq_stride, scale, scale_log2,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Program (block of query rows, head, document): dq of its rows."""
    head = tl.program_id(1)
    column = head * D
    start = tl.load(bound_ptr + tl.program_id(2))
    end = tl.load(bound_ptr + tl.program_id(2) + 1)
    row = start + tl.program_id(0) * ROWS
    if row >= end:
        return
    at = row + tl.arange(0, ROWS)
    lse = tl.load(lse_ptr + head.to(tl.int64) * rows + at, mask=at < end, other=0.0)
    delta = tl.load(delta_ptr + head.to(tl.int64) * rows + at, mask=at < end, other=0.0)
    q = q_desc.load([row, column])
    dout = dout_desc.load([row, column])
    dq = tl.zeros((ROWS, D), tl.float32)
    tail = start + (end - start) // KEYS * KEYS
    for key in tl.range(start, tail, KEYS):
        k = k_desc.load([key, column])
        v = v_desc.load([key, column])
        dq = dq_step(q, dout, k, v, lse, delta, dq, KEYS, scale_log2, KEYS, False)
    if tail < end:
        k = load_rows(k_ptr, tail, k_stride, column, end, KEYS, D)
        v = load_rows(v_ptr, tail, v_stride, column, end, KEYS, D)
        dq = dq_step(q, dout, k, v, lse, delta, dq, end - tail, scale_log2, KEYS, True)
    store_rows(dq_ptr, dq * scale, row, dq_stride, column, end, ROWS, D)


def attention_delta(dout: Tensor, out: Tensor) -> Tensor:
    """delta [heads, T] fp32 of dout and out [T, heads, D]."""
    rows, heads, dims = out.shape
    dout, out = rows_view(dout), rows_view(out)
    delta = torch.empty((heads, rows), dtype=torch.float32, device=out.device)
    delta_kernel[(rows,)](
        delta, out, dout, rows, heads, out.stride(0), dout.stride(0),
        D=dims, HEADS=DELTA_HEADS, LEVELS=dims.bit_length() - 1, num_warps=4, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
    return delta


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    needs: tuple[bool, ...] = (True, True, True),
    tiles: tuple[dict[str, int], dict[str, int]] = (DKDV_TILE, DQ_TILE),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dq, dk, dv) [T, heads, D] bf16; all but lse [heads, T] fp32 and cu_seqlens int32 are [T, heads, D] bf16."""
    rows, heads, dims = q.shape
    dq, dk, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
    if rows:
        delta = attention_delta(dout, out)
        q, k, v, dout = (rows_view(x) for x in (q, k, v, dout))
        documents = cu_seqlens.shape[0] - 1
        scales = (scale, scale * LOG2_E)
        if needs[1] or needs[2]:
            tile = tiles[0]
            by_row, by_key = (
                [descriptor(x, tile[n], dims) for x in xs]
                for n, xs in (("ROWS", (q, dout)), ("KEYS", (k, v)))
            )
            dkdv_kernel[(triton.cdiv(max_seqlen, tile["KEYS"]), heads, documents)](
                by_row[0], *by_key, by_row[1], q, dout, dk, dv, lse, delta, cu_seqlens,
                rows, q.stride(0), dout.stride(0), dk.stride(0), dv.stride(0), *scales,
                D=dims, **tile, enable_fp_fusion=False,
            )  # fmt: skip
        if needs[0]:
            tile = tiles[1]
            by_row, by_key = (
                [descriptor(x, tile[n], dims) for x in xs]
                for n, xs in (("ROWS", (q, dout)), ("KEYS", (k, v)))
            )
            dq_kernel[(triton.cdiv(max_seqlen, tile["ROWS"]), heads, documents)](
                by_row[0], *by_key, by_row[1], k, v, dq, lse, delta, cu_seqlens,
                rows, k.stride(0), v.stride(0), dq.stride(0), *scales,
                D=dims, **tile, enable_fp_fusion=False,
            )  # fmt: skip
    return dq if needs[0] else None, dk if needs[1] else None, dv if needs[2] else None
