"""Per-head RMSNorm of q and k, then the rotary embedding, as one node.

Written order for each (row, head) of width D, in float32, one rounding at the end:

    n = x * rsqrt(sum(x * x) / D + eps) * weight        as in ``rms_norm``
    first  = n[0:h] * cos - n[h:2h] * sin               h = half of the rotary width
    second = n[h:2h] * cos + n[0:h] * sin
    n[2h:] passes through; products are rounded, then the sum

cos and sin come from the bf16 table (``rope_table``). The token refiner passes no table: norm only. vLLM-Omni
rounds n to bf16 before the rotation and Diffusers also rounds each product; neither is needed.

Backward: the rotation by the opposite angle, then the norm's backward. dweight: for each head, over rows in
ascending logical order by the tree of neighbours; then over heads in 8 equal groups (``_order.sum_heads``),
so that a tensor-parallel rank's sum is a subtree of the whole.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from h3_kernels.contract import UNITS
from h3_kernels.nodes._op import NodeOp, check
from h3_kernels.nodes._order import in_order, sum_heads, sum_rows
from h3_kernels.nodes.rms_norm import normalize, normalize_backward


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    table: Tensor | None,
    eps: float,
    *,
    order: Tensor | None = None,
    groups: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate q and k.

    ``q``, ``k``: [T, heads, D] (any row and head stride, D contiguous); weights: [D]; ``table``: [T, 2h]
    holding [cos | sin], or None for no rotation. Returns (q, k), each [T, heads, D] contiguous, in q's dtype.
    ``order`` (int64 positions of the active rows, ascending in logical order) and ``groups`` (of heads: 8 /
    tp, a divisor of the heads given; by default the largest of 8, 4, 2, 1) fix the weights' gradient. Raises
    InputError on a wrong shape.
    """
    name = "qk_norm_rope"
    right = q.dim() == 3 and q.shape == k.shape
    check(right, name, "q and k must be one [rows, heads, dim], got {} and {}", q, k)
    dim = q.shape[-1]
    for weight in (q_weight, k_weight):
        check(weight.shape == (dim,), name, "weight must be [{}], got {}", dim, weight)
    if table is not None:
        fits = table.dim() == 2 and table.shape[0] == q.shape[0] and table.shape[1] <= dim
        fits = fits and table.shape[1] % 2 == 0
        check(fits, name, "table must be [{}, even and <= {}], got {}", q.shape[0], dim, table)
    groups = math.gcd(q.shape[1], UNITS) if groups is None else groups
    check(q.shape[1] % groups == 0, name, "{} heads do not divide into {} groups", q.shape[1], groups)
    return QK_NORM_ROPE(q, k, q_weight, k_weight, table, order, eps=eps, groups=groups)  # type: ignore[no-any-return]


def _halves(table: Tensor) -> tuple[Tensor, Tensor]:
    half = table.shape[1] // 2
    t = table.float().unsqueeze(1)
    return t[..., :half], t[..., half:]


def _rotate(n: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b = n[..., :half], n[..., half : 2 * half]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, n[..., 2 * half :]), dim=-1)


def _one(x: Tensor, weight: Tensor, table: Tensor | None, eps: float) -> Tensor:
    u, _ = normalize(x, eps)
    n = u * weight.float()
    return (n if table is None else _rotate(n, *_halves(table))).to(x.dtype)


def _one_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    table: Tensor | None,
    order: Tensor | None,
    needs: tuple[bool, bool],
    eps: float,
    groups: int,
) -> tuple[Tensor | None, Tensor | None]:
    u, inv = normalize(x, eps)
    dn = dy.float()
    if table is not None:
        cos, sin = _halves(table)
        dn = _rotate(dn, cos, -sin)
    dx = normalize_backward(dn * weight.float(), u, inv).to(x.dtype) if needs[0] else None
    dweight = sum_heads(sum_rows(in_order(dn * u, order)), groups).to(weight.dtype) if needs[1] else None
    return dx, dweight


def _qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    table: Tensor | None,
    order: Tensor | None,
    *,
    eps: float,
    groups: int,
) -> tuple[Tensor, ...]:
    return _one(q, q_weight, table, eps), _one(k, k_weight, table, eps)


def _qk_norm_rope_backward(
    dq: Tensor,
    dk: Tensor,
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
    gq, gqw = _one_backward(dq, q, q_weight, table, order, (needs[0], needs[2]), eps, groups)
    gk, gkw = _one_backward(dk, k, k_weight, table, order, (needs[1], needs[3]), eps, groups)
    return gq, gk, gqw, gkw, None, None


QK_NORM_ROPE = NodeOp("qk_norm_rope", "qk_norm_rope", _qk_norm_rope, _qk_norm_rope_backward, outputs=2)
