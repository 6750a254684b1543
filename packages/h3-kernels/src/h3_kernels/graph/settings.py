"""How a run of the graph is computed, and who may watch or replace its nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from h3_kernels.collectives.protocol import Collective
from h3_kernels.contract import PROJECTION, UNITS, parallel_id
from h3_kernels.graph.inputs import PackedInputs
from h3_kernels.graph.parallel import SequenceParallel
from h3_kernels.graph.table import Node

Results = tuple[Tensor, ...]
Replacement = Callable[..., Results]


class Tracer(Protocol):
    """What watches a run: told when a forward begins and after every node, once even under checkpointing.

    Unless it has an attribute ``reads_values`` that is false, no node's outputs stay inside a launch. Where they may,
    such a node is recorded with the outputs of the launch.
    """

    def begin(self, inputs: PackedInputs) -> None:
        """A forward over ``inputs`` (in the order of rows it will use) starts."""
        ...

    def record(self, node: Node, requested: str, actual: str, outputs: Mapping[str, Tensor]) -> None:
        """``requested`` and ``actual`` name the contract and what computed it; ``outputs`` by slot."""
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run is computed. Only ``contract``, ``overlay`` and, on CUDA, ``attention`` change bits of the result.

    ``overlay`` maps a node's name to a replacement ``f(strict, *inputs) -> outputs``: ``strict(*inputs)`` is
    the node's own computation. An adapter uses it to keep a node on the engine's arithmetic, to add a LoRA term,
    or to plant a deviation. ``provider``: of the linears (any legal one has the same bits); ``attention``: of the
    attention forward (``h3_kernels.attention_providers``: each has its own bits, so both engines must name one where
    their installations differ). ``fuse``: run gated residual and norm, and without gradients fc1 and SwiGLU, in one
    launch, with the bits of the two.
    """

    tp: int = 1
    rank: int = 0
    collective: Collective | None = None
    contract: str = parallel_id(UNITS)
    provider: str = "auto"
    attention: str = "auto"
    sequence: SequenceParallel | None = None
    overlay: Mapping[str, Replacement] = field(default_factory=dict)
    tracer: Tracer | None = None
    checkpoint: bool = False
    fuse: bool = True


def requested_operator(node: Node, settings: Settings) -> str:
    """The contract a node computes: a linear's id, or ``h3-node-v1:`` and the operation."""
    if node.op == "projection":
        return PROJECTION
    return settings.contract if node.op == "row_parallel" else f"h3-node-v1:{node.op}"


def replacement_name(replacement: Replacement) -> str:
    """What a trace calls an overlay's function."""
    return str(getattr(replacement, "__qualname__", type(replacement).__qualname__))
