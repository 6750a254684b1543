"""CUDA implementation of `nodes.attention`: the portable forward and the entry points of forward and backward.

Schedule of the forward, for each (row, head): the document's keys in ascending blocks of KEYS rows counted from its
first key, an online softmax over the blocks (fp32 maximum, sum and accumulator; probabilities rounded to bf16 for
the second product), one division and one rounding at the end. A program owns ROWS query rows of one head of one
document and reads nothing of another, so no bit depends on the head split, on the documents packed beside it, on
padding, or on which query rows share its block. Rows of a block past the document's end are computed and not
stored; keys past it are masked, their loads too, so not even a NaN there is seen.

A library kernel with a proof is faster (`attention_providers`); the backward is `attention_backward` whichever
forward ran.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from h3_kernels.triton.rows import launcher
from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from torch import Tensor

ROWS = 64
KEYS = 64
"""Blocks of query rows and of keys. KEYS is part of the bits, ROWS is not. 64 x 64 on 4 warps and 3 stages is the
fastest of six on an H200 (566 TFLOP/s at 8349 rows; 128 x 64 on 8 warps 514, 128 x 128 402)."""

OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@triton.jit
def load_rows(base, row, stride, column, end, ROWS: tl.constexpr, D: tl.constexpr):
    """ROWS rows of one head from `row` on, zero from `end` on."""
    rows = row + tl.arange(0, ROWS)
    offsets = rows.to(tl.int64)[:, None] * stride + (column + tl.arange(0, D))[None, :]
    return tl.load(base + offsets, mask=(rows < end)[:, None], other=0.0)


@triton.jit
def store_rows(base, x, row, stride, column, end, ROWS: tl.constexpr, D: tl.constexpr):
    """Store x [ROWS, D] rounded to the tensor's dtype, rows from `end` on left out."""
    rows = row + tl.arange(0, ROWS)
    offsets = rows.to(tl.int64)[:, None] * stride + (column + tl.arange(0, D))[None, :]
    tl.store(base + offsets, x.to(base.dtype.element_ty), mask=(rows < end)[:, None])


@triton.jit
def attend(q, k, v, acc, top, total, live, scale_log2, KEYS: tl.constexpr, TAIL: tl.constexpr):
    """One block of keys of the online softmax; with TAIL only its first `live` keys count."""
    s = tl.dot(q, k.T)
    if TAIL:
        s = tl.where(tl.arange(0, KEYS)[None, :] < live, s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1) * scale_log2)
    p = tl.math.exp2(tl.fma(s, scale_log2, -new_top[:, None]))
    carry = tl.math.exp2(top - new_top)
    total = total * carry + tl.sum(p, 1)
    acc = tl.dot(p.to(q.dtype), v, acc * carry[:, None])
    return acc, new_top, total


@triton.jit
def attention_kernel(
    q_desc, k_desc, v_desc, k_ptr, v_ptr, out_ptr, lse_ptr, bound_ptr, rows, k_stride, v_stride, out_stride, scale_log2,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Program (block of query rows, head, document)."""
    column = tl.program_id(1) * D
    start = tl.load(bound_ptr + tl.program_id(2))
    end = tl.load(bound_ptr + tl.program_id(2) + 1)
    row = start + tl.program_id(0) * ROWS
    if row >= end:
        return
    q = q_desc.load([row, column])
    acc = tl.zeros((ROWS, D), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    tail = start + (end - start) // KEYS * KEYS
    for key in tl.range(start, tail, KEYS):
        k = k_desc.load([key, column])
        v = v_desc.load([key, column])
        acc, top, total = attend(q, k, v, acc, top, total, KEYS, scale_log2, KEYS, False)
    if tail < end:
        k = load_rows(k_ptr, tail, k_stride, column, end, KEYS, D)
        v = load_rows(v_ptr, tail, v_stride, column, end, KEYS, D)
        acc, top, total = attend(q, k, v, acc, top, total, end - tail, scale_log2, KEYS, True)
    store_rows(out_ptr, acc / total[:, None], row, out_stride, column, end, ROWS, D)
    at = row + tl.arange(0, ROWS)
    lse_ptr += tl.program_id(1).to(tl.int64) * rows
    tl.store(lse_ptr + at, (top + tl.log2(total)) * 0.6931471805599453, mask=at < end)


def rows_view(x: Tensor) -> Tensor:
    """x [T, heads, D] with any row stride as [T, heads * D].

    Copied if its heads do not lie one after the other, or where the copy engine could not read it (16-byte steps).
    """
    in_order = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    if not in_order or x.data_ptr() % 16 or x.stride(0) * x.element_size() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.as_strided((x.shape[0], x.shape[1] * x.shape[2]), (x.stride(0), 1))


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Block loads of [rows, columns] from a `rows_view`; zero outside the tensor."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The portable forward: q, k, v [T, heads, D] bf16 -> (out [T, heads, D], lse [heads, T] fp32, natural log)."""
    rows, heads, dims = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, rows), dtype=torch.float32, device=q.device)
    if rows:
        q, k, v = rows_view(q), rows_view(k), rows_view(v)
        attention_kernel[(triton.cdiv(max_seqlen, ROWS), heads, cu_seqlens.shape[0] - 1)](
            descriptor(q, ROWS, dims), descriptor(k, KEYS, dims), descriptor(v, KEYS, dims), k, v,
            out, lse, cu_seqlens, rows, k.stride(0), v.stride(0), out.stride(0), scale * LOG2_E,
            D=dims, ROWS=ROWS, KEYS=KEYS, **OPTIONS,
        )  # fmt: skip
    return out, lse


@launcher
def launch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int,
    scale: float,
    provider: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, out, lse): the node's output, and what its backward keeps. See `nodes.attention.attention`.

    `provider` names a forward of `attention_providers`; "auto" takes the fastest one that proves its bits here.
    """
    from h3_kernels.attention_providers import AttentionCall, choose

    chosen = choose(AttentionCall.of(q), provider, q.device)
    out, lse = chosen.forward(q, k, v, cu_seqlens, max_seqlen, scale)
    return out, out, lse


@launcher
def launch_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    needs: tuple[bool, ...],
    max_seqlen: int,
    scale: float,
    provider: str = "auto",
) -> tuple[Tensor | None, ...]:
    """Gradients of (q, k, v, cu_seqlens)."""
    from h3_kernels.triton.attention_backward import attention_backward

    return *attention_backward(dout, q, k, v, out, lse, cu_seqlens, max_seqlen, scale, needs), None
