"""Backward of attention in one fixed order, without atomics: each gradient is a chain of its own.

From the forward's out and lse (natural log, any provider), for each document and head, in bf16 products and fp32 sums:

    delta_i = sum over d of dout_i,d * out_i,d              tree of adjacent pairs over the head's dimensions
    P_ij = exp(scale * q_i.k_j - lse_i);  dP_ij = dout_i.v_j;  dS_ij = P_ij * (dP_ij - delta_i)
    dv_j = chain over ascending i of bf16(P_ij) * dout_i
    dk_j = chain over ascending i of bf16(dS_ij) * q_i, times scale
    dq_i = chain over ascending j of bf16(dS_ij) * k_j, times scale

A chain is one fp32 accumulator that consumes the document's rows in ascending 16-wide MMA steps from its first row, so
its bits depend neither on the tile sizes below nor on the way dq gets its dS (test_gpu_nodes.py), nor on the head
split, on other documents or on padding.

dk and dv walk the rows of a block of keys, dq walks the keys of a block of rows, so one of them cannot have dS in
registers. Kernels that add dq with atomics or in per-SM partial sums lose the order, or tie it to heads x documents.
Here dS is written to a workspace of at most WORKSPACE bytes, a few heads at a time, and dq is one product of it: 5
products in all. Where not even one head fits (documents near 18,000 rows), dq computes P and dS again: 7 products.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from h3_kernels.triton.attention import LOG2_E, descriptor, load_rows, rows_view, store_rows

if TYPE_CHECKING:
    from torch import Tensor

DKDV_TILE = {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 2}
DQ_TILE = {"ROWS": 256, "KEYS": 64, "num_warps": 8, "num_stages": 4}
RECOMPUTED_DQ_TILE = {"ROWS": 128, "KEYS": 64, "num_warps": 8, "num_stages": 3}
"""Tiles: speed only, no bit depends on them. The two 64 x 64 programs an SM holds overlap exp with products."""

WORKSPACE = 640 << 20
"""Bytes of dS at a time. 4 heads of 8349 rows are 562 MiB, and two full waves of programs on 132 SMs."""

DELTA_HEADS = 8
DELTA_PROGRAMS = 2


@triton.jit
def delta_kernel(
    delta_ptr, out_ptr, dout_ptr, rows, heads, out_stride, dout_stride,
    D: tl.constexpr, HEADS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """delta [heads, T]: program (row, i) strides over groups of HEADS heads of one row."""
    row = tl.program_id(0).to(tl.int64)
    for first in tl.range(tl.program_id(1) * HEADS, heads, HEADS * tl.num_programs(1)):
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
    """One block of query rows, and its dS; with TAIL only its first `live` rows count."""
    s = tl.dot(k, q.T)
    dp = tl.dot(v, dout.T)
    p = tl.math.exp2(tl.fma(s, scale_log2, -lse[None, :] * 1.4426950408889634))
    if TAIL:
        p = tl.where(tl.arange(0, ROWS)[None, :] < live, p, 0.0)
    ds = (p * (dp - delta[None, :])).to(q.dtype)
    dv = tl.dot(p.to(q.dtype), dout, dv)
    dk = tl.dot(ds, q, dk)
    return dk, dv, ds


@triton.jit
def dkdv_kernel(
    q_desc, k_desc, v_desc, dout_desc, ds_desc, q_ptr, dout_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, bound_ptr,
    rows, slots, first_head, q_stride, dout_stride, dk_stride, dv_stride, scale, scale_log2,
    STORE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Program (block of keys, head, document): dk and dv of its keys; with STORE also their dS, [keys, rows].

    A head has `slots` rows of dS; a document's begin KEYS rows later than its keys for every document before it, so
    that the keys a last block has too many fall on no other document's.
    """
    head = first_head + tl.program_id(1)
    column = head * D
    start = tl.load(bound_ptr + tl.program_id(2))
    end = tl.load(bound_ptr + tl.program_id(2) + 1)
    key = start + tl.program_id(0) * KEYS
    if key >= end:
        return
    slot = tl.program_id(1) * slots + key + tl.program_id(2) * KEYS
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
        dk, dv, ds = dkdv_step(k, v, q, dout, lse, delta, dk, dv, ROWS, scale_log2, ROWS, False)
        if STORE:
            ds_desc.store([slot, row - start], ds)
    if tail < end:
        q = load_rows(q_ptr, tail, q_stride, column, end, ROWS, D)
        dout = load_rows(dout_ptr, tail, dout_stride, column, end, ROWS, D)
        at = tail + tl.arange(0, ROWS)
        lse = tl.load(lse_ptr + at, mask=at < end, other=0.0)
        delta = tl.load(delta_ptr + at, mask=at < end, other=0.0)
        dk, dv, ds = dkdv_step(k, v, q, dout, lse, delta, dk, dv, end - tail, scale_log2, ROWS, True)
        if STORE:
            ds_desc.store([slot, tail - start], ds)
    store_rows(dk_ptr, dk * scale, key, dk_stride, column, end, KEYS, D)
    store_rows(dv_ptr, dv, key, dv_stride, column, end, KEYS, D)


