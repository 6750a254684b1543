"""Residual additions: plain (token refiner), gated by an indexed AdaLN row, and gated then normalised.

Written order, elementwise in float32, one rounding to x's dtype:

    residual:        y = x + branch
    gated_residual:  y = x + gate[index] * branch          (the product is rounded, then the sum)

``gated_residual_norm`` is ``gated_residual`` followed by ``rms_norm_modulate`` of its rounded result: one
launch on CUDA, the same bits as the two nodes.

Backward: dx = dy; dbranch = gate[index] * dy; for each table row, over the rows that use it in ascending
logical order by the tree of neighbours, dgate = sum dy * branch.
"""

from __future__ import annotations

from torch import Tensor

from h3_kernels.nodes._op import NodeOp, check
from h3_kernels.nodes._order import sum_rows_by_index
from h3_kernels.nodes.rms_norm import _rms_norm_modulate, _rms_norm_modulate_backward, check_table


def residual(x: Tensor, branch: Tensor) -> Tensor:
    """``x + branch``, both [T, W] of one dtype; returns that dtype."""
    _check_pair("residual", x, branch)
    return RESIDUAL(x, branch)  # type: ignore[no-any-return]


def gated_residual(
    x: Tensor, gate: Tensor, branch: Tensor, index: Tensor, *, order: Tensor | None = None
) -> Tensor:
    """``x + gate[index] * branch``. ``x``, ``branch``: [T, W]; ``gate``: [R, W]; ``index``: [T] int64 in [0,
    R).

    ``order`` (int64 positions of the active rows, ascending in logical order) fixes dgate's summation order.
    Raises InputError on a wrong shape or dtype.
    """
    _check_pair("gated_residual", x, branch)
    check_table("gated_residual", x, index, gate)
    return GATED_RESIDUAL(x, gate, branch, index, order)  # type: ignore[no-any-return]


def gated_residual_norm(
    x: Tensor,
    gate: Tensor,
    branch: Tensor,
    weight: Tensor,
    shift: Tensor,
    scale: Tensor,
    index: Tensor,
    eps: float,
    *,
    order: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (y, h): ``y = gated_residual(x, gate, branch, index)``, ``h = rms_norm_modulate(y, ...)``.

    Same bits as the two nodes, forward and backward. ``gate``, ``shift``, ``scale``: [R, W] and of one
    ``index``.
    """
    _check_pair("gated_residual_norm", x, branch)
    check_table("gated_residual_norm", x, index, gate, shift, scale)
    tensors = (x, gate, branch, weight, shift, scale, index, order)
    return GATED_RESIDUAL_NORM(*tensors, eps=eps)  # type: ignore[no-any-return]


def _check_pair(node: str, x: Tensor, branch: Tensor) -> None:
    same = x.dim() == 2 and x.shape == branch.shape and x.dtype == branch.dtype
    check(
        same,
        node,
        "x and branch must be one [rows, width] and dtype, got {} {} and {} {}",
        x,
        x.dtype,
        branch,
        branch.dtype,
    )


def _residual(x: Tensor, branch: Tensor) -> Tensor:
    return (x.float() + branch.float()).to(x.dtype)


def _residual_backward(
    dy: Tensor, x: Tensor, branch: Tensor, *, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    return dy if needs[0] else None, dy if needs[1] else None


def _gated_residual(x: Tensor, gate: Tensor, branch: Tensor, index: Tensor, order: Tensor | None) -> Tensor:
    return (x.float() + gate.float().index_select(0, index) * branch.float()).to(x.dtype)


def _gated_residual_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    branch: Tensor,
    index: Tensor,
    order: Tensor | None,
    *,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    g = dy.float()
    dgate = dbranch = None
    if needs[1]:
        dgate = sum_rows_by_index(g * branch.float(), index, gate.shape[0], order).to(gate.dtype)
    if needs[2]:
        dbranch = (gate.float().index_select(0, index) * g).to(branch.dtype)
    return dy if needs[0] else None, dgate, dbranch, None, None


def _gated_residual_norm(
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
    y = _gated_residual(x, gate, branch, index, order)
    return y, _rms_norm_modulate(y, weight, shift, scale, index, order, eps=eps), y


def _gated_residual_norm_backward(
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
    norm_needs = (True, *needs[3:6], False, False)
    through, dweight, dshift, dscale, _, _ = _rms_norm_modulate_backward(
        dh, y, weight, shift, scale, index, order, needs=norm_needs, eps=eps
    )
    # As autograd adds the two uses of y: each gradient already rounded, then one rounded sum.
    total = dy + through if through is not None else dy
    dx, dgate, dbranch, _, _ = _gated_residual_backward(
        total, x, gate, branch, index, order, needs=(*needs[:3], False, False)
    )
    return dx, dgate, dbranch, dweight, dshift, dscale, None, None


RESIDUAL = NodeOp("residual", "gated_residual", _residual, _residual_backward)
GATED_RESIDUAL = NodeOp("gated_residual", "gated_residual", _gated_residual, _gated_residual_backward)
GATED_RESIDUAL_NORM = NodeOp(
    "gated_residual_norm",
    "gated_residual",
    _gated_residual_norm,
    _gated_residual_norm_backward,
    outputs=2,
)
