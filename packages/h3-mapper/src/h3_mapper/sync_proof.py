"""Are two sets of live weights the same bits? Digests per atom, from any layout, tensor-parallel degree or shard.

The digest of an atom is a sum, mod 2**64, over its words of `mix(word + GOLD * position)`, where position counts
the words of the whole atom row by row and mix is a bijection. Because it is a sum, every holder of a piece adds up
its own words where they lie, on its own device, without gathering, and the pieces' sums are added. Because mix is a
bijection, one changed word always changes the sum: a single bf16 ulp cannot hide. 64 bits find accidents, not an
adversary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from h3_mapper.backends import Array, backend
from h3_mapper.config import H3Config
from h3_mapper.errors import MapperError, ShapeError, SourceError, UnknownNameError, listed
from h3_mapper.identify import identified_all
from h3_mapper.plan import atoms, derived
from h3_mapper.spec import ITEMSIZE, Atom, Layout
from h3_mapper.tp import cut_axis, cut_range, shard_shape, shard_spans
from h3_mapper.word_sum import sum_words

MASK = 2**64 - 1


class DifferentWeightsError(MapperError):
    """Two sides hold different bits, a side does not hold all of an atom, or replicas of one disagree."""


@dataclass(frozen=True, slots=True)
class Partial:
    """What one holder adds to an atom's digest. elements: how many of the atom's values it covers."""

    value: int
    elements: int


@lru_cache(maxsize=16)
def _known(config: H3Config) -> Mapping[str, Atom]:
    return {atom.name: atom for atom in atoms(config)}


def word_bytes(atom: Atom) -> int:
    """Bytes of the atom's words: 8, or what still divides a row, cut eight ways where columns are cut.

    A vector's word is one value, so that it can be cut anywhere. Every matrix of the released model has 8.
    """
    item = ITEMSIZE[atom.dtype]
    if len(atom.shape) == 1:
        return item
    width = math.prod(atom.shape[1:])
    granule = width // math.gcd(width, 8) if cut_axis(atom) == 1 else width
    return math.gcd(granule * item, 8)


class LiveDigest:
    """Sums over one holder's live tensors.

    layout: their names and row order. tp, rank: the engine's shard; 1 and 0 for whole tensors. Sums stay on their
    device until `partials`, so adding does not wait for it.
    """

    def __init__(self, config: H3Config, layout: Layout, *, tp: int = 1, rank: int = 0):
        self.config, self.layout, self.tp, self.rank = config, layout, tp, rank
        self._held = shard_spans(config, layout, tp, rank)
        self._sums: dict[str, list[tuple[Any, int]]] = {}

    def add(self, name: str, tensor: Array, first_row: int = 0) -> None:
        """Add one tensor by its bare name in the layout (this rank's shard of it).

        first_row: for holders of some rows only (FSDP), the tensor's row that `tensor[0]` is. Derived tensors are
        skipped. Raises UnknownNameError, ShapeError.
        """
        if name in derived(self.config, self.layout):
            return
        held = self._held.get(name)
        if held is None:
            raise UnknownNameError(f"{name}: no tensor of layout {self.layout}")
        first = _known(self.config)[held[0].atom]
        rows = held[-1].row + held[-1].stop - held[-1].start
        last_row = first_row + int(tensor.shape[0])
        wanted = (rows, *shard_shape(first, self.tp)[1:])
        shape, dtype = backend(tensor).describe(tensor)
        if (shape[1:], dtype) != (wanted[1:], first.dtype) or last_row > rows:
            raise ShapeError(
                f"{name}: {dtype} {list(shape)} from row {first_row}; rank {self.rank} of tp {self.tp} holds "
                f"{first.dtype} {list(wanted)}"
            )
        pieces: dict[str, list[tuple[int, Array]]] = {}
        for span in held:
            low, high = max(first_row, span.row), min(last_row, span.row + span.stop - span.start)
            if low < high:
                part = tensor[low - first_row : high - first_row]
                pieces.setdefault(span.atom, []).append((span.start + low - span.row, part))
        for (
            atom,
            parts,
        ) in pieces.items():  # in `release` many: each head's rows, which follow each other in the atom
            self._add(_known(self.config)[atom], parts[0][0], _joined([part for _, part in parts]))

    def _add(self, atom: Atom, row: int, rows: Array) -> None:
        """Rows from `row` of the atom on; all of this rank's columns."""
        item, word = ITEMSIZE[atom.dtype], word_bytes(atom)
        stride = math.prod(atom.shape[1:]) * item // word
        left = cut_range(atom, self.tp, self.rank)[0] * item // word if cut_axis(atom) == 1 else 0
        total = sum_words(rows, word, row * stride + left, stride)
        self._sums.setdefault(atom.name, []).append((total, math.prod(int(n) for n in rows.shape)))

    def partials(self) -> dict[str, Partial]:
        """Everything added so far, by atom. Waits for the device, once."""
        flat = [(name, total, count) for name, sums in self._sums.items() for total, count in sums]
        values = _on_host([total for _, total, _ in flat])
        result: dict[str, Partial] = {}
        for (name, _, count), value in zip(flat, values, strict=True):
            before = result.get(name, Partial(0, 0))
            result[name] = Partial((before.value + value) & MASK, before.elements + count)
        return result


def _joined(parts: list[Array]) -> Array:
    """One tensor of all rows; the only part itself, without a copy."""
    if len(parts) == 1:
        return parts[0]
    if hasattr(parts[0], "detach"):
        import torch

        return torch.cat(parts)
    import numpy

    return numpy.concatenate(parts)


def _on_host(totals: list[Any]) -> list[int]:
    """Python integers, with one transfer from each device."""
    by_device: dict[Any, list[int]] = {}
    for index, total in enumerate(totals):
        by_device.setdefault(getattr(total, "device", None), []).append(index)
    values = [0] * len(totals)
    for device, indexes in by_device.items():
        held = [totals[index] for index in indexes]
        for index, value in zip(indexes, held if device is None else _stacked(held), strict=True):
            values[index] = int(value)
    return values


def _stacked(held: list[Any]) -> list[int]:
    import torch

    return [int(value) for value in torch.stack(held).tolist()]


def combine(
    config: H3Config, holders: Iterable[Mapping[str, Partial]], *, partial: bool = False
) -> dict[str, int]:
    """Digests of whole atoms from every holder's partials.

    Pieces are added. An atom that several holders have whole (norms under tensor parallelism) must be the same on
    all. Raises DifferentWeightsError naming the first atom that is not covered exactly, or whose replicas differ.
    partial: atoms nobody holds are left out.
    """
    gathered = list(holders)
    digests: dict[str, int] = {}
    for atom in atoms(config):
        pieces = [holder[atom.name] for holder in gathered if atom.name in holder]
        if partial and not pieces:
            continue
        size = math.prod(atom.shape)
        whole = [piece for piece in pieces if piece.elements == size]
        if whole and len(whole) == len(pieces):
            if len({piece.value for piece in whole}) > 1:
                ranks = [index for index, piece in enumerate(whole) if piece.value != whole[0].value]
                raise DifferentWeightsError(f"{atom.name}: replicas differ: holders {ranks} from holder 0")
            digests[atom.name] = whole[0].value
            continue
        covered = sum(piece.elements for piece in pieces)
        if covered != size:
            raise DifferentWeightsError(
                f"{atom.name}: the holders have {covered} of its {size} values; every rank's partials are needed, once"
            )
        digests[atom.name] = sum(piece.value for piece in pieces) & MASK
    return digests


def digest_checkpoint(path: Path, stated: Layout | None = None) -> dict[str, int]:
    """Digests of a checkpoint on disk, for comparing a live engine with the files it should hold. Needs numpy.

    stated: the layout of a native checkpoint that does not declare its own. Raises SourceError if `path` holds several
    transformers, and as `identified`.
    """
    import numpy

    found = identified_all(path, stated)
    if len(found) != 1:
        raise SourceError(f"{path}: holds {listed(found)}; point at one transformer")
    item = next(iter(found.values()))
    digest = LiveDigest(item.config, item.layout)
    kinds = {"BF16": "<u2", "F32": "<f4"}
    for name, (header, entry) in item.component.tensors.items():
        offset = header.data_start + entry.begin
        digest.add(name, numpy.memmap(header.path, kinds[entry.dtype], "r", offset, entry.shape))
    return combine(item.config, [digest.partials()])


def differing(one: Mapping[str, int], two: Mapping[str, int]) -> list[str]:
    """Atoms whose digests differ or that one side lacks, in the first side's order."""
    return [name for name in {**one, **two} if one.get(name) != two.get(name)]


def assert_same(trainer: Mapping[str, int], engine: Mapping[str, int]) -> None:
    """Raise DifferentWeightsError naming the first atom that differs and how many do."""
    if wrong := differing(trainer, engine):
        raise DifferentWeightsError(
            f"{wrong[0]}: trainer and engine hold different bits; {len(wrong)} of {len(trainer)} atoms differ: "
            f"{listed(wrong)}"
        )
