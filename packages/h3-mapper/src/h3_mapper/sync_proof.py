"""Are two sets of live weights the same bits? Digests per atom, from any layout, tensor-parallel degree or shard.

An atom's words lie in rows. Each word is in one group of each of two families (`word_sum`): the words of one row whose
columns are congruent modulo 16 (bf16) or 32 (fp32), and the words of one column in 64 rows. A family's digest is the
sum, mod 2**64, over its groups of `mix(sum of the group's words + GOLD * number of the group)`, mix being a bijection;
the atom's digest is both. (A vector's values are groups by themselves, of one family.) Every holder sums what it has,
where it lies, without gathering, and the sums are added. Only a block of rows that holders cut within (FSDP's shares
need not be whole blocks) travels as its column sums, and is mixed when it is whole.

* One changed word always changes the digest: one group of a family changes, and mix is a bijection. A single bf16 ulp
  cannot hide.
* Two or three changed words: two words share at most one group, so in one family some group's sum changes; the sums of
  mixed values then agree with probability 2**-64.
* More: missed only if every group of both families keeps its sum. That takes four words at the corners of a rectangle
  (or longer cycles), its rows within 64, its columns congruent, with changes that cancel to the bit. Permuted or
  scrambled rows, swapped halves, casts and stale tensors change group sums; so do rows of a diagonal matrix swapped
  within 64, because the residues are as many as the words of 64 diagonal values.

Bits are found that differ by accident, not by an adversary.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h3_mapper.backends import Array, backend
from h3_mapper.config import H3Config
from h3_mapper.errors import MapperError, ShapeError, SourceError, UnknownNameError, listed
from h3_mapper.identify import identified_all
from h3_mapper.plan import atoms, derived
from h3_mapper.spec import Atom, Layout
from h3_mapper.sync_pieces import Piece, clipped, grid, holdings
from h3_mapper.word_sum import BLOCK, RESIDUES, GroupSums, words_of

DIGEST_ID = "h3-live-digest-v2"
"""Changes with the definition, so that sums of two definitions are never added or compared."""

MASK = 2**64 - 1


class DifferentWeightsError(MapperError):
    """Two sides hold different bits, a side does not hold all of an atom, or replicas of one disagree."""


@dataclass(frozen=True, slots=True)
class Share:
    """Column sums of a block of rows that this holder has in part: int64, little-endian, from column `left` on."""

    block: int
    rows: int
    left: int
    sums: bytes


@dataclass(frozen=True, slots=True)
class Partial:
    """What one holder adds to an atom's digest. elements: how many of the atom's values it covers."""

    residues: int
    columns: int
    elements: int
    shares: tuple[Share, ...] = ()
    digest_id: str = DIGEST_ID


class LiveDigest:
    """Sums over one holder's live tensors.

    layout: their names and row order. tp, rank: the engine's shard; 1 and 0 for whole tensors. Sums stay on their
    device until `partials`, so adding does not wait for it. Raises ShapeError for a degree that cuts eighths of rows.
    """

    def __init__(self, config: H3Config, layout: Layout, *, tp: int = 1, rank: int = 0):
        self.config, self.layout, self.tp, self.rank = config, layout, tp, rank
        self._held = holdings(config, layout, tp, rank)
        self._sums: dict[Any, GroupSums] = {}
        self._elements: dict[str, int] = {}

    def add(self, name: str, tensor: Array, first_row: int = 0) -> None:
        """Add one tensor by its bare name in the layout (this rank's shard of it).

        first_row: for holders of some rows only (FSDP), the tensor's row that `tensor[0]` is. Derived tensors are
        skipped. Raises UnknownNameError, ShapeError.
        """
        held = self._held.get(name)
        if held is None:
            if name in derived(self.config, self.layout):
                return
            raise UnknownNameError(f"{name}: no tensor of layout {self.layout}")
        shape, dtype = backend(tensor).describe(tensor)
        last_row = first_row + shape[0]
        if (shape[1:], dtype) != (held.shape[1:], held.dtype) or last_row > held.shape[0]:
            raise ShapeError(
                f"{name}: {dtype} {list(shape)} from row {first_row}; rank {self.rank} of tp {self.tp} holds "
                f"{held.dtype} {list(held.shape)}"
            )
        whole = shape[0] == held.shape[0]
        words = words_of(tensor, held.word)
        for piece in held.pieces if whole else clipped(self.config, held, first_row, last_row):
            self._add(piece, words, math.prod(shape[1:]))

    def _add(self, piece: Piece, words: Array, width: int) -> None:
        if piece.length == words.shape[0]:
            rows = words[None]
        else:
            blocks = words.reshape(piece.count, piece.step, words.shape[1])
            rows = blocks[:, piece.at : piece.at + piece.length]
        device = getattr(words, "device", None)
        if device not in self._sums:
            self._sums[device] = GroupSums(words)
        name = piece.atom.name
        self._sums[device].add(name, piece.grid, rows, piece.row, piece.left)
        self._elements[name] = self._elements.get(name, 0) + piece.count * piece.length * width

    def partials(self) -> dict[str, Partial]:
        """Everything added so far, by atom. Waits for the device, once."""
        sums: dict[str, list[int]] = {name: [0, 0] for name in self._elements}
        shares: dict[str, list[Share]] = {}
        for held in self._sums.values():
            for name, family, value in held.totals():
                sums[str(name)][family != RESIDUES] += value
            for (name, block), part in held.open.items():
                data = array("q", part.sums.tolist()).tobytes()
                shares.setdefault(str(name), []).append(Share(block, part.rows, part.left, data))
        return {
            name: Partial(sums[name][0] & MASK, sums[name][1] & MASK, elements, tuple(shares.get(name, ())))
            for name, elements in self._elements.items()
        }


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
        if others := {piece.digest_id for piece in pieces} - {DIGEST_ID}:
            raise DifferentWeightsError(
                f"{atom.name}: summed as {listed(others)}, and this is {DIGEST_ID}; use one version of h3-mapper"
            )
        size = math.prod(atom.shape)
        whole = [piece for piece in pieces if piece.elements == size]
        if whole and len(whole) == len(pieces):
            if len(set(whole)) > 1:
                ranks = [index for index, piece in enumerate(whole) if piece != whole[0]]
                raise DifferentWeightsError(f"{atom.name}: replicas differ: holders {ranks} from holder 0")
            pieces = whole[:1]
        elif (covered := sum(piece.elements for piece in pieces)) != size:
            raise DifferentWeightsError(
                f"{atom.name}: the holders have {covered} of its {size} values; every rank's partials are needed, once"
            )
        residues = sum(piece.residues for piece in pieces)
        columns = sum(piece.columns for piece in pieces) + _shared(atom, pieces)
        digests[atom.name] = (residues & MASK) << 64 | (columns & MASK)
    return digests


def _shared(atom: Atom, pieces: list[Partial]) -> int:
    """The mixed sums of the blocks that several holders have parts of."""
    parts: dict[tuple[int, int], list[Share]] = {}
    for piece in pieces:
        for share in piece.shares:
            parts.setdefault((share.block, share.left), []).append(share)
    if not parts:
        return 0
    import numpy

    sums = GroupSums(numpy.empty(0, numpy.int64))
    for (block, left), shares in parts.items():
        if sum(share.rows for share in shares) != min(BLOCK, atom.rows - block * BLOCK):
            raise DifferentWeightsError(
                f"{atom.name}: rows from {block * BLOCK} on are held twice or not at all; every rank's partials are "
                "needed, once"
            )
        words = numpy.sum([numpy.frombuffer(share.sums, "<i8") for share in shares], axis=0)
        sums.close(atom.name, grid(atom), block, words, left)
    return sum(total for _, _, total in sums.totals())


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
