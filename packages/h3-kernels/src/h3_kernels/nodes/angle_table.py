"""Cosines and sines of values times frequencies: what the rotary table and the timestep sinusoid have in
common.

Written order, elementwise: angle = value * frequency, rounded to float32, as both engines compute it; sin and
cos of that angle from IEEE operations (``_elementary``), rounded to float32, then to the table's dtype. The
CUDA kernel (``h3_kernels.triton.elementary``) takes the same operations and has the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3_kernels.nodes._elementary import sin_cos
from h3_kernels.nodes._op import NodeOp, check


def angle_table(values: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [R, 2 * A * F] of ``dtype``: the cosines of A * F angles, axis by axis, then their sines.

    ``values``: [R, A] float32, |value * frequency| below 1.6e6; ``frequencies``: [F] float32. Not
    differentiable. Raises InputError on a wrong shape or dtype.
    """
    right = values.dim() == 2 and values.dtype == torch.float32
    check(right, "angle_table", "values must be float32 [rows, axes], got {} {}", values.dtype, values)
    right = frequencies.dim() == 1 and frequencies.dtype == torch.float32
    check(
        right,
        "angle_table",
        "frequencies must be float32 [F], got {} {}",
        frequencies.dtype,
        frequencies,
    )
    return ANGLE_TABLE(values.detach(), frequencies.detach(), dtype=dtype)  # type: ignore[no-any-return]


def _angle_table(values: Tensor, frequencies: Tensor, *, dtype: torch.dtype) -> Tensor:
    sin, cos = sin_cos((values.unsqueeze(-1) * frequencies).flatten(1))
    return torch.cat((cos, sin), dim=-1).to(dtype)


def _no_gradient(*tensors: Tensor, needs: tuple[bool, ...], dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    return None, None


ANGLE_TABLE = NodeOp("angle_table", "elementary", _angle_table, _no_gradient)
