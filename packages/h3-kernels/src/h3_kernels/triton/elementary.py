"""CUDA kernels of the time embedder's SiLU and of the angle tables: `nodes._elementary` in one launch, with
its bits.

exp, sin and cos are the same float64 additions, multiplications and comparisons as on the CPU, in the same
order and never contracted (`enable_fp_fusion=False`), rounded once to float32. So these nodes have the same
bits on CPU and CUDA. They run over a few rows, where one launch instead of dozens is what counts; the SwiGLU
of the blocks uses the device's fast exp (`swiglu`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from h3_kernels.nodes import _elementary as written

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128
OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}

EXP = tl.constexpr(written._EXP)
SIN = tl.constexpr(written._SIN)
COS = tl.constexpr(written._COS)
HALF_PI = tl.constexpr(written._HALF_PI)
LOG2_E = tl.constexpr(written._LOG2_E)
LN2_HIGH = tl.constexpr(written._LN2_HIGH)
LN2_LOW = tl.constexpr(written._LN2_LOW)
TWO_OVER_PI = tl.constexpr(written._TWO_OVER_PI)
ROUND = tl.constexpr(1.5 * 2.0**52)
"""Adding and taking away this number rounds a float64 below 2**51 to the nearest integer, ties to even."""


@triton.jit
def double(x, VALUE: tl.constexpr):
    """VALUE as a float64 tensor of x's shape: a bare literal would be float32."""
    return tl.full(x.shape, VALUE, tl.float64)


@triton.jit
def horner(x, COEFFICIENTS: tl.constexpr, COUNT: tl.constexpr):
    """Polynomial of float64 x with COUNT coefficients, highest power first; each product and each sum is
    rounded.
    """
    total = double(x, COEFFICIENTS[COUNT - 1])
    for i in tl.static_range(1, COUNT):
        total = total * x + double(x, COEFFICIENTS[COUNT - 1 - i])
    return total


@triton.jit
def exp(x):
    """e**x of a float32 tensor, as `nodes._elementary.exp`."""
    number = x == x  # noqa: PLR0124  # not a NaN
    y = tl.where(number, x, 0.0).to(tl.float64)
    y = tl.minimum(tl.maximum(y, double(y, -708.0)), double(y, 709.0))
    n = (y * double(y, LOG2_E) + double(y, ROUND)) - double(y, ROUND)
    r = (y - n * double(y, LN2_HIGH)) - n * double(y, LN2_LOW)
    power = ((n.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return tl.where(number, (horner(r, EXP, 13) * power).to(tl.float32), x)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in float32, division rounded to nearest."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + exp(-x))


@triton.jit
def sin_cos(x):
    """(sin x, cos x) of a float32 tensor, as `nodes._elementary.sin_cos`."""
    y = x.to(tl.float64)
    n = (y * double(y, TWO_OVER_PI) + double(y, ROUND)) - double(y, ROUND)
    r = y
    for i in tl.static_range(3):
        r = r - n * double(y, HALF_PI[i])
    square = r * r
    sine, cosine = r * horner(square, SIN, 9), horner(square, COS, 10)
    quadrant = n.to(tl.int64) & 3
    swapped = (quadrant & 1) == 1
    sin, cos = tl.where(swapped, cosine, sine), tl.where(swapped, sine, cosine)
    sin = tl.where(quadrant >= 2, -sin, sin)
    cos = tl.where((quadrant == 1) | (quadrant == 2), -cos, cos)
    return sin.to(tl.float32), cos.to(tl.float32)


@triton.jit
def angle_table_kernel(
    out_ptr, values_ptr, frequencies_ptr, total, AXES: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK angles of [rows, AXES, COUNT]: cosines into columns [0, AXES * COUNT), sines behind them."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < total
    value = tl.load(values_ptr + at // COUNT, mask=live, other=0.0)
    sin, cos = sin_cos(value * tl.load(frequencies_ptr + at % COUNT, mask=live, other=0.0))
    columns = AXES * COUNT
    out = out_ptr + at // columns * (2 * columns) + at % columns
    tl.store(out, cos.to(out_ptr.dtype.element_ty), mask=live)
    tl.store(out + columns, sin.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def silu_kernel(y_ptr, x_ptr, total, BLOCK: tl.constexpr):
    """BLOCK elements of a contiguous tensor."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < total, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (x * sigmoid(x)).to(y_ptr.dtype.element_ty), mask=at < total)


@triton.jit
def silu_backward_kernel(dx_ptr, dy_ptr, x_ptr, total, BLOCK: tl.constexpr):
    """BLOCK elements of contiguous tensors."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < total, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=at < total, other=0.0).to(tl.float32)
    s = sigmoid(x)
    dx = dy * (s * (1.0 + x * (1.0 - s)))
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=at < total)


def launch_angle_table(values: Tensor, frequencies: Tensor, *, dtype: torch.dtype) -> Tensor:
    """See `nodes.angle_table.angle_table`."""
    values, frequencies = values.contiguous(), frequencies.contiguous()
    rows, axes = values.shape
    count = frequencies.shape[0]
    out = torch.empty((rows, 2 * axes * count), dtype=dtype, device=values.device)
    total = rows * axes * count
    if total:
        angle_table_kernel[(triton.cdiv(total, BLOCK),)](
            out, values, frequencies, total, AXES=axes, COUNT=count, BLOCK=BLOCK, **OPTIONS
        )
    return out


def launch_silu(x: Tensor) -> Tensor:
    """See `nodes.time_embedder.silu`."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        silu_kernel[(triton.cdiv(x.numel(), BLOCK),)](y, x, x.numel(), BLOCK=BLOCK, **OPTIONS)
    return y


def launch_silu_backward(dy: Tensor, x: Tensor, *, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """Gradient of x."""
    if not needs[0]:
        return (None,)
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    if x.numel():
        silu_backward_kernel[(triton.cdiv(x.numel(), BLOCK),)](dx, dy, x, x.numel(), BLOCK=BLOCK, **OPTIONS)
    return (dx,)
