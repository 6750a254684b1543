"""The rotary table of the packed rows: [cos | sin] of the (t, h, w) angles, in bf16.

The order is that of ``angle_table``. The table is bf16 in both engines (diffusers 0.42 casts it to the
activations' dtype, vLLM-Omni 0.30 stores it so), so it is part of the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3_kernels.nodes._op import check
from h3_kernels.nodes.angle_table import angle_table


def inverse_frequencies(count: int, theta: float = 10000.0) -> Tensor:
    """``1 / theta ** (2 i / (2 count))`` in float32 on the CPU, [count]: the formula of both engines.

    ``theta ** -x`` differs in the last bit of 4 of the 16 values, so the division stays.
    """
    exponent = torch.arange(0, 2 * count, 2, dtype=torch.float32, device="cpu") / (2 * count)
    return 1.0 / (theta**exponent)


def rope_table(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return [T, 2 * 3 * F]: cos of the t, h and w angles, then their sines.

    ``positions``: [T, 3] of any float or int dtype (float64 grids are rounded to float32 first, as the
    engines do); ``inv_freq``: [F] float32. Raises InputError on a wrong shape or dtype.
    """
    right = positions.dim() == 2 and positions.shape[1] == 3
    check(right, "rope_table", "positions must be [rows, 3] (t, h, w), got {}", positions)
    return angle_table(positions.to(torch.float32), inv_freq, dtype)
