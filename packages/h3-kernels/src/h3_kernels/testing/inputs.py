"""Inputs that make a wrong order visible: a sum over random values often hides a reordering below the
rounding."""

import torch
from torch import Tensor


def random_inputs(
    m: int, n: int, k: int, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """x [m, k] of unit scale and weight [n, k] of scale k^-1/2, normally distributed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator)
    weight = torch.randn(n, k, generator=generator) * k**-0.5
    return x.to(device=device, dtype=dtype), weight.to(device=device, dtype=dtype)


def cancellation_inputs(
    m: int, n: int, k: int, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """x and weight whose products nearly cancel: every k is followed, half of K later, by its negative.

    Products reach 2^12 times the size of what is left, so almost every bit of the result is decided by the
    order of additions. Half the distance of K puts the two products into different units of every tree.
    """
    generator = torch.Generator().manual_seed(seed)
    x, weight = random_inputs(m, n, k, dtype=torch.float32, seed=seed + 1)
    scale = torch.exp2(torch.randint(0, 13, (k // 2,), generator=generator).float())
    large = torch.randn(m, k // 2, generator=generator) * scale
    x[:, : k // 2], x[:, k // 2 : 2 * (k // 2)] = large, -large * (1 + 2.0**-7)
    weight[:, k // 2 : 2 * (k // 2)] = weight[:, : k // 2]
    return x.to(device=device, dtype=dtype), weight.to(device=device, dtype=dtype)


def large_magnitude_inputs(
    m: int, n: int, k: int, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """x and weight with magnitudes spread over 2^-40 to 2^40: most additions lose most of the smaller
    operand."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = random_inputs(m, n, k, dtype=torch.float32, seed=seed + 1)
    x *= torch.exp2(torch.randint(-20, 21, (m, k), generator=generator).float())
    weight *= torch.exp2(torch.randint(-20, 21, (n, k), generator=generator).float())
    return x.to(device=device, dtype=dtype), weight.to(device=device, dtype=dtype)
