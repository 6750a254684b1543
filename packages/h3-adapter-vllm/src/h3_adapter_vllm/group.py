"""The tensor-parallel group of an install: its collective, and that all its ranks install the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from h3_kernels.collectives import Collective, TorchDistributedCollective
from h3_kernels.collectives.protocol import check_collective
from h3_kernels.contract import UNITS, parse_parallel_id
from h3_kernels.errors import CollectiveError
from vllm.distributed import get_tp_group
from vllm.platforms import current_platform

from h3_adapter_vllm.settings import Settings

REFUSED = "refused"


def join_group(settings: Settings, device: torch.device, reasons: list[str]) -> tuple[Settings, list[str]]:
    """The settings with the group's collective, and the reasons with those of the group; nothing to do at tp=1.

    Every rank calls it, also one that has ``reasons`` to refuse. Ranks that compute different contracts would add
    partial sums of different trees, in silence; one that does not install would leave the others waiting in the first
    forward.
    """
    if settings.tp == 1:
        return settings, reasons
    try:
        collective = settings.collective or _default_collective()
        # A rank that refuses may name no contract at all, and must still tell the others.
        units = UNITS if reasons else parse_parallel_id(settings.contract)
        check_collective(collective, settings.tp, settings.rank, units)
    except (CollectiveError, ValueError) as error:
        return settings, reasons or [str(error)]
    settings = replace(settings, collective=collective)
    return settings, reasons + list(_disagreements(settings, collective, device, refused=bool(reasons)))


def _default_collective() -> Collective:
    """Over vLLM's own tp group; the form follows the size of each call."""
    group = get_tp_group()
    on_cpu = current_platform.is_cpu()
    return TorchDistributedCollective(group.cpu_group if on_cpu else group.device_group)


def _disagreements(
    settings: Settings, collective: Collective, device: torch.device, *, refused: bool
) -> Iterator[str]:
    stated = REFUSED if refused else settings.describe()
    mine = torch.tensor(list(_digest(stated)), dtype=torch.uint8, device=device)
    theirs = collective.all_gather_rows(mine.unsqueeze(0), settings.tp).tolist()
    for rank, row in enumerate(theirs):
        if refused or bytes(row) == _digest(stated):
            continue
        if bytes(row) == _digest(REFUSED):
            yield f"rank {rank} of tp={settings.tp} refused; its own error says why"
        else:
            yield f"rank {rank} of tp={settings.tp} installs something else than {stated}: state the same on all ranks"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
