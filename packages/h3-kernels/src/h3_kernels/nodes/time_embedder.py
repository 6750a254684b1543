"""The timestep's sinusoid and the SiLU between and behind the two float32 linears of the time embedder.

Written order: freq_i = exp((-ln 10000 * i) / half) with the product and quotient rounded to float32, as both
engines do; angle = float32(t) * freq_i, rounded; [cos | sin] from IEEE operations (``_elementary``). The
linears are the projection contract (``time_embedder.proj_in``) and the row-parallel contract
(``time_embedder.proj_out``: it is a RowParallelLinear in vLLM-Omni). SiLU: x * (1 / (1 + exp(-x))), all
float32.

The graph applies the SiLU behind ``proj_out`` once for all AdaLN projections; the cast to bf16 stays in each
of them, so that the gradients of the 51 uses add in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from h3_kernels.nodes._elementary import exp, sigmoid
from h3_kernels.nodes._op import NodeOp, check
from h3_kernels.nodes.angle_table import angle_table


def sinusoid_frequencies(width: int, max_period: float = 10000.0) -> Tensor:
    """[width / 2] float32 on the CPU: ``exp(-ln max_period * i / half)``. Raises InputError on an odd width."""
    check(width % 2 == 0, "sinusoid_frequencies", "width must be even, got {}", width)
    half = width // 2
    return exp(-math.log(max_period) * torch.arange(half, dtype=torch.float32, device="cpu") / half)


def timestep_sinusoid(timesteps: Tensor, frequencies: Tensor) -> Tensor:
    """Return [M, 2 F] float32: cosines, then sines, of each timestep times each frequency.

    ``timesteps``: [M] in [0, 1], unscaled; ``frequencies``: [F] float32. Raises InputError on a wrong shape
    or dtype.
    """
    check(timesteps.dim() == 1, "timestep_sinusoid", "timesteps must be [M], got {}", timesteps)
    return angle_table(timesteps.to(torch.float32)[:, None], frequencies, torch.float32)


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``, elementwise in float32, one rounding to x's dtype. Any shape."""
    return SILU(x)  # type: ignore[no-any-return]


def _silu(x: Tensor) -> Tensor:
    g = x.float()
    return (g * sigmoid(g)).to(x.dtype)


def _silu_backward(dy: Tensor, x: Tensor, *, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    g = x.float()
    s = sigmoid(g)
    return ((dy.float() * (s * (1.0 + g * (1.0 - s)))).to(x.dtype) if needs[0] else None,)


SILU = NodeOp("silu", "elementary", _silu, _silu_backward)
