"""exp, sin and cos from IEEE add, multiply and compare alone, so that their bits are the same wherever they
run.

A library's vectorised functions differ by version, vector width and device (torch's CPU ``sqrt`` is not even
correctly rounded). Each function here works in float64 on separate elementwise operations, none of which may
be contracted, and rounds once to float32: the error is at most 0.5 ulp plus about 1e-7 ulp.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Cody-Waite splits (as in fdlibm): the high part has trailing zero bits, so its product with a small integer
# is exact.
_LOG2_E = 1.4426950408889634
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
_TWO_OVER_PI = 0.6366197723675814
_HALF_PI = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21)

_EXP = tuple(1.0 / math.factorial(k) for k in range(13))
_SIN = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in range(9))
_COS = tuple((-1.0) ** k / math.factorial(2 * k) for k in range(10))


def _horner(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def exp(x: Tensor) -> Tensor:
    """Return e**x as float32 for a float32 tensor; overflow gives inf, underflow 0, NaN stays."""
    y = x.double().clamp(-708.0, 709.0)
    n = torch.round(y * _LOG2_E)
    r = (y - n * _LN2_HIGH) - n * _LN2_LOW
    power = ((n.to(torch.int64) + 1023) << 52).view(torch.float64)
    return (_horner(r, _EXP) * power).float()


def sin_cos(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sin x, cos x) as float32 for a float32 tensor of radians, |x| below 1.6e6."""
    y = x.double()
    n = torch.round(y * _TWO_OVER_PI)
    r = y
    for part in _HALF_PI:
        r = r - n * part
    square = r * r
    sine, cosine = r * _horner(square, _SIN), _horner(square, _COS)
    quadrant = torch.remainder(n, 4.0)
    swapped = torch.remainder(n, 2.0) == 1.0
    sin = torch.where(swapped, cosine, sine)
    cos = torch.where(swapped, sine, cosine)
    sin = torch.where(quadrant >= 2.0, -sin, sin)
    cos = torch.where((quadrant == 1.0) | (quadrant == 2.0), -cos, cos)
    return sin.float(), cos.float()


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) in float32, each of the three operations rounded once."""
    return 1.0 / (1.0 + exp(-x))
