"""RMSNorm, alone and with the indexed AdaLN modulation.

Written order, for each row of width W, all in float32:

    inv = rsqrt(sum(x * x) / W + eps)      sum by halving (``_order``); rsqrt = 1 / sqrt, both rounded
    u = x * inv;  n = u * weight
    y = n * (1 + scale[index]) + shift[index]          (modulated form)

and one rounding to x's dtype. Both engines take these steps; vLLM-Omni's fused CUDA kernel keeps float32
between them, Diffusers rounds after each one (diffusers 0.42 ``MiniMaxH3TransformerBlock``), which doubles
the error to fp64.

Backward, per row: dn = dy * (1 + scale); du = dn * weight; dx = inv * (du - u * (sum(du * u) / W)). Over
rows, in ascending logical order by the tree of neighbours: dweight = sum dn * u; for each table row, over the
rows that use it, dscale = sum dy * n and dshift = sum dy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3_kernels.nodes._op import NodeOp, check
from h3_kernels.nodes._order import in_order, sum_columns, sum_rows, sum_rows_by_index


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, order: Tensor | None = None) -> Tensor:
    """RMSNorm over the last axis. ``x``: [T, W], ``weight``: [W]; returns x's dtype.

    ``order`` (int64 positions of the active rows, ascending in logical order) fixes dweight's summation
    order. Raises InputError on a wrong shape or dtype.
    """
    _check_norm("rms_norm", x, weight)
    return RMS_NORM(x, weight, order, eps=eps)  # type: ignore[no-any-return]


def rms_norm_modulate(
    x: Tensor,
    weight: Tensor,
    shift: Tensor,
    scale: Tensor,
    index: Tensor,
    eps: float,
    *,
    order: Tensor | None = None,
) -> Tensor:
    """RMSNorm, then ``* (1 + scale[index]) + shift[index]``, rounded once.

    ``x``: [T, W]; ``weight``: [W]; ``shift``, ``scale``: [R, W] (rows may be strided, columns contiguous);
    ``index``: [T] int64 in [0, R). Returns [T, W] in x's dtype. ``order`` as in :func:`rms_norm`; it also
    fixes dshift and dscale. Raises InputError on a wrong shape or dtype.
    """
    _check_norm("rms_norm_modulate", x, weight)
    check_table("rms_norm_modulate", x, index, shift, scale)
    return RMS_NORM_MODULATE(x, weight, shift, scale, index, order, eps=eps)  # type: ignore[no-any-return]


def _check_norm(node: str, x: Tensor, weight: Tensor) -> None:
    check(x.dim() == 2, node, "x must be [rows, width], got {}", x)
    check(weight.shape == x.shape[1:], node, "weight must be [{}], got {}", x.shape[1], weight)


def check_table(node: str, x: Tensor, index: Tensor, *tables: Tensor) -> None:
    """Refuse modulation tables that do not fit ``x`` [T, W] or an index that is not [T] int64."""
    for table in tables:
        fits = table.dim() == 2 and table.shape[1] == x.shape[1]
        check(fits, node, "a modulation table must be [R, {}], got {}", x.shape[1], table)
    right = index.dtype == torch.int64 and index.shape == x.shape[:1]
    check(right, node, "index must be int64 [{}], got {} {}", x.shape[0], index.dtype, index)


def normalize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (u, inv) in float32 for ``x`` [..., W]: u = x * inv, inv [..., 1] = rsqrt(mean square + eps)."""
    x32 = x.float()
    inv = torch.rsqrt(sum_columns(x32 * x32) / x.shape[-1] + eps).unsqueeze(-1)
    return x32 * inv, inv


def normalize_backward(du: Tensor, u: Tensor, inv: Tensor) -> Tensor:
    """Gradient of ``x`` given du and the results of :func:`normalize`, in float32."""
    mean = sum_columns(du * u) / u.shape[-1]
    return inv * (du - u * mean.unsqueeze(-1))


def _rms_norm(x: Tensor, weight: Tensor, order: Tensor | None, *, eps: float) -> Tensor:
    u, _ = normalize(x, eps)
    return (u * weight.float()).to(x.dtype)


def _rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, order: Tensor | None, *, needs: tuple[bool, ...], eps: float
) -> tuple[Tensor | None, ...]:
    u, inv = normalize(x, eps)
    g = dy.float()
    dx = normalize_backward(g * weight.float(), u, inv).to(x.dtype) if needs[0] else None
    dweight = sum_rows(in_order(g * u, order)).to(weight.dtype) if needs[1] else None
    return dx, dweight, None


def _rms_norm_modulate(
    x: Tensor,
    weight: Tensor,
    shift: Tensor,
    scale: Tensor,
    index: Tensor,
    order: Tensor | None,
    *,
    eps: float,
) -> Tensor:
    u, _ = normalize(x, eps)
    n = u * weight.float()
    y = n * (1.0 + scale.float()).index_select(0, index) + shift.float().index_select(0, index)
    return y.to(x.dtype)


def _rms_norm_modulate_backward(
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
    u, inv = normalize(x, eps)
    w, g = weight.float(), dy.float()
    dn = g * (1.0 + scale.float()).index_select(0, index)
    dx = normalize_backward(dn * w, u, inv).to(x.dtype) if needs[0] else None
    dweight = sum_rows(in_order(dn * u, order)).to(weight.dtype) if needs[1] else None
    rows = shift.shape[0]
    dshift = sum_rows_by_index(g, index, rows, order).to(shift.dtype) if needs[2] else None
    dscale = sum_rows_by_index(g * (u * w), index, rows, order).to(scale.dtype) if needs[3] else None
    return dx, dweight, dshift, dscale, None, None


RMS_NORM = NodeOp("rms_norm", "rms_norm", _rms_norm, _rms_norm_backward)
RMS_NORM_MODULATE = NodeOp("rms_norm_modulate", "rms_norm", _rms_norm_modulate, _rms_norm_modulate_backward)
