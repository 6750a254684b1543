"""An adapter in canonical terms: factors, deltas and assignments per atom."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from h3_mapper.config import H3Config
from h3_mapper.errors import ShapeError
from h3_mapper.lora.arrays import Tensor, columns, is_finite, is_zero, rows, shape
from h3_mapper.lora.modules import atoms_of
from h3_mapper.spec import Parallel


@dataclass(frozen=True, slots=True)
class LowRank:
    """`scale * b @ a` added to one atom. a [rank, in], b [rows, rank], magnitude [rows] if DoRA.

    scale is exact: alpha / rank as a fraction. rsLoRA's alpha / sqrt(rank) is the float64 PEFT computes.
    """

    a: Tensor
    b: Tensor
    scale: Fraction
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        """Rows of `a`."""
        return shape(self.a)[0]


@dataclass(frozen=True, slots=True)
class Adapter:
    """What an adapter does to a model.

    low_rank, deltas, assigned: by atom name. A delta has the atom's shape and is added; an assigned tensor replaces.
    component: `transformer`, `transformer_ref` ... if the names said it. notes: what a reader should know (warnings).
    """

    low_rank: Mapping[str, LowRank]
    deltas: Mapping[str, Tensor] = field(default_factory=dict)
    assigned: Mapping[str, Tensor] = field(default_factory=dict)
    component: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def touched(self) -> frozenset[str]:
        """Names of the atoms this adapter changes."""
        return frozenset({*self.low_rank, *self.deltas, *self.assigned})


_NUMBER = re.compile(r"(?<=blocks\.)\d+(?=\.)")


def uneven(adapter: Adapter, config: H3Config) -> Iterator[str]:
    """One line for each kind of atom that some blocks have and others lack."""
    present: dict[str, set[int]] = defaultdict(set)
    for name in adapter.touched:
        if match := _NUMBER.search(name):
            present[_NUMBER.sub("N", name)].add(int(match.group()))
    for kind, numbers in sorted(present.items()):
        count = config.num_refiner_layers if kind.startswith("token_refiner") else config.num_layers
        absent = sorted(set(range(count)) - numbers)
        if absent:
            shown = ", ".join(map(str, absent[:8])) + (" ..." if len(absent) > 8 else "")
            yield f"{kind}: {len(numbers)} of {count} blocks adapted; not in block {shown}"


def bad_values(adapter: Adapter) -> tuple[list[str], list[str]]:
    """(atoms with an infinity or NaN, atoms whose product is exactly zero because B is)."""
    broken, idle = [], []
    for name, term in adapter.low_rank.items():
        tensors = [term.a, term.b, *([term.magnitude] if term.magnitude is not None else [])]
        if not all(is_finite(tensor) for tensor in tensors):
            broken.append(name)
        elif is_zero(term.b):
            idle.append(name)
    broken += [name for name, value in {**adapter.deltas, **adapter.assigned}.items() if not is_finite(value)]
    return broken, idle


def shard(adapter: Adapter, config: H3Config, tp: int, rank: int) -> Adapter:
    """The part of an adapter that rank `rank` of `tp` applies, atom by atom.

    A column-parallel module cuts the rows of b (and magnitude), each of q, k, v, gate and value by itself; a
    row-parallel one cuts the columns of a. Norms and other whole atoms stay.
    """
    known = atoms_of(config)

    def cut(name: str, tensor: Tensor, axis: int) -> Tensor:
        size = shape(tensor)[axis]
        if size % tp:
            raise ShapeError(f"{name}: {size} does not divide by tp {tp}")
        start, stop = size // tp * rank, size // tp * (rank + 1)
        return rows(tensor, start, stop) if axis == 0 else columns(tensor, start, stop)

    def factors(name: str, term: LowRank) -> LowRank:
        match known[name].parallel:
            case Parallel.COLUMN:
                magnitude = None if term.magnitude is None else cut(name, term.magnitude, 0)
                return LowRank(term.a, cut(name, term.b, 0), term.scale, magnitude)
            case Parallel.ROW:
                return LowRank(cut(name, term.a, 1), term.b, term.scale, term.magnitude)
            case _:
                return term

    def whole(name: str, tensor: Tensor) -> Tensor:
        axis = {Parallel.COLUMN: 0, Parallel.ROW: 1}.get(known[name].parallel)
        return tensor if axis is None else cut(name, tensor, axis)

    return Adapter(
        {name: factors(name, term) for name, term in adapter.low_rank.items()},
        {name: whole(name, tensor) for name, tensor in adapter.deltas.items()},
        {name: whole(name, tensor) for name, tensor in adapter.assigned.items()},
        adapter.component,
        adapter.metadata,
        adapter.notes,
    )
