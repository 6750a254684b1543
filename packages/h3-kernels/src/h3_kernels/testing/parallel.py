"""All ranks of a tensor-parallel group in one process: for tests without processes, and on one GPU."""

import torch
from torch import Tensor

from h3_kernels.contract import UNITS, rank_units
from h3_kernels.providers import tree_gemm
from h3_kernels.reference import finish, fold_tree


def shard_columns(t: Tensor, tp: int, rank: int) -> Tensor:
    """The K / tp columns of [..., K] that ``rank`` of ``tp`` holds for a row-parallel linear; a view."""
    width = t.shape[-1] // tp
    return t[..., rank * width : (rank + 1) * width]


def shard_parts(t: Tensor, tp: int, rank: int, *, parts: int = 1, dim: int = 0) -> Tensor:
    """``rank``'s 1/tp of each of ``parts`` equal blocks along ``dim``, as a fused column-parallel weight is sharded."""
    return torch.cat([block.chunk(tp, dim=dim)[rank] for block in t.chunk(parts, dim=dim)], dim=dim)


def emulated_row_parallel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tp: int,
    units: int = UNITS,
    provider: str = "auto",
) -> Tensor:
    """y [T, N] of x [T, K] and weight [N, K] as ``tp`` ranks compute it: a subtree root each, then their tree."""
    roots = []
    for rank in range(tp):
        start, stop = rank_units(tp, rank, units)
        local = (shard_columns(t, tp, rank).contiguous() for t in (x, weight))
        roots.append(tree_gemm(*local, units=stop - start, out_dtype=torch.float32, provider=provider))
    return finish(fold_tree(torch.stack(roots)), bias, x.dtype)
