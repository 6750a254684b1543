"""Row blocks of a target, gathered into strided runs: 168 per-head blocks of qkv_proj become three copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from h3_mapper.spec import Rows


@dataclass(frozen=True, slots=True)
class Run:
    """`count` blocks of `length` rows: block i copies source rows from `start + i * step` on to target row
    `row + i * row_step`."""

    name: str
    length: int
    count: int
    start: int
    step: int
    row: int
    row_step: int


def runs(blocks: Sequence[Rows]) -> tuple[Run, ...]:
    """The copies that build a target from its blocks, as few as equal length and spacing allow."""
    placed: dict[tuple[str, int], list[tuple[int, int]]] = {}
    row = 0
    for block in blocks:
        length = block.stop - block.start
        placed.setdefault((block.name, length), []).append((block.start, row))
        row += length
    return tuple(run for (name, length), places in placed.items() for run in _regular(name, length, places))


def _regular(name: str, length: int, places: list[tuple[int, int]]) -> list[Run]:
    """Split (start, row) places into arithmetic progressions, both steps ascending (no negative strides)."""
    result: list[Run] = []
    at = 0
    while at < len(places):
        start, row = places[at]
        step, row_step, end = length, length, at + 1
        if end < len(places) and places[end][0] > start:
            step, row_step = places[end][0] - start, places[end][1] - row
            while end < len(places) and places[end] == (
                start + (end - at) * step,
                row + (end - at) * row_step,
            ):
                end += 1
        result.append(Run(name, length, end - at, start, step, row, row_step))
        at = end
    return result
