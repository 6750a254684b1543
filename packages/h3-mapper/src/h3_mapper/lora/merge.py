"""Base + adapter -> a new checkpoint in the base's layout: fp32 arithmetic, one rounding, the base only read.

The arithmetic of one row is `round(W + scale * (B @ A))`, or with DoRA `round(m / |V| * V)`, V the fp32 sum and |V| its
row norm: what PEFT's `merge_and_unload` computes on an fp32 model. Rows are worked on in blocks counted from their
atom's first row, so a base in any layout gives the same bits.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from h3_mapper.config import H3Config
from h3_mapper.convert import DEFAULT_THREADS
from h3_mapper.digest import Digest
from h3_mapper.errors import DtypeError, MissingTensorError, ShapeError, SourceError, listed
from h3_mapper.identify import Identified, identified_all
from h3_mapper.lora.adapter import Adapter
from h3_mapper.lora.arrays import Raw, raw
from h3_mapper.lora.blocks import Change, changed_rows
from h3_mapper.lora.errors import ScaleError, UnstatedError
from h3_mapper.manifest import MANIFEST_NAME, compute
from h3_mapper.output import check_destination, staging, write_text
from h3_mapper.pieces import OpenComponent, opened
from h3_mapper.plan import atoms, derived, spans, tensors
from h3_mapper.readback import read_back
from h3_mapper.shards import DIFFUSERS_STEM, NATIVE_STEM, OutFile, index_json, out_files, parse_size
from h3_mapper.source import LAYOUT_KEY
from h3_mapper.spec import Atom, Layout, Part, Span
from h3_mapper.stream import Progress, check_threads
from h3_mapper.wrappers import PARTITIONS

BLOCK_ROWS = 128
"""Rows computed at once where a head does not decide."""

COPY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of `merge`. changed: tensors that the adapter touched."""

    destination: Path
    layout: Layout
    tensors: int
    changed: int
    nbytes: int


def find_base(path: Path, component: str | None = None, stated: Layout | None = None) -> Identified:
    """The transformer under `path` to merge into: the only one, or the one of `component`'s partition.

    Raises UnstatedError if there are two and component does not say, QuantisedVariantError for a quantised base.
    """
    found = identified_all(path, stated)
    if len(found) == 1:
        return next(iter(found.values()))
    wanted = PARTITIONS.get(component or "")
    chosen = [item for name, item in found.items() if _partition(name) == wanted]
    if len(chosen) != 1:
        raise UnstatedError(f"{path} holds {listed(found)}; say which one to merge into (component)")
    return chosen[0]


def _partition(folder: str) -> str | None:
    head = folder.partition("/")[0]
    return head if head in PARTITIONS.values() else PARTITIONS.get(head)


def merge(
    base: Identified,
    adapter: Adapter,
    destination: Path,
    *,
    strength: float = 1.0,
    max_shard_size: str | int = "5GB",
    digest: Digest = Digest.XXH3,
    threads: int = DEFAULT_THREADS,
    progress: Progress | None = None,
) -> Merged:
    """Write base + strength * adapter as the new folder `destination`, in the base's layout and dtypes.

    Untouched tensors are copied byte for byte. Needs numpy (`h3-mapper[numpy]`). Raises MapperError kinds before
    anything is written; `destination` is complete or absent.
    """
    check_threads(threads)
    if not math.isfinite(strength):
        raise ScaleError(f"strength is {strength}; expected a finite number")
    config = _grown(base.config, adapter)
    change = Change(adapter, strength, _check(config, base.config, adapter))
    specs = tensors(config, base.layout)
    stem = NATIVE_STEM if base.layout.native else DIFFUSERS_STEM
    files = out_files(specs, stem, parse_size(max_shard_size), {LAYOUT_KEY: str(base.layout)})
    check_destination(destination, base.component.given, sum(file.size for file in files))
    with (
        staging(destination) as folder,
        opened(base.component) as source,
        ThreadPoolExecutor(threads) as pool,
    ):
        writer = _Writer(base, config, change, source, pool, threads, progress)
        for file in files:
            writer.write(folder / file.name, file)
            read_back(folder / file.name, file)
        if len(files) > 1:
            write_text(folder / f"{stem}.safetensors.index.json", index_json(files))
        settings = config.to_json(native=base.layout.native, original=base.component.config)
        write_text(folder / "config.json", json.dumps(settings, indent=2) + "\n")
        if digest is not Digest.NONE:
            found = identified_all(folder)[""]
            write_text(folder / MANIFEST_NAME, compute(found, digest, threads).text())
    return Merged(destination, base.layout, len(specs), writer.changed, sum(spec.nbytes for spec in specs))


