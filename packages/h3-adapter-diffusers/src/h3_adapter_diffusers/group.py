"""The tensor-parallel group of an install: that all its ranks install the same."""

from __future__ import annotations

import torch.distributed as dist

from h3_adapter_diffusers.tensor_parallel import TensorParallel


def disagreements(tp: TensorParallel | None, stated: str, reasons: list[str]) -> list[str]:
    """What keeps other ranks of the group from installing, or from installing what this one `stated`.

    Every rank calls it, also one that has `reasons` to refuse. Ranks that compute different contracts would add partial
    sums of different trees, in silence; one that does not install would leave the others waiting in the first forward.
    """
    if tp is None or tp.size == 1:
        return []
    told: list[tuple[str, list[str]]] = [("", [])] * tp.size
    dist.all_gather_object(told, (stated, reasons), group=tp.group)
    found = [
        f"rank {rank} of tp={tp.size} installs something else: {other}; rank {tp.rank}: {stated}"
        for rank, (other, _) in enumerate(told)
        if other != stated
    ]
    return found + [
        f"rank {rank} of tp={tp.size} refused: {why[0]}"
        for rank, (_, why) in enumerate(told)
        if why and rank != tp.rank
    ]
