"""The rotary table of the packed rows: [cos | sin] of the (t, h, w) angles, in bf16.

Written order, elementwise: angle = float32(position) * inv_freq, rounded to float32, as both engines compute
it; sin and cos of that angle from IEEE operations (``_elementary``), rounded to float32, then to bf16. The
table is bf16 in both engines (diffusers 0.42 casts it to the activations' dtype, vLLM-Omni 0.30 stores it
so), so it is part of the model. No device kernel is needed: the same operations give the same bits on CPU and
CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3_kernels.nodes._elementary import sin_cos
from h3_kernels.nodes._op import check


def inverse_frequencies(count: int, theta: float = 10000.0) -> Tensor:
    """``1 / theta ** (2 i / (2 count))`` in float32 on the CPU, [count]: the formula of both engines.

    ``theta ** -x`` differs in the last bit of 4 of the 16 values, so the division stays.
    """
    exponent = torch.arange(0, 2 * count, 2, dtype=torch.float32) / (2 * count)
    return 1.0 / (theta**exponent)


def rope_table(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return [T, 2 * 3 * F]: cos of the t, h and w angles, then their sines.

    ``positions``: [T, 3] of any float or int dtype (float64 grids are rounded to float32 first, as the
    engines do); ``inv_freq``: [F] float32. Raises InputError on a wrong shape or dtype.
    """
    right = positions.dim() == 2 and positions.shape[1] == 3
    check(right, "rope_table", f"positions must be [rows, 3] (t, h, w), got {list(positions.shape)}")
    right = inv_freq.dim() == 1 and inv_freq.dtype == torch.float32
    check(right, "rope_table", f"inv_freq must be float32 [F], got {inv_freq.dtype} {list(inv_freq.shape)}")
    angles = positions.to(torch.float32).unsqueeze(-1) * inv_freq
    sin, cos = sin_cos(angles.flatten(1))
    return torch.cat((cos, sin), dim=-1).to(dtype)
