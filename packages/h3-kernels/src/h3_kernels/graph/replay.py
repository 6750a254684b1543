"""Whole forwards replayed from CUDA graphs, where launching their nodes takes the host longer than the device.

The first forward over rows of some shapes runs as it is, which chooses and proves every provider. The second is
captured, and from then on forwards of these shapes are one launch: same kernels, same bits. Inputs are copied into the
graph's own, velocities out of it. Weights are read where they lay at capture: values changed in place are followed, and
a tensor that moved is another key. Asked for by H3_CUDA_GRAPHS=1. Measured: docs/measured-facts-nodes.md.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from h3_kernels.graph.capture import into, keep, on
from h3_kernels.graph.checks import check_rows
from h3_kernels.graph.inputs import PackedInputs
from h3_kernels.graph.run import PackedDiT
from h3_kernels.graph.settings import Settings
from h3_kernels.graph.weights import WeightsView
from h3_kernels.modes import capturing

ENVIRONMENT = "H3_CUDA_GRAPHS"
"""``1`` replays; anything else runs every forward launch by launch. Off by default: graphs keep their memory."""

ROWS = 2048
"""Most packed rows of a replayed forward: above, the device is the slower one anyway, and a graph keeps its memory."""

GRAPHS = 8
"""Graphs kept, the oldest goes first. They share one pool of memory, as no two of them run at once."""

Velocities = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: PackedInputs
    outputs: Velocities


class Replays:
    """The captured forwards of one model. Forwards of a model run one after the other."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Captured | None] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        """Forwards captured."""
        return sum(captured is not None for captured in self._known.values())

    def serves(self, inputs: PackedInputs, settings: Settings, *, terms_only: bool = False) -> bool:
        """Whether such a forward may be replayed: on CUDA, few rows, one rank, no gradients, and no overlay.

        ``terms_only``: the overlay adds LoRA terms and nothing else, and ``places`` of ``run`` says all the host reads
        of them.
        """
        device = inputs.positions.device
        plain = terms_only or not settings.overlay
        alone = settings.tp == 1 and settings.sequence is None and plain
        few = device.type == "cuda" and inputs.rows <= ROWS
        return (
            alone
            and few
            and not torch.is_grad_enabled()
            and not capturing(device)
            and os.environ.get(ENVIRONMENT) == "1"
        )

    def run(
        self, dit: PackedDiT, weights: WeightsView, inputs: PackedInputs, settings: Settings, places: Hashable
    ) -> Velocities:
        """``dit.run(weights, inputs, settings)``, replayed from the second forward of its kind on.

        ``places``: where the weights lie; a graph is never replayed for others. The tracer sees the forwards that are
        not replayed.
        """
        inputs = replace(inputs, keys=None)
        key = (
            places,
            inputs.fixed(),
            settings.contract,
            settings.provider,
            settings.attention,
            settings.fuse,
        )
        if key not in self._known:
            keep(self._known, key, None, GRAPHS)
            return dit.run(weights, inputs, settings)
        check_rows(inputs)
        with on(inputs.positions.device):
            captured = self._known[key] or self._capture(key, dit, weights, inputs, settings)
            captured.inputs.fill(inputs)
            captured.graph.replay()
            video, audio = captured.outputs
            return video.clone(), audio.clone()

    def _capture(
        self, key: Hashable, dit: PackedDiT, weights: WeightsView, inputs: PackedInputs, settings: Settings
    ) -> _Captured:
        own, graph = inputs.own(), torch.cuda.CUDAGraph()
        if not len(self):  # torch does not revive a pool whose last graph is gone
            self._pool = torch.cuda.graph_pool_handle()
        with into(graph, self._pool):
            outputs = dit.run(weights, own, settings)
        captured = _Captured(graph, own, outputs)
        keep(self._known, key, captured, GRAPHS)
        return captured
