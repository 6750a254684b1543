"""Training steps replayed from CUDA graphs: one graph for a forward, one for its backward.

The first step over rows of some shapes is launched once, which chooses and proves every provider of both directions,
and captured; it and all that follow are replayed: same kernels, same bits. The forward's graph keeps what the
backward's reads (under checkpointing the inputs of blocks), so between the two no other step may run, and a backward
runs once.

Inputs are copied into the graphs' own, velocities and gradients out of them: autograd adds gradients up as for launched
steps, and what an optimizer or ``zero_grad`` does to ``.grad`` cannot reach a graph. Weights are read where they lay at
capture: values changed in place are followed; a weight that moved is captured anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from h3_kernels.backward_session import active_session
from h3_kernels.errors import CaptureError
from h3_kernels.graph.capture import into, keep, on
from h3_kernels.graph.checks import check_rows
from h3_kernels.graph.inputs import PackedInputs

logger = logging.getLogger(__name__)

Velocities = tuple[Tensor, Tensor]
_STREAMS = ("video", "audio", "text")


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """What a captured step is made of, as an adapter knows it."""

    forward: Callable[[PackedInputs], Velocities]
    """Reads nothing from the device, draws no random numbers, and leaves no tensor behind."""
    weights: Sequence[Tensor]
    """Every tensor that the forward reads beside its rows, as it lies now."""
    trained: Sequence[Tensor]
    """Those of them that want a gradient: leaves."""
    leaves: Callable[[], AbstractContextManager[Sequence[Tensor]]]
    """Puts leaves of the same memory in the place of ``trained`` while a step is captured: the accumulators of the
    trained ones may belong to another stream, which a capture must not touch."""
    kind: Hashable
    """What else the host has decided: settings, checkpointing, what is trained, active adapters and their scales."""

    def places(self) -> Hashable:
        """Where every weight lies now."""
        return tuple(weight.data_ptr() for weight in self.weights)

    def versions(self) -> Hashable:
        """Counts the changes in place of what is trained."""
        return tuple(leaf._version for leaf in self.trained)


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    inputs: PackedInputs
    forward: torch.cuda.CUDAGraph
    outputs: Velocities
    output_grads: Velocities
    backward: torch.cuda.CUDAGraph
    grads: tuple[Tensor | None, ...]


class StepGraphs:
    """The captured steps of one model, at most ``limit``, the oldest goes first. They share one pool of memory."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise CaptureError(f"a limit of {limit} captured steps; expected at least 1")
        self._limit = limit
        self._known: dict[Hashable, _Captured] = {}
        self._places: Hashable = None
        self._pool: Any = None
        self._turn = 0

    def __len__(self) -> int:
        """Steps captured."""
        return len(self._known)

    @property
    def turn(self) -> int:
        """Counts forwards and backwards; a backward is legal in the turn of its forward alone."""
        return self._turn

    def take_turn(self) -> int:
        """What the graphs kept for an earlier turn is about to be overwritten."""
        self._turn += 1
        return self._turn

    def release(self) -> None:
        """Drop every graph and its memory. A backward still to come is refused."""
        self._known.clear()
        self.take_turn()

    def run(self, step: TrainingStep, inputs: PackedInputs) -> Velocities:
        """``step.forward(inputs)``, replayed, differentiable in the trained leaves and in rows that want a gradient.

        ``inputs`` are canonical (``PackedInputs.canonical``). The first call of a kind takes about three steps. Raises
        CaptureError inside a backward session, and if the step cannot be captured.
        """
        if active_session() is not None:
            raise CaptureError(
                "a captured step inside a backward session: the session keeps rows that the next replay overwrites;"
                " leave the session, or release the captured steps"
            )
        rows = [name for name in _STREAMS if getattr(inputs, name).requires_grad]
        places = step.places()
        if places != self._places and self._known:
            logger.warning("weights moved since the last captured step: capturing anew")
            self._known.clear()
        self._places = places
        key = (inputs.fixed(), step.kind, tuple(rows))
        check_rows(inputs)
        with on(inputs.positions.device):
            if key not in self._known:
                keep(self._known, key, self._capture(step, inputs, rows), self._limit)
            wanted = (*(getattr(inputs, name) for name in rows), *step.trained)
            outputs: Velocities = _Replayed.apply(self, self._known[key], step, inputs, *wanted)  # type: ignore[no-untyped-call]
        return outputs

    def _capture(self, step: TrainingStep, inputs: PackedInputs, rows: Sequence[str]) -> _Captured:
        self.take_turn()
        own = inputs.own()
        with step.leaves() as leaves, torch.enable_grad():
            wanted = (*(getattr(own, name).requires_grad_() for name in rows), *leaves)
            outputs = step.forward(own)
            given = (torch.zeros_like(outputs[0]), torch.zeros_like(outputs[1]))
            _backward(outputs, wanted, given)
            del outputs
            try:
                return self._record(step, own, wanted, given)
            except RuntimeError as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise CaptureError(
                    f"a training step of {inputs.rows} rows cannot be captured: {reason}; release the captured steps"
                    " to launch it"
                ) from error

    def _record(
        self, step: TrainingStep, own: PackedInputs, wanted: Sequence[Tensor], given: Velocities
    ) -> _Captured:
        if not self._known:  # torch does not revive a pool whose last graph is gone
            self._pool = torch.cuda.graph_pool_handle()
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with into(forward, self._pool):
            outputs = step.forward(own)
        with into(backward, self._pool):
            grads = _backward(outputs, wanted, given)
        kept = (outputs[0].detach(), outputs[1].detach())
        return _Captured(own, forward, kept, given, backward, grads)


def _backward(outputs: Velocities, wanted: Sequence[Tensor], given: Velocities) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(outputs, wanted, given, allow_unused=True)


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        graphs: StepGraphs,
        captured: _Captured,
        step: TrainingStep,
        inputs: PackedInputs,
        *wanted: Tensor,
    ) -> Velocities:
        captured.inputs.fill(inputs)
        captured.forward.replay()
        ctx.graphs, ctx.captured, ctx.step = graphs, captured, step
        ctx.turn, ctx.before = graphs.take_turn(), (step.places(), step.versions())
        return captured.outputs[0].clone(), captured.outputs[1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        graphs, captured = ctx.graphs, ctx.captured
        if graphs.turn != ctx.turn:
            raise CaptureError(
                "backward of a captured step after another step, or for the second time: what its forward kept is"
                " overwritten; run each backward once, before the next forward, or release the captured steps"
            )
        graphs.take_turn()
        if (ctx.step.places(), ctx.step.versions()) != ctx.before:
            raise CaptureError(
                "weights moved or were changed in place between a captured forward and its backward; step the optimizer"
                " and sync weights after the backward"
            )
        for mine, theirs in zip(captured.output_grads, given, strict=True):
            mine.copy_(theirs)
        captured.backward.replay()
        return None, None, None, None, *_copies(captured.grads)


def _copies(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients in memory of their own: autograd keeps what it is given as ``.grad``; a replay would overwrite it."""
    found = [grad for grad in grads if grad is not None]
    copies = [torch.empty_like(grad) for grad in found]
    if found:
        torch._foreach_copy_(copies, found)
    left = iter(copies)
    return [None if grad is None else next(left) for grad in grads]
