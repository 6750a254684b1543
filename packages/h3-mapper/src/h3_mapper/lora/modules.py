"""Which atoms a named parameter holds, in each naming an adapter can have.

Adapter factors are kept per atom (`blocks.0.attn.qkv_proj.weight[q]`), the unit of identity that checkpoints have
too, so an adapter moves between namings by taking fused rows apart into atoms and putting them together again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from h3_mapper.config import H3Config
from h3_mapper.lora.arrays import Tensor, concat, rows
from h3_mapper.lora.formats import Fc1Rows, Naming, QkvRows
from h3_mapper.plan import atoms, spans
from h3_mapper.spec import Atom, Layout, Part, Span

ENGINE_NAMES = {
    Part.Q: "attn.to_q.weight",
    Part.K: "attn.to_k.weight",
    Part.V: "attn.to_v.weight",
    Part.GATE: "mlp.fc1_0.weight",
    Part.VALUE: "mlp.fc1_1.weight",
}
"""What verl-omni calls a single part under its native block."""


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The stated order of fused native rows; None where nobody stated it."""

    qkv: QkvRows | None = None
    fc1: Fc1Rows | None = None


UNSTATED = RowOrder()


@dataclass(frozen=True, slots=True)
class Place:
    """One parameter name in one naming, and the atom rows it holds in order.

    hangs_on: the statement its row order depends on (`qkv`, `fc1`), None if the naming settles it.
    """

    name: str
    atoms: tuple[Atom, ...]
    spans: tuple[Span, ...]
    hangs_on: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return (sum(atom.rows for atom in self.atoms), *self.atoms[0].shape[1:])

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """Rows of `tensor` [rows, ...] by atom name; views where an atom's rows are contiguous."""
        pieces: dict[str, list[Tensor]] = {atom.name: [] for atom in self.atoms}
        for span in self.spans:
            pieces[span.atom].append(rows(tensor, span.row, span.row + span.stop - span.start))
        return {name: concat(held) for name, held in pieces.items()}

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `split`."""
        return concat([rows(parts[span.atom], span.start, span.stop) for span in self.spans])


@lru_cache(maxsize=16)
def atoms_of(config: H3Config) -> Mapping[str, Atom]:
    """Every atom an adapter can touch, VSA gates included, by name."""
    return {atom.name: atom for atom in atoms(config.with_gates(True))}


@lru_cache(maxsize=32)
def places(config: H3Config, naming: Naming, order: RowOrder = UNSTATED) -> Mapping[str, Place]:
    """Every parameter an adapter can touch, VSA gates included, by its name in `naming`.

    Native naming without a stated order gives the stacked, gate-first places; `Place.hangs_on` says which of them
    must not be used like that. Flat names keep their ending: `blocks_0_attn_qkv_proj.weight`.
    """
    return {place.name: place for place in _places(config, naming, order)}


def _places(config: H3Config, naming: Naming, order: RowOrder) -> Iterator[Place]:
    known = atoms_of(config)
    for name, held in spans(config.with_gates(True), _layout(naming, order)).items():
        inside = tuple(known[atom] for atom in dict.fromkeys(span.atom for span in held))
        fused = len(inside) > 1
        if naming is Naming.ENGINE and fused:
            yield from (_alone(atom) for atom in inside)
            continue
        if naming is Naming.DIFFUSERS or not fused:
            yield Place(_named(name, naming), inside, held)
            continue
        hangs_on = "qkv" if inside[0].part is Part.Q else "fc1"
        if hangs_on == "fc1" and order.fc1 is Fc1Rows.VALUE_FIRST:
            yield Place(_named(name, naming), inside[::-1], _in_turn(inside[::-1]), hangs_on)
        else:
            yield Place(_named(name, naming), inside, held, hangs_on)


def _layout(naming: Naming, order: RowOrder) -> Layout:
    if naming is Naming.DIFFUSERS:
        return Layout.DIFFUSERS
    return Layout.RELEASE if order.qkv is QkvRows.GROUPED else Layout.MODULE


def _alone(atom: Atom) -> Place:
    name = f"{atom.group}.{ENGINE_NAMES[atom.part]}"
    return Place(name, (atom,), _in_turn((atom,)))


def _in_turn(held: tuple[Atom, ...]) -> tuple[Span, ...]:
    return tuple(Span(atom.name, 0, atom.rows, i * atom.rows) for i, atom in enumerate(held))


def _named(name: str, naming: Naming) -> str:
    if naming is not Naming.FLAT:
        return name
    module, _, kind = name.rpartition(".")
    return f"{module.replace('.', '_')}.{kind}"
