"""Pruned and quantised checkpoints on disk: `convert --variant`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from h3_mapper.convert import DEFAULT_THREADS, write_files
from h3_mapper.digest import Digest
from h3_mapper.errors import (
    AmbiguousLayoutError,
    QuantisedVariantError,
    SourceError,
    listed,
    naming,
)
from h3_mapper.judge import Judged, judge
from h3_mapper.output import check_destination, staging, write_text
from h3_mapper.pieces import OpenComponent, opened
from h3_mapper.readback import read_back
from h3_mapper.shards import DIFFUSERS_STEM, NATIVE_STEM, OutFile, index_json, out_files, parse_size
from h3_mapper.source import LAYOUT_KEY, Component, open_source
from h3_mapper.spec import Layout
from h3_mapper.stream import Piece, Progress
from h3_mapper.tp import check_degree
from h3_mapper.tp_files import RANK_KEY, TP_KEY, offset_progress
from h3_mapper.variant_plan import OutTensor, variant_plan
from h3_mapper.wrappers import unwrap

QUANT_METADATA = "_quantization_metadata"
"""ComfyUI's file-level JSON: {"layers": {module: {...}}}."""


def convert_variant(
    source: Path,
    destination: Path,
    to: Layout,
    *,
    stated: Layout | None = None,
    tp: int | None = None,
    max_shard_size: str | int = "5GB",
    threads: int = DEFAULT_THREADS,
    progress: Progress | None = None,
) -> tuple[Judged, int]:
    """Write a pruned or quantised checkpoint in layout `to`; scales and blobs go where their rows go.

    tp: write one folder `rank-R-of-N` for each rank. Returns what the source was, and the bytes of tensor data written.
    Raises QuantisedVariantError or PrunedVariantError with the layer and the reason where that cannot be done, and as
    `convert`; `destination` is complete or absent.
    """
    found, layout = _single(source, stated)
    count = 1 if tp is None else tp
    with naming(found.component.given):
        if found.variant.config is not None:
            check_degree(found.variant.config, count)
        ranks = [variant_plan(found.seen, found.variant, layout, to, count, rank) for rank in range(count)]
    total = sum(item.nbytes for items in ranks for item in items)
    check_destination(destination, source, total)
    with staging(destination) as out, opened(found.component) as reader:
        done = 0
        for rank, items in enumerate(ranks):
            into, shards = out, {}
            if tp is not None:
                into, shards = out / f"rank-{rank}-of-{tp}", {TP_KEY: str(tp), RANK_KEY: str(rank)}
                into.mkdir()
            stem = NATIVE_STEM if to.native else DIFFUSERS_STEM
            metadata = _metadata(found.component, items, to) | shards
            files = out_files(items, stem, parse_size(max_shard_size), metadata)
            _write(into, items, files, found, reader, threads, offset_progress(progress, done, total))
            _write_beside(into, found, to, files)
            done += sum(item.nbytes for item in items)
    return found, total


def _single(source: Path, stated: Layout | None) -> tuple[Judged, Layout]:
    """The only transformer under `source`, and its layout, stated by somebody."""
    components = open_source(source)
    if len(components) != 1:
        raise SourceError(f"{source}: holds {listed(components)}; point at one transformer")
    ((folder, component),) = components.items()
    found = judge(component, folder, stated)
    if found.layout is None:
        raise AmbiguousLayoutError(
            f"{source}: native names with no stated row order; say --from release (per head) or --from module "
            "(all q, all k, all v: Comfy files)"
        )
    return found, found.layout


def _write(
    folder: Path,
    items: tuple[OutTensor, ...],
    files: tuple[OutFile, ...],
    found: Judged,
    reader: OpenComponent,
    threads: int,
    progress: Progress | None,
) -> None:
    by_name = {item.name: item for item in items}
    literal = {item.name: _literal(item, found, reader) for item in items if not item.rows}

    def pieces(name: str) -> tuple[Piece, ...]:
        return tuple(_pieces(by_name[name], found, reader))

    write_files(folder, files, pieces, literal, Digest.NONE, threads, progress)
    for file in files:
        read_back(folder / file.name, file)


def _write_beside(folder: Path, found: Judged, to: Layout, files: tuple[OutFile, ...]) -> None:
    """The index of several files, and config.json if the source had one."""
    if len(files) > 1:
        stem = NATIVE_STEM if to.native else DIFFUSERS_STEM
        write_text(folder / f"{stem}.safetensors.index.json", index_json(files))
    config, original = found.variant.config, found.component.config
    if config is not None and original is not None:
        settings = config.to_json(native=to.native, original=original)
        write_text(folder / "config.json", json.dumps(settings, indent=2) + "\n")


def _literal(item: OutTensor, found: Judged, reader: OpenComponent) -> bytes:
    if item.data is not None:
        return item.data
    values = {name: reader.read(found.names[name]) for name in item.equal}
    if len(set(values.values())) > 1:
        raise QuantisedVariantError(
            f"{item.name}: {listed(values)} differ; one tensor has one, and a scale for each row would be needed"
        )
    return next(iter(values.values()))


def _pieces(item: OutTensor, found: Judged, reader: OpenComponent) -> Iterator[Piece]:
    """The tensor's bytes: whole row ranges, or one range a row where columns are cut."""
    size = item.nbytes // sum(rows.stop - rows.start for rows in item.rows)
    for rows in item.rows:
        fd, offset = reader.place(found.names[rows.name])
        if item.columns is None:
            yield Piece(fd, offset + rows.start * size, (rows.stop - rows.start) * size, None)
            continue
        value = size // (item.columns[1] - item.columns[0])
        for row in range(rows.start, rows.stop):
            yield Piece(fd, offset + (row * item.width + item.columns[0]) * value, size, None)


def _metadata(component: Component, items: tuple[OutTensor, ...], to: Layout) -> dict[str, str]:
    """The stated layout, and ComfyUI's file-level quantisation record with its layers renamed."""
    metadata = {LAYOUT_KEY: str(to)}
    for header in component.headers:
        text = header.metadata.get(QUANT_METADATA)
        if text is not None:
            metadata[QUANT_METADATA] = json.dumps(_renamed(text, items))
    return metadata


def _renamed(text: str, items: tuple[OutTensor, ...]) -> Any:
    try:
        record = json.loads(text)
        layers = {unwrap(name).name: value for name, value in record["layers"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise QuantisedVariantError(f"metadata {QUANT_METADATA} has no readable 'layers': {error}") from None
    renamed = {}
    for item in items:
        sources = {rows.name.removesuffix(".weight") for rows in item.rows if item.name.endswith(".weight")}
        found = [layers[name] for name in sorted(sources) if name in layers]
        if found and any(value != found[0] for value in found):
            raise QuantisedVariantError(
                f"{item.name}: {listed(sources)} are recorded differently in {QUANT_METADATA}"
            )
        if found:
            renamed[item.name.removesuffix(".weight")] = found[0]
    return {**record, "layers": renamed}
