"""SwiGLU: silu(gate) * value, one rounding.

Written order, elementwise in float32: s = 1 / (1 + exp(-gate)); y = (gate * s) * value; one rounding to the
input dtype. Backward: dvalue = dy * (gate * s); dgate = (dy * value) * (s * (1 + gate * (1 - s))).
"""

from __future__ import annotations

from torch import Tensor

from h3_kernels.nodes._elementary import sigmoid
from h3_kernels.nodes._op import NodeOp, check


def swiglu(gate: Tensor, value: Tensor) -> Tensor:
    """``silu(gate) * value``. Both [T, F] of one dtype (column blocks of one fc1 output may be passed as
    views).

    Returns [T, F] contiguous in that dtype. Raises InputError on a mismatch.
    """
    same = gate.dim() == 2 and gate.shape == value.shape and gate.dtype == value.dtype
    check(
        same,
        "swiglu",
        "gate and value must be one [rows, width] and dtype, got {} {} and {} {}",
        gate,
        gate.dtype,
        value,
        value.dtype,
    )
    return SWIGLU(gate, value)  # type: ignore[no-any-return]


def _swiglu(gate: Tensor, value: Tensor) -> Tensor:
    g = gate.float()
    return (g * sigmoid(g) * value.float()).to(gate.dtype)


def _swiglu_backward(
    dy: Tensor, gate: Tensor, value: Tensor, *, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    g, d = gate.float(), dy.float()
    s = sigmoid(g)
    dgate = ((d * value.float()) * (s * (1.0 + g * (1.0 - s)))).to(gate.dtype) if needs[0] else None
    dvalue = (d * (g * s)).to(value.dtype) if needs[1] else None
    return dgate, dvalue


SWIGLU = NodeOp("swiglu", "swiglu", _swiglu, _swiglu_backward)
