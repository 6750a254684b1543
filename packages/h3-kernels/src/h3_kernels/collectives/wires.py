"""Bytes between ranks over a torch.distributed backend. Nothing here adds."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 renamed the collective and warns at the old name, which is the only one in 2.11."""


def all_gather(block: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...]: the block of every rank, in new memory. Bytes travel, so every backend carries every dtype."""
    sent = _on_wire(block, group)
    gathered = sent.new_empty((dist.get_world_size(group), *block.shape))
    # Flat, because a contiguous tensor may have any stride in a dimension of one, and a view as bytes may not.
    _all_gather_single(gathered.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8), group=group)
    return gathered.to(block.device)


def all_to_all(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...], in new memory: from every rank the block it holds for this one, of ``blocks`` [ranks, ...]."""
    sent = _on_wire(blocks, group)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.to(blocks.device)


def scatter_rows(t: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """[ranks, sizes[rank], N], in new memory: every rank's copy of this rank's rows, of ``t`` [sum(sizes), N].

    Rank r's rows come after those of the ranks before it; sizes may differ, and nothing is padded or copied first.
    """
    sent, ranks = _on_wire(t, group), len(sizes)
    mine = sizes[dist.get_rank(group)]
    received = sent.new_empty((ranks * mine, *t.shape[1:]))
    dist.all_to_all_single(received, sent, [mine] * ranks, list(sizes), group=group)
    return received.view(ranks, mine, *t.shape[1:]).to(t.device)


def _on_wire(block: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The block, contiguous, where the group's backend reads it: gloo gathers host memory only."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(",") if ":" in pair)
    return (block.cpu() if backends.get(block.device.type) == "gloo" else block).contiguous()