@triton.jit
def dq_kernel(
    ds_desc, k_desc, ds_ptr, k_ptr, dq_ptr, bound_ptr, slots, first_head, ds_stride, k_stride, dq_stride, scale,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """Program (block of query rows, head, document): dq of its rows from dS as `dkdv_kernel` stored it."""
    head = first_head + tl.program_id(1)
    column = head * D
    start = tl.load(bound_ptr + tl.program_id(2))
    end = tl.load(bound_ptr + tl.program_id(2) + 1)
    row = tl.program_id(0) * ROWS
    if start + row >= end:
        return
    shift = tl.program_id(1) * slots + tl.program_id(2) * SLOT
    dq = tl.zeros((ROWS, D), tl.float32)
    tail = start + (end - start) // KEYS * KEYS
    for key in tl.range(start, tail, KEYS):
        dq = tl.dot(ds_desc.load([shift + key, row]).T, k_desc.load([key, column]), dq)
    if tail < end:
        ds = load_rows(ds_ptr, shift + tail, ds_stride, row, shift + end, KEYS, ROWS)
        k = load_rows(k_ptr, tail, k_stride, column, end, KEYS, D)
        dq = tl.dot(ds.T, k, dq)
    store_rows(dq_ptr, dq * scale, start + row, dq_stride, column, end, ROWS, D)


@triton.jit
def recomputed_dq_step(
    q, dout, k, v, lse, delta, dq, live, scale_log2, KEYS: tl.constexpr, TAIL: tl.constexpr
):
    """One block of keys; with TAIL only its first `live` keys count."""
    p = tl.math.exp2(tl.fma(tl.dot(q, k.T), scale_log2, -lse[:, None] * 1.4426950408889634))
    ds = p * (tl.dot(dout, v.T) - delta[:, None])
    if TAIL:
        ds = tl.where(tl.arange(0, KEYS)[None, :] < live, ds, 0.0)
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit
def recomputed_dq_kernel(
    q_desc, k_desc, v_desc, dout_desc, k_ptr, v_ptr, dq_ptr, lse_ptr, delta_ptr, bound_ptr,
    rows, k_stride, v_stride, dq_stride, scale, scale_log2, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Program (block of query rows, head, document): dq of its rows, P and dS computed again."""
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
        dq = recomputed_dq_step(q, dout, k, v, lse, delta, dq, KEYS, scale_log2, KEYS, False)
    if tail < end:
        k = load_rows(k_ptr, tail, k_stride, column, end, KEYS, D)
        v = load_rows(v_ptr, tail, v_stride, column, end, KEYS, D)
        dq = recomputed_dq_step(q, dout, k, v, lse, delta, dq, end - tail, scale_log2, KEYS, True)
    store_rows(dq_ptr, dq * scale, row, dq_stride, column, end, ROWS, D)


def attention_delta(dout: Tensor, out: Tensor) -> Tensor:
    """delta [heads, T] fp32 of dout and out [T, heads, D]."""
    rows, heads, dims = out.shape
    dout, out = rows_view(dout), rows_view(out)
    delta = torch.empty((heads, rows), dtype=torch.float32, device=out.device)
    delta_kernel[(rows, DELTA_PROGRAMS)](
        delta, out, dout, rows, heads, out.stride(0), dout.stride(0),
        D=dims, HEADS=DELTA_HEADS, LEVELS=dims.bit_length() - 1, num_warps=4, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
    return delta


@dataclass(frozen=True)
class _Call:
    """The operands of one backward: q, k, v, dout as [T, heads * D] views, and what every launch needs."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    bounds: Tensor
    heads: int
    dims: int
    longest: int
    scale: float

    @property
    def documents(self) -> int:
        return self.bounds.shape[0] - 1

    def descriptors(self, tile: dict[str, int]) -> list[Any]:
        """Of q, k, v and dout in blocks of a tile's rows or keys."""
        blocks = (tile["ROWS"], tile["KEYS"], tile["KEYS"], tile["ROWS"])
        operands = (self.q, self.k, self.v, self.dout)
        return [descriptor(x, block, self.dims) for x, block in zip(operands, blocks, strict=True)]

    def dkdv(
        self,
        dk: Tensor,
        dv: Tensor,
        heads: range,
        tile: dict[str, int],
        operands: list[Any],
        ds: Any,
        slots: int,
    ) -> None:
        """dk and dv of `heads`, and their dS, `slots` rows a head, through the descriptor `ds` if there is one."""
        dkdv_kernel[(triton.cdiv(self.longest, tile["KEYS"]), len(heads), self.documents)](
            *operands, ds, self.q, self.dout, dk, dv, self.lse, self.delta, self.bounds,
            self.q.shape[0], slots, heads.start, self.q.stride(0), self.dout.stride(0), dk.stride(0), dv.stride(0),
            self.scale, self.scale * LOG2_E, STORE=ds is not None, D=self.dims, **tile, enable_fp_fusion=False,
        )  # fmt: skip

    def dq(
        self,
        dq: Tensor,
        heads: range,
        tile: dict[str, int],
        operands: list[Any],
        workspace: Tensor,
        slots: int,
        slot: int,
    ) -> None:
        """dq of `heads` from the dS that `dkdv` left in `workspace`, read through the descriptors `operands`."""
        dq_kernel[(triton.cdiv(self.longest, tile["ROWS"]), len(heads), self.documents)](
            *operands, workspace, self.k, dq, self.bounds, slots, heads.start,
            workspace.stride(0), self.k.stride(0), dq.stride(0), self.scale,
            D=self.dims, SLOT=slot, **tile, enable_fp_fusion=False,
        )  # fmt: skip

    def recomputed_dq(self, dq: Tensor, tile: dict[str, int]) -> None:
        """dq of all heads without a workspace."""
        recomputed_dq_kernel[(triton.cdiv(self.longest, tile["ROWS"]), self.heads, self.documents)](
            *self.descriptors(tile), self.k, self.v, dq, self.lse, self.delta, self.bounds,
            self.q.shape[0], self.k.stride(0), self.v.stride(0), dq.stride(0), self.scale, self.scale * LOG2_E,
            D=self.dims, **tile, enable_fp_fusion=False,
        )  # fmt: skip


@functools.lru_cache(maxsize=256)
def heads_at_a_time(heads: int, bytes_a_head: int, programs_a_head: int, resident: int, limit: int) -> int:
    """Heads of one pass: within `limit` bytes, the count whose passes take the fewest waves of `resident` programs.

    0 if not even one head fits.
    """
    fitting = range(1, min(heads, limit // bytes_a_head) + 1)
    waves = {n: triton.cdiv(heads, n) * triton.cdiv(n * programs_a_head, resident) for n in fitting}
    return max(fitting, key=lambda n: (-waves[n], n), default=0)


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
    *,
    workspace: int = WORKSPACE,
    dkdv_tile: dict[str, int] = DKDV_TILE,
    dq_tile: dict[str, int] = DQ_TILE,
    recomputed_dq_tile: dict[str, int] = RECOMPUTED_DQ_TILE,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dq, dk, dv) [T, heads, D] bf16, None where not needed.

    dout, q, k, v, out are [T, heads, D] bf16; lse [heads, T] fp32; cu_seqlens [documents + 1] int32. `workspace` is the
    most bytes of dS held at a time; like the tiles it changes no bit.
    """
    rows, heads, dims = q.shape
    dq, dk, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
    if rows:
        call = _Call(
            rows_view(q), rows_view(k), rows_view(v), rows_view(dout), lse, attention_delta(dout, out), cu_seqlens,
            heads, dims, max_seqlen, scale,
        )  # fmt: skip
        _run(call, dq, dk, dv, needs, workspace, (dkdv_tile, dq_tile, recomputed_dq_tile))
    return dq if needs[0] else None, dk if needs[1] else None, dv if needs[2] else None


def _run(
    call: _Call,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    needs: tuple[bool, ...],
    limit: int,
    tiles: tuple[dict[str, int], dict[str, int], dict[str, int]],
) -> None:
    dkdv_tile, dq_tile, recomputed_tile = tiles
    needs_dkdv = needs[1] or needs[2]
    slot = dkdv_tile["KEYS"]
    slots = call.q.shape[0] + call.documents * slot
    width = triton.cdiv(call.longest, dq_tile["ROWS"]) * dq_tile["ROWS"]
    programs = triton.cdiv(call.longest, dkdv_tile["KEYS"]) * call.documents
    chosen = heads_at_a_time(call.heads, slots * width * 2, programs, _resident_programs(call.q), limit)
    operands = call.descriptors(dkdv_tile)
    if not (needs[0] and needs_dkdv and chosen):
        if needs_dkdv:
            call.dkdv(dk, dv, range(call.heads), dkdv_tile, operands, None, 0)
        if needs[0]:
            call.recomputed_dq(dq, recomputed_tile)
        return
    memory = torch.empty((chosen * slots, width), dtype=call.q.dtype, device=call.q.device)
    written = descriptor(memory, dkdv_tile["KEYS"], dkdv_tile["ROWS"])
    read = [
        descriptor(memory, dq_tile["KEYS"], dq_tile["ROWS"]),
        descriptor(call.k, dq_tile["KEYS"], call.dims),
    ]
    for first in range(0, call.heads, chosen):
        some = range(first, min(first + chosen, call.heads))
        call.dkdv(dk, dv, some, dkdv_tile, operands, written, slots)
        call.dq(dq, some, dq_tile, read, memory, slots, slot)


def _resident_programs(x: Tensor) -> int:
    """Programs of `dkdv_kernel` the device runs at a time: two on each SM."""
    return 2 * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 8
