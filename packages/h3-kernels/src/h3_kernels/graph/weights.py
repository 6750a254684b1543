"""Weights as the graph asks for them: by ``module`` names, whatever the engine calls and fuses them.

A linear may be one fused tensor or several; the graph only needs its outputs as column blocks in a known
order. ``WeightsView`` is the protocol; ``ModuleWeights`` reads a mapping of ``module`` names, in which a
fused linear may also be given in pieces, so that an adapter for separate q, k, v needs a dictionary and no
code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from h3_kernels.errors import InputError


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear's tensors and where each of its outputs lies in their products.

    ``weights``: [N_i, K] each; ``biases``: [N_i] or None each; ``outputs``: for each output of the node,
    (which weight, first column, one past the last column); ``parts``: for each weight, the order in which a
    backward unit consumes its equal row blocks (``h3_kernels.projection``).
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    outputs: tuple[tuple[int, int, int], ...]
    parts: tuple[tuple[int, ...], ...]


class WeightsView(Protocol):
    """What the graph reads. Called at every use, so a view may hold tensors that are gathered on demand."""

    def parameter(self, name: str) -> Tensor:
        """The tensor of that ``module`` name, e.g. ``blocks.0.norm1.weight``."""
        ...

    def linear(self, name: str) -> Linear:
        """The linear of that ``module`` name, e.g. ``blocks.0.attn.qkv_proj``."""
        ...


# Suffix of a fused linear -> its outputs in order, and the alternative ways of storing them: (suffix of the
# stored tensor, which outputs it holds as equal row blocks, from the top).
_FUSED: dict[str, tuple[tuple[str, ...], tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]]] = {
    "attn.qkv_proj": (
        ("q", "k", "v"),
        ((("weight", (0, 1, 2)),), (("q.weight", (0,)), ("k.weight", (1,)), ("v.weight", (2,)))),
    ),
    "mlp.fc1": (
        ("gate", "value"),
        (
            (("weight", (0, 1)),),
            (("value_gate.weight", (1, 0)),),
            (("gate.weight", (0,)), ("value.weight", (1,))),
        ),
    ),
}


def fused_outputs(name: str) -> tuple[str, ...] | None:
    """The output names of a fused linear (q, k, v or gate, value), or None for a plain one."""
    suffix = ".".join(name.rsplit(".", 2)[-2:])
    return _FUSED[suffix][0] if suffix in _FUSED else None


class ModuleWeights:
    """A view of a mapping from ``module`` names to tensors.

    ``attn.qkv_proj`` may be given as ``.weight`` (rows [Q; K; V]) or as ``.q.weight``, ``.k.weight``,
    ``.v.weight``; ``mlp.fc1`` as ``.weight`` (rows [gate; value]), as ``.value_gate.weight`` (rows [value;
    gate], Diffusers) or as ``.gate.weight`` and ``.value.weight``. On rank r of tp, each holds the rank's
    rows of every block.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._stored: dict[str, tuple[tuple[str, tuple[int, ...]], ...]] = {}

    def parameter(self, name: str) -> Tensor:
        """The tensor called ``name``. Raises InputError if there is none."""
        if name not in self._tensors:
            raise InputError(f"weights view has no {name!r}; expected every module name of the graph")
        return self._tensors[name]

    def linear(self, name: str) -> Linear:
        """The linear called ``name``, fused or in pieces. Raises InputError if no way of storing it is
        complete.
        """
        if name not in self._stored:
            self._stored[name] = self._way(name)
        stored = self._stored[name]
        if stored:
            return self._fused(name, stored)
        weight = self.parameter(f"{name}.weight")
        return Linear((weight,), (self._tensors.get(f"{name}.bias"),), ((0, 0, weight.shape[0]),), ((0,),))

    def _way(self, name: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """How the mapping stores a fused linear, with its full names; nothing for a plain one."""
        suffix = ".".join(name.rsplit(".", 2)[-2:])
        if suffix not in _FUSED:
            return ()
        for stored in _FUSED[suffix][1]:
            if all(f"{name}.{piece}" in self._tensors for piece, _ in stored):
                return tuple((f"{name}.{piece}", outputs) for piece, outputs in stored)
        ways = " or ".join("+".join(piece for piece, _ in stored) for stored in _FUSED[suffix][1])
        raise InputError(f"weights view has no complete {name!r}; expected {ways}")

    def _fused(self, name: str, stored: tuple[tuple[str, tuple[int, ...]], ...]) -> Linear:
        weights = tuple(self._tensors[piece] for piece, _ in stored)
        outputs: dict[int, tuple[int, int, int]] = {}
        for which, (piece, blocks) in enumerate(stored):
            rows, rest = divmod(weights[which].shape[0], len(blocks))
            if rest:
                raise InputError(
                    f"{piece} has {weights[which].shape[0]} rows; expected {len(blocks)} equal blocks"
                )
            for place, output in enumerate(blocks):
                outputs[output] = (which, place * rows, (place + 1) * rows)
        parts = tuple(blocks if len(blocks) > 1 else (0,) for _, blocks in stored)
        return Linear(weights, (None,) * len(weights), tuple(outputs[i] for i in sorted(outputs)), parts)
