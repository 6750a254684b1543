"""The manifest: one digest per atom, equal in every layout, so two checkpoints compare without a round trip."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h3_mapper.digest import Digest
from h3_mapper.errors import FileFormatError
from h3_mapper.identify import Identified
from h3_mapper.pieces import opened
from h3_mapper.plan import atoms, spans
from h3_mapper.source import read_json
from h3_mapper.spec import Layout, Rows, Target
from h3_mapper.stream import Job, Progress, run

MANIFEST_NAME = "h3-manifest.json"
FORMAT = "h3-manifest-v1"


@dataclass(frozen=True, slots=True)
class AtomDigest:
    """One line of a manifest."""

    shape: tuple[int, ...]
    dtype: str
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Digests of one transformer's atoms. Everything but `layout` is equal across layouts."""

    layout: Layout
    algorithm: Digest
    atoms: Mapping[str, AtomDigest]

    def to_json(self) -> dict[str, Any]:
        """The JSON object written to h3-manifest.json."""
        lines = {
            name: {"shape": list(atom.shape), "dtype": atom.dtype, "digest": atom.digest}
            for name, atom in self.atoms.items()
        }
        return {
            "format": FORMAT,
            "layout": str(self.layout),
            "algorithm": str(self.algorithm),
            "atoms": lines,
        }

    def text(self) -> str:
        """The file's content."""
        return json.dumps(self.to_json(), indent=1) + "\n"


def manifest_of(found: Identified, algorithm: Digest, digests: Mapping[str, str]) -> Manifest:
    """Assemble a manifest, atoms in `atoms(config)` order."""
    lines = {a.name: AtomDigest(a.shape, a.dtype, digests[a.name]) for a in atoms(found.config)}
    return Manifest(found.layout, algorithm, lines)


def compute(found: Identified, algorithm: Digest, threads: int, progress: Progress | None = None) -> Manifest:
    """Digest a component's atoms from its files: one sequential read, nothing written."""
    names = spans(found.config, found.layout).keys()
    return manifest_of(found, algorithm, digests_of(found, names, algorithm, threads, progress))


def digests_of(
    found: Identified,
    names: Iterable[str],
    algorithm: Digest,
    threads: int,
    progress: Progress | None = None,
) -> dict[str, str]:
    """Atom -> digest for the atoms in some of a component's tensors, read shard by shard in file order."""
    held = spans(found.config, found.layout)
    with opened(found.component) as source:
        lanes: dict[Path, list[tuple[int, Job]]] = {}
        for name in names:
            header, entry = found.component.tensors[name]
            whole = Target(name, entry.shape, entry.dtype, "", (Rows(name, 0, entry.shape[0]),))
            lanes.setdefault(header.path, []).append((entry.begin, Job(source.pieces(whole, held[name]))))
        ordered = [[job for _, job in sorted(lane, key=lambda item: item[0])] for lane in lanes.values()]
        return run(ordered, algorithm, threads, progress)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest file strictly. Raises FileFormatError."""
    parsed = read_json(path)
    try:
        if parsed["format"] != FORMAT:
            raise FileFormatError(f"{path}: format {parsed['format']!r}; expected {FORMAT!r}")
        lines = {str(name): _line(line) for name, line in parsed["atoms"].items()}
        return Manifest(Layout(parsed["layout"]), Digest(parsed["algorithm"]), lines)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(f"{path}: not an h3 manifest: {error}") from error


def _line(line: Any) -> AtomDigest:
    shape, dtype, digest = line["shape"], line["dtype"], line["digest"]
    if (
        not all(isinstance(size, int) for size in shape)
        or not isinstance(dtype, str)
        or not isinstance(digest, str)
    ):
        raise TypeError(f"malformed atom {line!r}")
    return AtomDigest(tuple(shape), dtype, digest)
