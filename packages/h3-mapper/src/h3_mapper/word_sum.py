"""Sums of a tensor's words in two families of groups, mixed and added up: the arithmetic of `sync_proof`'s digests.

Plain sums run at memory speed on every device; mixing (xor-shifts and products) costs a dozen passes. So words are
summed first, each in one group of either family, and only the groups' sums, a twentieth of the words, are mixed:

* `residues`: the words of one row whose columns are congruent modulo `Grid.residues`, within a part of the row;
* `columns`: the words of one column in BLOCK consecutive rows.

All arithmetic is on int64, mod 2**64, in numpy or torch: order, device and library change no bit.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from h3_mapper.backends import Array

GOLD = 0x9E3779B97F4A7C15 - 2**64
"""2**64 / golden ratio, odd, as int64: spreads the groups' numbers (Knuth, TAOCP 3, 6.4)."""

MULTIPLIER = 0xD6E8FEB86659FD93 - 2**64
"""Odd. `x ^= x >> 32; x *= MULTIPLIER`, twice, and a last xor-shift: splitmix64's form, a bijection of 64 bits, so one
changed group sum always changes what is added. Shifts by 32 are one pass, because a word's halves can be viewed; every
input bit flips each output bit with probability 0.5 +- 0.02 (20,000 random words)."""

BLOCK = 64
"""Rows of a column group: divides a head (128 rows), so that one reduction sums all heads of a `release` tensor."""

HOST_CHUNK = 1 << 20
"""Bytes of words summed twice before the next, so that the second pass finds them in the core's cache."""

HOST_ROOM, DEVICE_ROOM = 1 << 15, 1 << 23
"""Group sums gathered before they are mixed: 256 KiB stay in a core's cache; 64 MiB make a launch worth its time."""

RESIDUES, COLUMNS = 0, 1
FAMILIES = (RESIDUES, COLUMNS)


@dataclass(frozen=True, slots=True)
class Grid:
    """How an atom's words are grouped.

    rows, width: of the whole atom, in words. parts: equal ranges of a row that tensor parallelism may lay on different
    ranks; no residue group crosses them. residues: groups in a part of a row; divides its width.
    """

    rows: int
    width: int
    parts: int
    residues: int


@dataclass(slots=True)
class OpenBlock:
    """Column sums of a block of rows of which this holder has `rows` only: to be added to the others' before mixing.

    left: column of the first sum.
    """

    rows: int
    left: int
    sums: Any


