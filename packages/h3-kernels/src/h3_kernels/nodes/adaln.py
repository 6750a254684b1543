"""The AdaLN table and the row of it that each packed row uses.

A block's AdaLN projection maps [M, t_dim] (one row per distinct timestep) to [M, 3 * 6 * H]; seen as [M * 3,
6 * H], row ``t * 3 + tag`` holds shift, scale and gate of attention and of the MLP for timestep t and
modality tag (0 video, 1 text, 2 audio). The final layer has one modality and two parts, shift and scale: row
t. Both nodes only move bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3_kernels.nodes._op import check

MODALITIES = 3


def adaln_index(timestep_index: Tensor, tags: Tensor) -> Tensor:
    """``timestep_index * 3 + max(tag, 0)``, [T] int64: padding rows (tag -1) read row 0 of their timestep.

    Values are not looked at: ``graph.checks`` refuses tags outside -1..2 and indices without a timestep.
    """
    same = timestep_index.shape == tags.shape and timestep_index.dtype == tags.dtype == torch.int64
    check(same, "adaln_index", "timestep_index and tags must be int64 [rows]")
    return timestep_index * MODALITIES + tags.clamp(min=0)


def adaln_parts(projected: Tensor, modalities: int, parts: int) -> tuple[Tensor, ...]:
    """Cut [M, modalities * parts * H] into ``parts`` tables of [M * modalities, H] (views, row stride parts *
    H).
    """
    width = projected.shape[-1]
    right = projected.dim() == 2 and width % (modalities * parts) == 0
    check(right, "adaln_parts", "expected [M, multiple of {}], got {}", modalities * parts, projected)
    table = projected.reshape(-1, width // modalities)
    return table.chunk(parts, dim=-1)
