"""Plans in terms of bytes: a tensor's atom rows as pieces of open files. Where rows become offsets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from h3_mapper.errors import TruncatedFileError
from h3_mapper.source import Component
from h3_mapper.spec import Rows, Span, Target
from h3_mapper.stream import Piece


class OpenComponent:
    """A component with its shards open for reading. Made by `opened`."""

    def __init__(self, component: Component, files: dict[Path, int]):
        self._tensors, self._files = component.tensors, files

    def place(self, name: str) -> tuple[int, int]:
        """(file descriptor, byte offset of the tensor's first byte)."""
        header, entry = self._tensors[name]
        return self._files[header.path], header.data_start + entry.begin

    def read(self, name: str) -> bytes:
        """All bytes of one (small) tensor."""
        fd, offset = self.place(name)
        _, entry = self._tensors[name]
        data = os.pread(fd, entry.end - entry.begin, offset)
        if len(data) != entry.end - entry.begin:
            raise TruncatedFileError(f"{self._tensors[name][0].path}: ended inside {name}")
        return data

    def pieces(self, target: Target, held: Sequence[Span]) -> tuple[Piece, ...]:
        """The target's bytes in order, cut where either its source blocks or its atoms change."""
        result = []
        for atom, rows in _cut(target.rows, held):
            fd, offset = self.place(rows.name)
            length = (rows.stop - rows.start) * target.row_bytes
            result.append(Piece(fd, offset + rows.start * target.row_bytes, length, atom))
        return tuple(result)


@contextmanager
def opened(component: Component) -> Iterator[OpenComponent]:
    """Open every shard once, read-only, and tell the kernel that reads are sequential."""
    with ExitStack() as stack:
        files: dict[Path, int] = {}
        for header in component.headers:
            fd = os.open(header.path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            files[header.path] = fd
        yield OpenComponent(component, files)


def _cut(blocks: Sequence[Rows], held: Sequence[Span]) -> Iterator[tuple[str, Rows]]:
    """Walk a target's source blocks and its atom spans together; both cover the same rows."""
    atoms = iter(held)
    span = next(atoms)
    left = span.stop - span.start
    for block in blocks:
        start = block.start
        while start < block.stop:
            if left == 0:
                span = next(atoms)
                left = span.stop - span.start
            step = min(left, block.stop - start)
            yield span.atom, Rows(block.name, start, start + step)
            start, left = start + step, left - step
