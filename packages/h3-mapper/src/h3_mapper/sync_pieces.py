"""Where an atom's rows lie in a holder's tensors, and how its words are grouped. Arithmetic on row numbers only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from h3_mapper.config import H3Config
from h3_mapper.errors import ShapeError
from h3_mapper.plan import atoms
from h3_mapper.spec import ITEMSIZE, Atom, Layout, Span
from h3_mapper.tp import TP_DEGREES, cut_axis, cut_range, shard_spans
from h3_mapper.word_sum import BLOCK, Grid

PARTS = 8
"""Equal ranges of a row, where columns are cut: a rank of tp 1, 2, 4 or 8 holds whole ones."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of an atom, from `row` on.

    They lie in a tensor as `count` blocks of `length` rows, `step` rows apart, the first at row `at`.
    """

    atom: Atom
    row: int
    at: int
    length: int
    count: int
    step: int


@lru_cache(maxsize=16)
def known_atoms(config: H3Config) -> Mapping[str, Atom]:
    """Atoms by name."""
    return {atom.name: atom for atom in atoms(config)}


def left_word(atom: Atom, tp: int, rank: int) -> int:
    """The first word of the atom's rows that the rank holds."""
    if cut_axis(atom) != 1:
        return 0
    return cut_range(atom, tp, rank)[0] * ITEMSIZE[atom.dtype] // word_bytes(atom)


def word_bytes(atom: Atom) -> int:
    """Bytes of the atom's words: 8, or what still divides a row, cut eight ways where columns are cut.

    A vector's word is one value, so that it can be cut anywhere. Every matrix of the released model has 8.
    """
    item = ITEMSIZE[atom.dtype]
    if len(atom.shape) == 1:
        return item
    width = math.prod(atom.shape[1:])
    return math.gcd(width // _parts(atom) * item, 8)


def _parts(atom: Atom) -> int:
    return math.gcd(math.prod(atom.shape[1:]), PARTS) if cut_axis(atom) == 1 else 1


@lru_cache(maxsize=4096)
def grid(atom: Atom) -> Grid:
    """How the atom's words are grouped; the residues are the words that BLOCK values of a diagonal take."""
    word, item = word_bytes(atom), ITEMSIZE[atom.dtype]
    width = math.prod(atom.shape[1:]) * item // word
    parts = _parts(atom)
    return Grid(atom.rows, width, parts, math.gcd(width // parts, BLOCK * item // word))


@lru_cache(maxsize=64)
def pieces(config: H3Config, layout: Layout, tp: int, rank: int) -> Mapping[str, tuple[Piece, ...]]:
    """The atoms in each whole tensor of a rank; the heads of a `release` tensor as one piece."""
    known = known_atoms(config)
    for atom in known.values():
        if cut_axis(atom) == 1 and _parts(atom) % tp:
            raise ShapeError(
                f"tp {tp} cuts {atom.name} {list(atom.shape)} within an eighth of its rows; digests allow tp "
                f"{[n for n in TP_DEGREES if _parts(atom) % n == 0]}"
            )
    made = {}
    for name, held in shard_spans(config, layout, tp, rank).items():
        rows = held[-1].row + held[-1].stop - held[-1].start
        by_atom: dict[str, list[Span]] = {}
        for span in held:
            by_atom.setdefault(span.atom, []).append(span)
        made[name] = tuple(
            piece for atom, own in by_atom.items() for piece in _joined(known[atom], own, rows)
        )
    return made


def _joined(atom: Atom, held: list[Span], rows: int) -> Iterator[Piece]:
    """One piece, if the spans are equal, evenly spaced and consecutive in the atom; otherwise one for each."""
    first, length = held[0], held[0].stop - held[0].start
    step = rows // len(held)
    even = all(
        (span.start, span.stop, span.row)
        == (first.start + n * length, first.start + (n + 1) * length, first.row + n * step)
        for n, span in enumerate(held)
    )
    if even and rows % len(held) == 0 and first.row + length <= step:
        yield Piece(atom, first.start, first.row, length, len(held), step)
        return
    for span in held:
        yield Piece(atom, span.start, span.row, span.stop - span.start, 1, rows)


def clipped(config: H3Config, held: Iterable[Span], first_row: int, last_row: int) -> Iterator[Piece]:
    """The atoms in rows [first_row, last_row) of a tensor; `at` counts from first_row."""
    for span in held:
        low, high = max(first_row, span.row), min(last_row, span.row + span.stop - span.start)
        if low < high:
            row = span.start + low - span.row
            yield Piece(
                known_atoms(config)[span.atom], row, low - first_row, high - low, 1, last_row - first_row
            )
