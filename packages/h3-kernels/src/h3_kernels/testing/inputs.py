"""Inputs that make a wrong order visible: a sum over random values often hides a reordering below the rounding."""

import torch
from torch import Tensor


def random_inputs(
    m: int, n: int, k: int, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """x [m, k] of unit scale and weight [n, k] of scale k^-1/2, normally distributed.

    Drawn on ``device``, so the values of one seed differ between a CPU and a GPU.
    """
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(m, k, generator=generator, device=device, dtype=torch.float32)
    weight = torch.randn(n, k, generator=generator, device=device, dtype=torch.float32) * k**-0.5
    return x.to(dtype), weight.to(dtype)


def cancellation_inputs(
    m: int, n: int, k: int, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """x [m, k] and weight [n, k] whose large products cancel exactly, so that the order decides every bit of the
    rest.

    The second half of K repeats the first with the sign of x flipped, so what cancels lies in different units of
    every tree. Every 16th column is 2^-14 as large and does not cancel: what is left has the size of the fp32
    rounding errors.
    """
    generator = torch.Generator(device).manual_seed(seed)
    x, weight = random_inputs(m, n, k, dtype=torch.float32, device=device, seed=seed + 1)
    half = k // 2
    x[:, :half] *= torch.exp2(torch.randint(0, 7, (half,), generator=generator, device=device).float())
    x[:, half : 2 * half], weight[:, half : 2 * half] = -x[:, :half], weight[:, :half]
    for start in (0, half):
        small = x[:, start : start + half : 16]
        small.copy_(
            torch.randn(small.shape, generator=generator, device=device, dtype=torch.float32) * 2.0**-14
        )
    return x.to(dtype), weight.to(dtype)


def large_magnitude_inputs(
    m: int, n: int, k: int, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """``cancellation_inputs`` times 2^40 on both sides: sums near 2^90, out of reach of anything narrower than fp32."""
    x, weight = cancellation_inputs(m, n, k, dtype=torch.float32, device=device, seed=seed)
    return (x * 2.0**40).to(dtype), (weight * 2.0**40).to(dtype)
