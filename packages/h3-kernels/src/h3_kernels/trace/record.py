"""What a run leaves behind: row digests of every node's output, step by step, and the trajectory itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from h3_kernels.contract import row_range
from h3_kernels.errors import InputError
from h3_kernels.graph import Node, PackedInputs
from h3_kernels.trace.digest import digest_of, group_digests, row_digests

# Slots whose columns a tensor-parallel rank holds a 1/tp slice of.
_SHARDED_SLOTS = frozenset({"q", "k", "v", "a", "gate", "value", "f"})


@dataclass(frozen=True, slots=True)
class Parallel:
    """Rank ``rank`` of ``ranks`` that share a run: ``kind`` is ``tensor`` or ``sequence`` (Ulysses)."""

    kind: Literal["tensor", "sequence"]
    ranks: int
    rank: int


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """One node's output in one step: ``rows`` are the digests of its active rows (or of runs of them).

    ``held``: what of the output this rank holds: ``whole``, a slice of its ``columns`` or of its ``rows``.
    """

    node: str
    slot: str
    requested: str
    actual: str
    dtype: str
    shape: tuple[int, ...]
    held: str
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
    """A run; ``sigmas`` and ``noise`` by stream (video, audio). ``parallel``: the rank that recorded it, or None."""

    label: str
    fingerprint: dict[str, Any] = field(default_factory=dict)
    rows_per_digest: int = 1
    parallel: Parallel | None = None
    noise: dict[str, Tensor] = field(default_factory=dict)
    sigmas: dict[str, Tensor] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)


class Recorder:
    """A tracer (``graph.Settings.tracer``) that fills a :class:`Trace`; each forward is one step.

    Padding rows are left out and rows over timesteps are taken as a sorted set, so that two engines that pad
    and number timesteps differently leave equal traces. Integer outputs (indices) are not recorded.
    ``rows_per_digest``: how many rows share one digest on a large run; 1 finds the row. ``parallel``: the
    rank that records (see ``merge_ranks``).
    """

    def __init__(
        self,
        label: str,
        *,
        fingerprint: Mapping[str, Any] | None = None,
        rows_per_digest: int = 1,
        parallel: Parallel | None = None,
    ) -> None:
        self.trace = Trace(label, dict(fingerprint or {}), rows_per_digest, parallel)
        self._active: Tensor | None = None
        self._rows = 0

    def begin(self, inputs: PackedInputs) -> None:
        """Start a step."""
        self.start_step(inputs.tags)

    def start_step(self, tags: Tensor | None = None) -> None:
        """Start a step of a model that is not run by the graph. ``tags`` [T]: -1 marks padding rows."""
        self.trace.steps.append(Step())
        self._active, self._rows = None, 0 if tags is None else len(tags)
        if tags is not None and bool((tags < 0).any()):
            self._active = (tags >= 0).nonzero().squeeze(1).cpu()

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
        held, first = self._held(slot, rows, output)
        digests = row_digests(output, first)
        if rows == "packed" and self._active is not None:
            digests = digests[self._on_this_rank(self._active, held)]
        if rows == "time":
            digests = torch.unique(digests)
        shape = (digests.shape[0], *output.shape[1:])
        grouped = group_digests(digests, self.trace.rows_per_digest)
        dtype = str(output.dtype).removeprefix("torch.")
        recorded = Output(node, slot, requested, actual, dtype, shape, held, grouped)
        self.trace.steps[-1].outputs[(node, slot)] = recorded

    def _held(self, slot: str, rows: str, output: Tensor) -> tuple[str, int]:
        """What of an output this rank holds, and the place of its first column in the whole row."""
        p = self.trace.parallel
        if p is None:
            return "whole", 0
        if p.kind == "tensor":
            return ("columns", p.rank * output[:1].numel()) if slot in _SHARDED_SLOTS else ("whole", 0)
        start, stop = row_range(self._rows, p.ranks, p.rank)
        part = rows == "packed" and output.shape[0] == stop - start and p.ranks > 1
        return ("rows" if part else "whole"), 0

    def _on_this_rank(self, active: Tensor, held: str) -> Tensor:
        p = self.trace.parallel
        if held != "rows" or p is None:
            return active
        start, stop = row_range(self._rows, p.ranks, p.rank)
        return active[(active >= start) & (active < stop)] - start

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
    """One trace of the whole run from those of its tensor-parallel or sequence-parallel ranks, in rank order.

    Digests of column slices add up and those of row slices follow each other; everything else must be the
    same on every rank. Raises InputError if ranks are missing, if they recorded different nodes, or if a
    replicated output differs between ranks (the message names it).
    """
    if not traces:
        raise InputError("merge_ranks: no trace given; expected one of each rank, in order")
    first = traces[0]
    p = first.parallel
    ranks = [t.parallel for t in traces]
    if (
        p is None
        or ranks != [Parallel(p.kind, p.ranks, r) for r in range(p.ranks)]
        or first.rows_per_digest != 1
    ):
        expected = "the ranks of one run" if p is None else f"ranks 0..{p.ranks - 1}"
        raise InputError(f"merge_ranks: expected {expected} with rows_per_digest=1, in order")
    merged = Trace(first.label, first.fingerprint, 1, None, first.noise, first.sigmas)
    counts = [len(t.steps) for t in traces]
    if len(set(counts)) > 1:
        raise InputError(f"merge_ranks: ranks recorded {counts} steps; expected the same number on each")
    for number, steps in enumerate(zip(*(t.steps for t in traces), strict=True)):
        merged.steps.append(_merge_step(number, steps))
    return merged


def _merge_step(number: int, steps: tuple[Step, ...]) -> Step:
    step = Step(velocity=steps[0].velocity, latents=steps[0].latents)
    everywhere = set.intersection(*(set(s.outputs) for s in steps))
    for other in steps:
        for key in other.outputs.keys() - everywhere:
            raise InputError(f"merge_ranks: step {number}: {key[0]} is missing on some ranks")
    for key in steps[0].outputs:
        outputs = [other.outputs[key] for other in steps]
        if outputs[0].held == "whole" and any(not torch.equal(o.rows, outputs[0].rows) for o in outputs):
            raise InputError(f"merge_ranks: step {number}: {key[0]} {key[1]} differs between ranks")
        step.outputs[key] = _merge_outputs(outputs)
    return step


def _merge_outputs(outputs: Sequence[Output]) -> Output:
    first = outputs[0]
    if first.held == "whole":
        return first
    if first.held == "rows":
        rows = torch.cat([o.rows for o in outputs])
        return replace(first, held="whole", shape=(rows.shape[0], *first.shape[1:]), rows=rows)
    shape = (first.shape[0], first.shape[1] * len(outputs), *first.shape[2:])
    return replace(first, held="whole", shape=shape, rows=torch.stack([o.rows for o in outputs]).sum(0))
