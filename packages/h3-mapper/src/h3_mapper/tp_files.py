"""Shards from and to disk: a rank's bytes only, and `convert --tp N`, one folder a rank."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from h3_mapper.convert import DEFAULT_THREADS, write_files
from h3_mapper.digest import Digest
from h3_mapper.errors import LayoutError, SourceError, TruncatedFileError, listed, naming
from h3_mapper.identify import Identified, identified_all
from h3_mapper.manifest import MANIFEST_NAME, AtomDigest, Manifest
from h3_mapper.output import check_destination, staging, write_text
from h3_mapper.pieces import OpenComponent, opened
from h3_mapper.plan import atoms, plan
from h3_mapper.readback import read_back
from h3_mapper.shards import NATIVE_STEM, OutFile, index_json, out_files, parse_size
from h3_mapper.source import LAYOUT_KEY
from h3_mapper.spec import ITEMSIZE, Layout
from h3_mapper.stream import Piece, Progress
from h3_mapper.tp import ShardPlan, ShardTarget, check_degree, shard, shard_shape, shard_spans, walk

TP_KEY, RANK_KEY = "h3.tp", "h3.rank"
"""safetensors metadata keys of a shard file: the degree and the rank."""


@dataclass(frozen=True, slots=True)
class ShardedConversion:
    """The result of `convert_shards`: rank folders in order, and bytes of tensor data in all of them."""

    destination: Path
    folders: tuple[Path, ...]
    nbytes: int


class OpenShard:
    """One rank's tensors of an open source. Made by `open_shard`."""

    def __init__(self, sharded: ShardPlan, files: OpenComponent):
        self.sharded, self._files = sharded, files
        mapping = sharded.plan
        self._targets = {target.name: target for target in sharded.targets}
        self._held = shard_spans(mapping.config, mapping.target, sharded.tp, sharded.rank)
        self._widths = {spec.name: spec.nbytes // spec.shape[0] for spec in mapping.sources}

    def pieces(self, name: str) -> tuple[Piece, ...]:
        """The shard's bytes in order: ranges of whole rows, or one range a row where columns are cut."""
        target = self._targets[name]
        return tuple(self._pieces(target)) if target.rows else ()

    def _pieces(self, target: ShardTarget) -> Iterator[Piece]:
        for atom, _, rows in walk(target.rows, self._held[target.name]):
            fd, offset = self._files.place(rows.name)
            width = self._widths[rows.name]
            if target.columns is None:
                yield Piece(fd, offset + rows.start * width, (rows.stop - rows.start) * width, atom)
                continue
            left = target.columns[0] * ITEMSIZE[target.dtype]
            for row in range(rows.start, rows.stop):
                yield Piece(fd, offset + row * width + left, target.row_bytes, atom)

    def read(self, name: str) -> bytes:
        """The shard tensor's bytes, row-major."""
        target = self._targets[name]
        if target.data is not None:
            return target.data
        data = b"".join(os.pread(piece.fd, piece.length, piece.offset) for piece in self.pieces(name))
        if len(data) != target.nbytes:
            raise TruncatedFileError(f"{name}: the source ended early; was it changed during the run?")
        return data


@contextmanager
def open_shard(
    source: Path, tp: int, rank: int, *, to: Layout = Layout.MODULE, stated: Layout | None = None
) -> Iterator[OpenShard]:
    """Rank `rank`'s tensors in layout `to`, read from a whole checkpoint of any layout; only its bytes are read.

    Raises SourceError if `source` holds several transformers, ShapeError if tp does not fit, and as `identified`.
    """
    found = _single(source, stated)
    sharded = shard(plan(found.config, found.layout, to), tp, rank)
    with opened(found.component) as files:
        yield OpenShard(sharded, files)


def _single(source: Path, stated: Layout | None) -> Identified:
    found = identified_all(source, stated)
    if len(found) != 1:
        raise SourceError(f"{source}: holds {listed(found)}; point at one transformer")
    return next(iter(found.values()))


def convert_shards(
    source: Path,
    destination: Path,
    tp: int,
    *,
    to: Layout = Layout.MODULE,
    stated: Layout | None = None,
    max_shard_size: str | int = "5GB",
    digest: Digest = Digest.XXH3,
    threads: int = DEFAULT_THREADS,
    progress: Progress | None = None,
) -> ShardedConversion:
    """Write `rank-R-of-N` folders of native tensors under the new folder `destination`, from any layout.

    Each folder has its shards' tensors, an index if there are several files, the whole model's config.json and a
    manifest of the rank's parts of atoms. Raises MapperError kinds; `destination` is complete or absent.
    """
    if not to.native:
        raise LayoutError(
            f"--tp with --to {to}: engines cut native tensors; write module (or release) shards"
        )
    found = _single(source, stated)
    with naming(found.component.given):
        check_degree(found.config, tp)
    mapping = plan(found.config, found.layout, to)
    ranks = [shard(mapping, tp, rank) for rank in range(tp)]
    files = [_files(sharded, parse_size(max_shard_size)) for sharded in ranks]
    check_destination(destination, source, sum(file.size for each in files for file in each))
    total, done, names = sum(sharded.nbytes for sharded in ranks), 0, []
    with staging(destination) as folder, opened(found.component) as component:
        for sharded, outs in zip(ranks, files, strict=True):
            names.append(f"rank-{sharded.rank}-of-{tp}")
            meter = offset_progress(progress, done, total)
            _write(folder / names[-1], found, OpenShard(sharded, component), outs, digest, threads, meter)
            done += sharded.nbytes
    return ShardedConversion(destination, tuple(destination / name for name in names), total)


def _files(sharded: ShardPlan, limit: int) -> tuple[OutFile, ...]:
    metadata = {LAYOUT_KEY: str(sharded.plan.target), TP_KEY: str(sharded.tp), RANK_KEY: str(sharded.rank)}
    return out_files(sharded.targets, NATIVE_STEM, limit, metadata)


def _write(
    folder: Path,
    found: Identified,
    source: OpenShard,
    files: tuple[OutFile, ...],
    digest: Digest,
    threads: int,
    progress: Progress | None,
) -> None:
    folder.mkdir()
    sharded = source.sharded
    derived = {target.name: target.data for target in sharded.targets if target.data is not None}
    digests = write_files(folder, files, source.pieces, derived, digest, threads, progress)
    config = found.config.to_json(native=True, original=found.component.config)
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    if len(files) > 1:
        write_text(folder / f"{NATIVE_STEM}.safetensors.index.json", index_json(files))
    if digest is not Digest.NONE:
        lines = {
            atom.name: AtomDigest(shard_shape(atom, sharded.tp), atom.dtype, digests[atom.name])
            for atom in atoms(found.config)
        }
        write_text(folder / MANIFEST_NAME, Manifest(sharded.plan.target, digest, lines).text())
    for file in files:
        read_back(folder / file.name, file)


def offset_progress(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Progress of one rank, reported against all ranks."""
    return None if progress is None else lambda done, _: progress(before + done, total)
