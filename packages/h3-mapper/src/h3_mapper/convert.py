"""A plan on files: read byte ranges, write shards, digest on the way, rename once at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from h3_mapper.digest import Digest
from h3_mapper.errors import AlreadyConvertedError
from h3_mapper.identify import Identified, identified_all
from h3_mapper.manifest import MANIFEST_NAME, Manifest, manifest_of
from h3_mapper.output import check_destination, staging, write_text
from h3_mapper.pieces import OpenComponent, opened
from h3_mapper.plan import plan, spans
from h3_mapper.readback import read_back
from h3_mapper.shards import DIFFUSERS_STEM, NATIVE_STEM, OutFile, index_json, out_files, parse_size
from h3_mapper.source import LAYOUT_KEY
from h3_mapper.spec import Layout, Plan
from h3_mapper.stream import Job, Piece, Progress, run

DEFAULT_THREADS = min(4, os.cpu_count() or 1)
"""More workers than this wait on the page cache, not on each other."""

Pieces = Callable[[str], tuple[Piece, ...]]
"""Output tensor name -> its bytes as pieces of open source files; empty for a derived tensor."""


@dataclass(frozen=True, slots=True)
class ConvertedComponent:
    """What one transformer became. `name`: its folder below the destination (`""` for the destination)."""

    name: str
    source_layout: Layout
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    manifest: Manifest | None


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of `convert`."""

    destination: Path
    layout: Layout
    components: tuple[ConvertedComponent, ...] = field(default=())

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data written."""
        return sum(component.nbytes for component in self.components)


@dataclass(frozen=True, slots=True)
class _Task:
    """One component's conversion, planned and not begun."""

    name: str
    found: Identified
    plan: Plan
    files: tuple[OutFile, ...]

    @property
    def footprint(self) -> int:
        """Disk the output needs, bytes."""
        return min(sum(file.size for file in self.files), self.found.component.footprint)


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    to: Layout | str,
    *,
    stated: Layout | str | None = None,
    max_shard_size: str | int = "5GB",
    digest: Digest | str = Digest.XXH3,
    threads: int = DEFAULT_THREADS,
    progress: Progress | None = None,
) -> Converted:
    """Write `source`'s transformers in layout `to` as a new folder `destination`.

    source: a folder, a .safetensors file, an index, a hub snapshot, or a root of `transformer*` folders
    (mirrored below the destination). stated: the source's layout, needed for native files that do not
    declare it. Each output folder gets shards, an index if there are several, config.json in the target's
    spelling, and h3-manifest.json unless digest is `none`. Values and dtypes are never changed.

    Raises a MapperError kind; `destination` is then absent. Peak memory does not depend on the size.
    """
    source, destination, to, algorithm = Path(source), Path(destination), Layout(to), Digest(digest)
    tasks = [
        _task(name, found, to, parse_size(max_shard_size))
        for name, found in identified_all(source, Layout(stated) if stated else None).items()
    ]
    check_destination(destination, source, sum(task.footprint for task in tasks))
    meter = _meter(progress, [task.plan.nbytes for task in tasks])
    with staging(destination) as folder:
        done = [
            _run(task, folder / task.name, algorithm, threads, each)
            for task, each in zip(tasks, meter, strict=True)
        ]
    return Converted(destination, to, tuple(done))


def _task(name: str, found: Identified, to: Layout, max_shard_size: int) -> _Task:
    if found.layout is to:
        raise AlreadyConvertedError(f"{found.component.given}: is in layout {to} already; nothing to convert")
    mapping = plan(found.config, found.layout, to)
    stem = NATIVE_STEM if to.native else DIFFUSERS_STEM
    return _Task(
        name, found, mapping, out_files(mapping.targets, stem, max_shard_size, {LAYOUT_KEY: str(to)})
    )


def _run(
    task: _Task, folder: Path, digest: Digest, threads: int, progress: Progress | None
) -> ConvertedComponent:
    """Convert one component into `folder`, which lies in the staging folder."""
    to = task.plan.target
    folder.mkdir(parents=True, exist_ok=True)
    with opened(task.found.component) as files:
        digests = write_files(
            folder,
            task.files,
            plan_pieces(files, task.plan),
            derived_of(task.plan),
            digest,
            threads,
            progress,
        )
    write_text(folder / "config.json", _config_text(task, to))
    if len(task.files) > 1:
        stem = NATIVE_STEM if to.native else DIFFUSERS_STEM
        write_text(folder / f"{stem}.safetensors.index.json", index_json(task.files))
    manifest = None
    if digest is not Digest.NONE:
        manifest = manifest_of(Identified(task.found.component, to, task.found.config), digest, digests)
        write_text(folder / MANIFEST_NAME, manifest.text())
    for file in task.files:
        read_back(folder / file.name, file)
    names = tuple(file.name for file in task.files)
    return ConvertedComponent(
        task.name, task.found.layout, names, len(task.plan.targets), task.plan.nbytes, manifest
    )


def plan_pieces(files: OpenComponent, mapping: Plan) -> Pieces:
    """The plan's targets as pieces of the opened source."""
    targets = {target.name: target for target in mapping.targets}
    held = spans(mapping.config, mapping.target)
    return lambda name: files.pieces(targets[name], held[name]) if targets[name].rows else ()


def derived_of(mapping: Plan) -> dict[str, bytes]:
    """The plan's derived targets: name -> bytes."""
    return {target.name: target.data for target in mapping.targets if target.data is not None}


def write_files(
    folder: Path,
    files: Sequence[OutFile],
    pieces: Pieces,
    derived: Mapping[str, bytes],
    digest: Digest,
    threads: int,
    progress: Progress | None = None,
) -> dict[str, str]:
    """Write and fsync `files` in `folder`; return atom -> digest. Knows nothing of layouts or plans."""
    with ExitStack() as stack:
        outs, lanes = [], []
        for file in files:
            fd = os.open(folder / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            stack.callback(os.close, fd)
            os.truncate(fd, file.size)
            os.pwrite(fd, file.header, 0)
            lane = []
            for entry in file.entries:
                offset = len(file.header) + entry.begin
                if entry.name in derived:
                    os.pwrite(fd, derived[entry.name], offset)
                else:
                    lane.append(Job(pieces(entry.name), fd, offset))
            outs.append(fd)
            lanes.append(lane)
        digests = run(lanes, digest, threads, progress, finished=lambda lane: os.fsync(outs[lane]))
        for fd, lane in zip(outs, lanes, strict=True):
            if not lane:  # a shard of derived tensors only
                os.fsync(fd)
    return digests


def _config_text(task: _Task, to: Layout) -> str:
    converted = task.found.config.to_json(native=to.native, original=task.found.component.config)
    return json.dumps(converted, indent=2) + "\n"


def _meter(progress: Progress | None, sizes: Sequence[int]) -> list[Progress | None]:
    """One progress function per component, each reporting against the sum of all."""
    if progress is None:
        return [None] * len(sizes)
    total = sum(sizes)

    def offset_by(before: int) -> Progress:
        return lambda done, _: progress(before + done, total)

    return [offset_by(sum(sizes[:n])) for n in range(len(sizes))]
