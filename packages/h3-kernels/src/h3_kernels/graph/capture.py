"""What captured forwards and captured training steps share: how a graph is captured, and which ones are kept."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

Captured = TypeVar("Captured")


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a CUDA device the current one; does nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def into(graph: torch.cuda.CUDAGraph, pool: Any) -> AbstractContextManager[Any]:
    """Captures what the block launches. Other threads may query the device meanwhile, as NCCL's watchdog does."""
    return torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")


def keep(known: dict[Hashable, Captured], key: Hashable, captured: Captured, limit: int) -> None:
    """Put a capture into ``known`` as its newest, which then holds ``limit`` of them: the oldest go."""
    known.pop(key, None)
    while len(known) >= limit:
        del known[next(iter(known))]
    known[key] = captured
