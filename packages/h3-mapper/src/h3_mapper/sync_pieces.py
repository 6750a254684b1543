"""Where an atom's rows lie in a holder's tensors, and how its words are grouped. Arithmetic on row numbers only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from h3_mapper.config import H3Config
from h3_mapper.errors import ShapeError
from h3_mapper.plan import atoms
from h3_mapper.spec import ITEMSIZE, Atom, Layout, Span
from h3_mapper.tp import TP_DEGREES, cut_axis, cut_range, shard_shape, shard_spans
from h3_mapper.word_sum import BLOCK, Grid

PARTS = 8
"""Equal ranges of a row, where columns are cut: a rank of tp 1, 2, 4 or 8 holds whole ones."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of an atom, from `row` on.

    They lie in a tensor as `count` blocks of `length` rows, `step` rows apart, the first at row `at`, and hold the
    atom's words from column `left` on.
    """

    atom: Atom
    grid: Grid
    row: int
    left: int
    at: int
    length: int
    count: int
    step: int


@dataclass(frozen=True, slots=True)
class Holding:
    """What one tensor of a rank holds. word: bytes of its words. spans: its atom rows; pieces: the same, joined."""

    shape: tuple[int, ...]
    dtype: str
    word: int
    spans: tuple[Span, ...]
    pieces: tuple[Piece, ...]


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
def holdings(config: H3Config, layout: Layout, tp: int, rank: int) -> Mapping[str, Holding]:
    """What each tensor of a rank holds. Raises ShapeError for a degree that cuts eighths of rows."""
    known = known_atoms(config)
    for atom in known.values():
        if cut_axis(atom) == 1 and _parts(atom) % tp:
            raise ShapeError(
                f"tp {tp} cuts {atom.name} {list(atom.shape)} within an eighth of its rows; digests allow tp "
                f"{[n for n in TP_DEGREES if _parts(atom) % n == 0]}"
            )
    made = {}
    for name, spans in shard_spans(config, layout, tp, rank).items():
        rows = spans[-1].row + spans[-1].stop - spans[-1].start
        first = known[spans[0].atom]
        lefts = {span.atom: left_word(known[span.atom], tp, rank) for span in spans}
        shape = (rows, *shard_shape(first, tp)[1:])
        pieces = tuple(
            piece
            for atom, left in lefts.items()
            for piece in _joined(known[atom], [span for span in spans if span.atom == atom], left, rows)
        )
        made[name] = Holding(shape, first.dtype, word_bytes(first), spans, pieces)
    return made


def _joined(atom: Atom, spans: list[Span], left: int, rows: int) -> Iterator[Piece]:
    """One piece, if the spans are equal, evenly spaced and consecutive in the atom; otherwise one for each."""
    first, length = spans[0], spans[0].stop - spans[0].start
    step = rows // len(spans)
    even = all(
        (span.start, span.stop, span.row)
        == (first.start + n * length, first.start + (n + 1) * length, first.row + n * step)
        for n, span in enumerate(spans)
    )
    if even and rows % len(spans) == 0 and first.row + length <= step:
        yield Piece(atom, grid(atom), first.start, left, first.row, length, len(spans), step)
        return
    for span in spans:
        yield Piece(atom, grid(atom), span.start, left, span.row, span.stop - span.start, 1, rows)


def clipped(config: H3Config, held: Holding, first_row: int, last_row: int) -> Iterator[Piece]:
    """The atoms in rows [first_row, last_row) of a tensor; `at` counts from first_row."""
    lefts = {piece.atom.name: piece.left for piece in held.pieces}
    for span in held.spans:
        low, high = max(first_row, span.row), min(last_row, span.row + span.stop - span.start)
        if low < high:
            atom, row = known_atoms(config)[span.atom], span.start + low - span.row
            at, rows = low - first_row, last_row - first_row
            yield Piece(atom, grid(atom), row, lefts[span.atom], at, high - low, 1, rows)
