"""What a run leaves behind: row digests of every node's output, step by step, and the trajectory itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from h3_kernels.errors import InputError
from h3_kernels.graph import Node, PackedInputs
from h3_kernels.trace.digest import digest_of, group_digests, row_digests

# Slots whose columns a tensor-parallel rank holds a 1/tp slice of.
_SHARDED_SLOTS = frozenset({"q", "k", "v", "a", "gate", "value", "f"})


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """One node's output in one step: ``rows`` are the digests of its active rows (or of runs of them)."""

    node: str
    slot: str
    requested: str
    actual: str
    dtype: str
    shape: tuple[int, ...]
    rows: Tensor

    @property
    def digest(self) -> str:
        """One digest of the whole output."""
        return digest_of(self.rows, self.shape, self.dtype)


@dataclass(slots=True, eq=False)
class Step:
    """One forward of a trajectory: outputs in the order they were computed, velocity and latents by stream."""

    outputs: dict[tuple[str, str], Output] = field(default_factory=dict)
    velocity: dict[str, Tensor] = field(default_factory=dict)
    latents: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Trace:
    """A run. ``fingerprint``: of the architecture and contracts; ``sigmas`` and ``noise`` by stream (video,
    audio).
    """

    label: str
    fingerprint: dict[str, Any] = field(default_factory=dict)
    rows_per_digest: int = 1
    tp: int = 1
    rank: int = 0
    noise: dict[str, Tensor] = field(default_factory=dict)
    sigmas: dict[str, Tensor] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)


class Recorder:
    """A tracer (``graph.Settings.tracer``) that fills a :class:`Trace`; each forward is one step.

    Padding rows are left out and rows over timesteps are taken as a sorted set, so that two engines that pad
    and number timesteps differently leave equal traces. Integer outputs (indices) are not recorded.
    ``rows_per_digest``: how many rows share one digest on a large run; 1 finds the row.
    """

    def __init__(
        self,
        label: str,
        *,
        fingerprint: Mapping[str, Any] | None = None,
        rows_per_digest: int = 1,
        tp: int = 1,
        rank: int = 0,
    ) -> None:
        self.trace = Trace(label, dict(fingerprint or {}), rows_per_digest, tp, rank)
        self._active: Tensor | None = None

    def begin(self, inputs: PackedInputs) -> None:
        """Start a step."""
        self.start_step(inputs.tags)

    def start_step(self, tags: Tensor | None = None) -> None:
        """Start a step of a model that is not run by the graph. ``tags`` [T]: -1 marks padding rows."""
        self.trace.steps.append(Step())
        active = None if tags is None else (tags >= 0).nonzero().squeeze(1)
        self._active = None if tags is None or active is None or len(active) == len(tags) else active

    def record(self, node: Node, requested: str, actual: str, outputs: Mapping[str, Tensor]) -> None:
        """Record a node's outputs (the tracer's call)."""
        for slot, output in outputs.items():
            self.observe(node.name, slot, output, rows=node.rows, requested=requested, actual=actual)

    def observe(
        self, node: str, slot: str, output: Tensor, *, rows: str, requested: str = "", actual: str = ""
    ) -> None:
        """Record one output [rows, ...] under a node's name and slot; ``rows`` as in ``graph.Node``.

        Raises InputError before the first step has begun.
        """
        if not self.trace.steps:
            raise InputError("observe: no step has begun; call start_step first")
        if not output.is_floating_point():
            return
        first = 0
        if slot in _SHARDED_SLOTS:
            first = self.trace.rank * output[0].numel() if output.shape[0] else 0
        digests = row_digests(output, first)
        if rows == "packed" and self._active is not None and digests.shape[0] > len(self._active):
            digests = digests[self._active.cpu()]
        if rows == "time":
            digests = torch.unique(digests)
        shape = (digests.shape[0], *output.shape[1:])
        grouped = group_digests(digests, self.trace.rows_per_digest)
        dtype = str(output.dtype).removeprefix("torch.")
        self.trace.steps[-1].outputs[(node, slot)] = Output(
            node, slot, requested, actual, dtype, shape, grouped
        )

    def noise(self, **streams: Tensor) -> None:
        """The latents before the first step, e.g. ``video=..., audio=...``."""
        self.trace.noise.update({name: _kept(t) for name, t in streams.items()})

    def sigmas(self, **streams: Tensor | Sequence[float]) -> None:
        """The noise levels of the grid, one more than there are steps."""
        kept = {name: torch.as_tensor(grid, dtype=torch.float64) for name, grid in streams.items()}
        self.trace.sigmas.update({name: _kept(t) for name, t in kept.items()})

    def velocity(self, **streams: Tensor) -> None:
        """The model's output of the current step."""
        self.trace.steps[-1].velocity.update({name: _kept(t) for name, t in streams.items()})

    def latents(self, **streams: Tensor) -> None:
        """The latents after the current step."""
        self.trace.steps[-1].latents.update({name: _kept(t) for name, t in streams.items()})


def _kept(x: Tensor) -> Tensor:
    return x.detach().cpu().clone().contiguous()


def merge_ranks(traces: Sequence[Trace]) -> Trace:
    """One trace of the whole model from those of its tensor-parallel ranks, in rank order.

    Digests of sharded outputs add up; everything else must be the same on every rank. Raises InputError if
    ranks are missing, if they recorded different nodes, or if a replicated output differs between ranks (the
    message names it).
    """
    first = traces[0]
    if (
        [t.rank for t in traces] != list(range(first.tp))
        or len(traces) != first.tp
        or first.rows_per_digest != 1
    ):
        raise InputError(f"merge_ranks: expected ranks 0..{first.tp - 1} with rows_per_digest=1, in order")
    merged = Trace(first.label, first.fingerprint, 1, 1, 0, first.noise, first.sigmas)
    for number, steps in enumerate(zip(*(t.steps for t in traces), strict=True)):
        merged.steps.append(_merge_step(number, steps))
    return merged


def _merge_step(number: int, steps: tuple[Step, ...]) -> Step:
    step = Step(velocity=steps[0].velocity, latents=steps[0].latents)
    for key in steps[0].outputs:
        if any(key not in other.outputs for other in steps):
            raise InputError(f"merge_ranks: step {number}: {key[0]} is missing on some ranks")
        outputs = [other.outputs[key] for other in steps]
        if key[1] not in _SHARDED_SLOTS and any(not torch.equal(o.rows, outputs[0].rows) for o in outputs):
            raise InputError(f"merge_ranks: step {number}: {key[0]} {key[1]} differs between ranks")
        step.outputs[key] = _add_columns(outputs) if key[1] in _SHARDED_SLOTS else outputs[0]
    return step


def _add_columns(outputs: Sequence[Output]) -> Output:
    first = outputs[0]
    shape = (first.shape[0], first.shape[1] * len(outputs), *first.shape[2:])
    return replace(first, shape=shape, rows=torch.stack([o.rows for o in outputs]).sum(0))
