"""Full attention inside packed documents, one fixed schedule for each (row, head).

Written order on the CPU, for row i and head h of a document with keys 0 .. S-1, all in float32:

    s_j = chain over d of q[i,d] * k[j,d]               products rounded, added in ascending d from zero
    s_j = s_j * scale;  m = max_j s_j;  p_j = exp(s_j - m)
    l = fold over ascending j of p_j;  o[d] = fold over ascending j of p_j * v[j,d]
    out = o / l                                         one rounding to the input dtype

The order depends on the document's own keys alone: not on other documents, padding rows, the number of heads,
or which query rows are asked for. So tensor-parallel and Ulysses head splits change no bit.

Backward: P = exp(s - m) / l; dP_ij = chain over d of dout * v; delta_i = fold over j of P * dP; dS = P * (dP
- delta) * scale; dq_i = fold over ascending j of dS_ij * k_j; dk_j and dv_j = folds over ascending i of dS_ij
* q_i and P_ij * dout_i; one rounding each. On CUDA the schedule is the kernel's own
(``h3_kernels.triton.attention``) with the same promises; its bits differ from the CPU's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from h3_kernels.nodes._elementary import exp
from h3_kernels.nodes._op import NodeOp, check
from h3_kernels.reference import tree_gemm


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    *,
    provider: str = "auto",
) -> Tensor:
    """Attend inside each document.

    ``q``, ``k``, ``v``: [T, heads, D] of one dtype, packed rows; ``cu_seqlens``: [documents + 1] int32, 0
    first, T last, not decreasing; ``max_seqlen``: the longest document (a host integer, so that nothing is
    read back from the device: on CUDA rows past it would be left unwritten, which ``graph.checks`` catches);
    ``scale``: D ** -0.5; ``provider``: on CUDA, a forward of ``attention_providers``, each with its own bits.
    Returns [T, heads, D] contiguous. Raises InputError on a wrong shape, dtype or provider.
    """
    name = "attention"
    same = q.dim() == 3 and q.shape == k.shape == v.shape and q.dtype == k.dtype == v.dtype
    check(same, name, "q, k and v must be one [rows, heads, dim] and dtype, got [{}, {}, {}]", q, k, v)
    right = cu_seqlens.dtype == torch.int32 and cu_seqlens.dim() == 1 and cu_seqlens.shape[0] >= 2
    check(
        right,
        name,
        "cu_seqlens must be int32 [documents + 1], got {} {}",
        cu_seqlens.dtype,
        cu_seqlens,
    )
    least = -(-q.shape[0] // (cu_seqlens.shape[0] - 1))
    check(least <= max_seqlen, name, "a document of at least {} rows exceeds {}", least, max_seqlen)
    tensors = (q, k, v, cu_seqlens)
    return ATTENTION(*tensors, max_seqlen=max_seqlen, scale=scale, provider=provider)  # type: ignore[no-any-return]


def _documents(cu_seqlens: Tensor, rows: int, max_seqlen: int) -> Iterator[slice]:
    bounds = cu_seqlens.tolist()
    ordered = bounds[0] == 0 and bounds[-1] == rows and all(a <= b for a, b in itertools.pairwise(bounds))
    check(ordered, "attention", f"cu_seqlens must rise from 0 to {rows}, got {bounds}")
    for start, stop in itertools.pairwise(bounds):
        check(
            stop - start <= max_seqlen, "attention", f"a document of {stop - start} rows exceeds {max_seqlen}"
        )
        if stop > start:
            yield slice(start, stop)


def _heads_first(x: Tensor, rows: slice) -> Tensor:
    return x[rows].transpose(0, 1).float().contiguous()


def _fold(left: Tensor, right: Tensor) -> Tensor:
    """left [H, M, K] times right [H, K, N] -> [H, M, N]: the plain chain over ascending K, one head at a
    time.
    """
    heads = zip(left, right.transpose(1, 2), strict=True)
    return torch.stack([tree_gemm(a, b, units=1, out_dtype=torch.float32) for a, b in heads])


def _fold_last(x: Tensor) -> Tensor:
    """Sum the last axis in ascending order, keeping it with length 1."""
    total = torch.zeros_like(x[..., :1])
    for j in range(x.shape[-1]):
        total = total + x[..., j : j + 1]
    return total


def _weights(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return (p, l): exp(s - max) [H, M, S] and its ascending sum [H, M, 1]."""
    scores = _fold(q, k.transpose(1, 2)) * scale
    p = exp(scores - scores.amax(dim=-1, keepdim=True))
    return p, _fold_last(p)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, max_seqlen: int, scale: float, provider: str
) -> Tensor:
    known = provider in ("auto", "reference")
    check(known, "attention", f"the CPU has one provider, 'reference'; got {provider!r}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for rows in _documents(cu_seqlens, q.shape[0], max_seqlen):
        qs, ks, vs = (_heads_first(t, rows) for t in (q, k, v))
        p, total = _weights(qs, ks, scale)
        out[rows] = (_fold(p, vs) / total).transpose(0, 1).to(q.dtype)
    return out


def _attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    needs: tuple[bool, ...],
    max_seqlen: int,
    scale: float,
    provider: str,
) -> tuple[Tensor | None, ...]:
    grads = [torch.empty(q.shape, dtype=q.dtype, device=q.device) if need else None for need in needs[:3]]
    for rows in _documents(cu_seqlens, q.shape[0], max_seqlen):
        qs, ks, vs, g = (_heads_first(t, rows) for t in (q, k, v, dout))
        p, total = _weights(qs, ks, scale)
        p = p / total
        dp = _fold(g, vs.transpose(1, 2))
        ds = p * (dp - _fold_last(p * dp)) * scale
        for grad, left, right in zip(
            grads, (ds, ds.transpose(1, 2), p.transpose(1, 2)), (ks, qs, g), strict=True
        ):
            if grad is not None:
                grad[rows] = _fold(left, right).transpose(0, 1).to(q.dtype)
    return (*grads, None)


ATTENTION = NodeOp("attention", "attention", _attention, _attention_backward)
