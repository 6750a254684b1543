"""Stands for CUDA graphs on a CPU, for tests of what is captured, kept and replayed; bits need a device."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class Graph:
    """Stands for a CUDA graph: what ran under it is not run again. Counts the replays of all of them."""

    replays = 0

    def replay(self) -> None:
        """Count one."""
        Graph.replays += 1


def stand_in(monkeypatch: Any) -> list[int]:
    """Replace CUDA's own parts of a capture until pytest undoes ``monkeypatch``; every capture adds one to the list."""
    counted: list[int] = []

    def capture(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
        counted.append(1)
        return contextlib.nullcontext()

    monkeypatch.setattr(Graph, "replays", 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return counted