def _grown(config: H3Config, adapter: Adapter) -> H3Config:
    """With VSA gates if the adapter assigns them."""
    return config.with_gates(config.vsa_gates or any("to_gate_compress" in name for name in adapter.assigned))


def _check(config: H3Config, before: H3Config, adapter: Adapter) -> Mapping[str, Atom]:
    """The result's atoms, after the adapter has been checked against them."""
    known = {atom.name: atom for atom in atoms(config)}
    if lost := adapter.touched - known.keys():
        raise MissingTensorError(f"the adapter changes {listed(lost)}, which the base does not have")
    new = known.keys() - {atom.name for atom in atoms(before)} - adapter.assigned.keys()
    if new:
        raise MissingTensorError(f"the adapter assigns some VSA gates and not {listed(new)}")
    for name, value in {**adapter.deltas, **adapter.assigned}.items():
        if raw(value).shape != known[name].shape:
            raise ShapeError(
                f"{name}: the adapter's tensor is {list(raw(value).shape)}, the base's {list(known[name].shape)}"
            )
    for name, value in adapter.assigned.items():
        if raw(value).dtype != known[name].dtype:
            raise DtypeError(
                f"{name}: assigned as {raw(value).dtype}; the model keeps it in {known[name].dtype}"
            )
    return known


class _Writer:
    """Writes one file after another; computes touched tensors, copies the rest."""

    def __init__(
        self,
        base: Identified,
        config: H3Config,
        change: Change,
        source: OpenComponent,
        pool: ThreadPoolExecutor,
        threads: int,
        progress: Progress | None,
    ):
        self.change, self.source, self.pool, self.progress = change, source, pool, progress
        self.window = 4 * threads
        self.head = config.attention_head_dim
        self.held = spans(config, base.layout)
        self.derived = derived(config, base.layout)
        self.stored = base.component.tensors
        self.total = sum(spec.nbytes for spec in tensors(config, base.layout))
        self.done = self.changed = 0

    def write(self, path: Path, file: OutFile) -> None:
        with path.open("xb") as out:
            out.write(file.header)
            for entry in file.entries:
                if entry.name in self.derived:
                    self._put(out, self.derived[entry.name])
                elif any(span.atom in self.change.touched for span in self.held[entry.name]):
                    self.changed += 1
                    for part in self._computed(entry.name):
                        self._put(out, part)
                else:
                    self._copy(out, entry.name, entry.end - entry.begin)
            out.flush()
            os.fsync(out.fileno())

    def _copy(self, out: BinaryIO, name: str, left: int) -> None:
        fd, offset = self.source.place(name)
        while left:
            part = self._read(fd, min(left, COPY_BYTES), offset, name)
            self._put(out, part)
            offset, left = offset + len(part), left - len(part)

    def _computed(self, name: str) -> Iterator[bytes]:
        """The tensor's bytes, a few blocks at a time in parallel."""
        blocks = iter(list(self._blocks(name)))
        while window := list(islice(blocks, self.window)):
            yield from self.pool.map(lambda span: self._block(name, span), window)

    def _blocks(self, name: str) -> Iterator[Span]:
        for span in self.held[name]:
            step = self.head if self.change.atoms[span.atom].part in (Part.Q, Part.K, Part.V) else BLOCK_ROWS
            for start in range(span.start, span.stop, step):
                yield Span(span.atom, start, min(start + step, span.stop), span.row + start - span.start)

    def _block(self, name: str, span: Span) -> bytes:
        atom = self.change.atoms[span.atom]
        base = None
        if name in self.stored:
            fd, offset = self.source.place(name)
            size = (span.stop - span.start) * atom.row_bytes
            data = self._read(fd, size, offset + span.row * atom.row_bytes, name)
            base = Raw(atom.dtype, (span.stop - span.start, *atom.shape[1:]), data)
        return bytes(changed_rows(self.change, span.atom, base, span.start, span.stop).data)

    def _read(self, fd: int, size: int, offset: int, name: str) -> bytes:
        data = os.pread(fd, size, offset)
        if len(data) != size:
            raise SourceError(
                f"{name}: the base ended at byte {offset + len(data)}; was it changed during the run?"
            )
        return data

    def _put(self, out: BinaryIO, part: bytes) -> None:
        out.write(part)
        self.done += len(part)
        if self.progress:
            self.progress(self.done, self.total)