class GroupSums:
    """Everything summed on one device so far, by key and family; `totals` waits for nothing."""

    def __init__(self, like: Array):
        self.torch = sys.modules["torch"] if hasattr(like, "detach") else None
        self._where = {"device": like.device} if self.torch else {}
        self.on_host = self.torch is None or like.device.type == "cpu"
        self._library: Any = self.torch or sys.modules["numpy"]
        self._numbers = self._empty(0)
        self._room = HOST_ROOM if self.on_host else DEVICE_ROOM
        self._buffer = self._empty(self._room)
        self._used = 0
        self._filled: list[tuple[Hashable, int, int]] = []
        self._mixed: list[tuple[list[tuple[Hashable, int, int]], Array]] = []
        self.open: dict[tuple[Hashable, int], OpenBlock] = {}

    def add(self, key: Hashable, grid: Grid, words: Array, row: int, left: int = 0) -> None:
        """Add words [count, length, width]: consecutive rows of the atom from `row` on, columns from `left` on.

        int64; a vector's (width 1) may be narrower integers.
        """
        for part, first in self._chunks(grid, words, row):
            if grid.width == 1:
                self._numbered(key, RESIDUES, part, first)
            else:
                self._add_residues(key, grid, part, first, left)
                self._add_columns(key, grid, part, first, left)

    def totals(self) -> Iterator[tuple[Hashable, int, int]]:
        """(key, family, sum) of everything added, several for one key. Waits for the device, once."""
        self._mix()
        if not self._mixed:
            return
        ends = (self.torch.cat if self.torch else self._library.concatenate)(
            [ends for _, ends in self._mixed]
        )
        values = iter(ends.tolist())
        for filled, _ in self._mixed:
            before = 0
            for (key, family, _), value in zip(filled, values, strict=False):
                yield key, family, value - before
                before = value

    def close(self, key: Hashable, grid: Grid, block: int, sums: Array, left: int) -> None:
        """Mix the column sums of a whole block of rows."""
        self._numbered(key, COLUMNS, sums, block * grid.width + left)

    def _chunks(self, grid: Grid, words: Array, row: int) -> Iterator[tuple[Array, int]]:
        count, length, width = words.shape
        groups = BLOCK * grid.parts * grid.residues + grid.width
        blocks = HOST_CHUNK // (8 * BLOCK * width) if self.on_host else self._room // groups
        most = BLOCK * max(1, blocks)
        if count * length <= most:
            yield words, row
            return
        if count > 1:
            step = max(1, most // length)
            for at in range(0, count, step):
                yield words[at : at + step], row + at * length
            return
        at = 0
        while at < length:
            stop = min(length, (row + at) // BLOCK * BLOCK + most - row)
            yield words[:, at:stop], row + at
            at = stop

    def _add_residues(self, key: Hashable, grid: Grid, words: Array, row: int, left: int) -> None:
        count, length, width = words.shape
        part, size = grid.width // grid.parts, grid.residues
        split = words.reshape(count, length, width // part, part // size, size)
        shape, step = (count, length, width // part, size), grid.parts * size
        sums = self._reserve(key, RESIDUES, shape)
        self._sum(split, 3, sums)
        self._number(sums, (length * step, step, size, 1), row * step + left // part * size)

    def _add_columns(self, key: Hashable, grid: Grid, words: Array, row: int, left: int) -> None:
        count, length, width = words.shape
        if row % BLOCK == 0 and length % BLOCK == 0:
            blocks = length // BLOCK
            sums = self._reserve(key, COLUMNS, (count, blocks, width))
            self._sum(words.reshape(count, blocks, BLOCK, width), 2, sums)
            self._number(sums, (blocks * grid.width, grid.width, 1), row // BLOCK * grid.width + left)
            return
        for at in range(count):
            first = row + at * length
            for low, high in _cuts(first, first + length):
                self._add_rows(key, grid, words[at, low - first : high - first], low, left)

    def _add_rows(self, key: Hashable, grid: Grid, words: Array, row: int, left: int) -> None:
        """Rows that start or end within a block."""
        if row % BLOCK == 0 and words.shape[0] % BLOCK == 0:
            self._add_columns(key, grid, words[None], row, left)
            return
        sums = self._empty(words.shape[1])
        self._sum(words, 0, sums)
        block, height = row // BLOCK, words.shape[0]
        known = self.open.pop((key, block), None)
        if known is not None:
            sums, height = sums + known.sums, height + known.rows
        if height == min(BLOCK, grid.rows - block * BLOCK):
            self.close(key, grid, block, sums, left)
        else:
            self.open[key, block] = OpenBlock(height, left, sums)

    def _numbered(self, key: Hashable, family: int, sums: Array, first: int) -> None:
        """Take sums as they are, of consecutive groups from number `first` on."""
        size = math.prod(sums.shape)
        out = self._reserve(key, family, (size,))
        self._library.add(self._numbers_from(first, (size,), (1,)), sums.reshape(size), out=out)

    def _number(self, sums: Array, steps: tuple[int, ...], first: int) -> None:
        """Add `GOLD * n` to each sum, n being `first` plus its index times `steps`."""
        self._library.add(sums, self._numbers_from(first, tuple(sums.shape), steps), out=sums)

    def _numbers_from(self, first: int, shape: tuple[int, ...], steps: tuple[int, ...]) -> Array:
        stop = first + shape[0] * steps[0]
        if stop > self._numbers.shape[0]:
            size = max(stop, 2 * self._numbers.shape[0], 1 << 16)
            made = self._library.arange(size, dtype=self._library.int64, **self._where)
            made *= GOLD
            self._numbers = made
        return self._window(self._numbers, first, shape, steps)

    def _window(self, flat: Array, first: int, shape: tuple[int, ...], steps: tuple[int, ...]) -> Array:
        """A view of a vector, in one call: a digest of small tensors takes as long as its calls."""
        if self.torch:
            return flat.as_strided(shape, steps, first)
        strides = [8 * step for step in steps]
        return self._library.ndarray(shape, flat.dtype, flat, 8 * first, strides)

    def _reserve(self, key: Hashable, family: int, shape: tuple[int, ...]) -> Array:
        """Room for group sums, mixed when it is full."""
        size = math.prod(shape)
        if self._used + size > self._room:
            self._mix()
        if size > self._room:
            self._room, self._buffer = size, self._empty(size)
        start, self._used = self._used, self._used + size
        self._filled.append((key, family, self._used - 1))
        steps = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return self._window(self._buffer, start, shape, steps)

    def _mix(self) -> None:
        """Mix the gathered sums in place and add them up: one running sum, kept where each key's part ends."""
        if not self._filled:
            return
        held = self._buffer[: self._used]
        for factor in (MULTIPLIER, MULTIPLIER, None):
            self._fold(held)
            if factor is not None:
                held *= factor
        ends: Any = [end for _, _, end in self._filled]
        if self.torch:
            ends = self.torch.tensor(ends).to(held.device, non_blocking=True)
        self._mixed.append((self._filled, held.cumsum(0)[ends]))
        self._filled, self._used = [], 0

    def _fold(self, held: Array) -> None:
        """`x ^= x >> 32`, logical, in place."""
        if self.torch:  # int64 shifts copy the sign, and a mask would be one more pass
            halves = held.view(self.torch.int32).view(-1, 2)
            halves[:, 0].bitwise_xor_(halves[:, 1])
        else:
            unsigned = held.view(self._library.uint64)
            unsigned ^= unsigned >> self._library.uint64(32)

    def _sum(self, words: Array, axis: int, out: Array) -> None:
        if self.torch:
            self.torch.sum(words, axis, out=out)
        elif (
            axis == 3
        ):  # numpy's add.reduce over an axis before a short one runs at a third of einsum's speed
            self._library.einsum("abcde->abce", words, out=out)
        else:
            self._library.add.reduce(words, axis=axis, out=out)

    def _empty(self, size: int) -> Array:
        return self._library.empty(size, dtype=self._library.int64, **self._where)


def _cuts(first: int, stop: int) -> list[tuple[int, int]]:
    """Rows [first, stop) as: up to the first whole block, the whole blocks, the rest."""
    low = min(stop, -(-first // BLOCK) * BLOCK)
    high = max(low, stop // BLOCK * BLOCK)
    return [(a, b) for a, b in ((first, low), (low, high), (high, stop)) if a < b]


@cache
def _numpy_is_there() -> bool:
    return importlib.util.find_spec("numpy") is not None


def words_of(tensor: Array, word_bytes: int) -> Array:
    """A tensor [n] or [n, width] as int64 words [n, width]: a view where words are 8 bytes and aligned.

    Narrower words of a matrix are widened; those of a vector stay. Bits are read little-endian, as they lie. A torch
    tensor on a CPU comes as numpy's where numpy is installed: torch wakes its threads for every small operation, and
    with as many busy programs as cores a digest then took 5 to 20 times as long as on one thread.
    """
    torch = sys.modules["torch"] if hasattr(tensor, "detach") else None
    library: Any = torch or sys.modules["numpy"]
    kind = {8: library.int64, 4: library.int32, 2: library.int16}[word_bytes]
    rows = tensor.reshape(tensor.shape[0], -1)
    if torch:
        rows = rows.detach()
        if not rows.is_contiguous() or rows.storage_offset() * rows.element_size() % word_bytes:
            rows = rows.clone(memory_format=library.contiguous_format)
        words = rows.view(kind)
        words = words if word_bytes == 8 or len(tensor.shape) == 1 else words.to(library.int64)
        return words.numpy() if words.is_cpu and _numpy_is_there() else words
    words = library.ascontiguousarray(rows).view(kind)
    return words if word_bytes == 8 or len(tensor.shape) == 1 else words.astype(library.int64)
