"""The manifest: one digest per atom, equal in every layout, so two checkpoints compare without a round trip."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

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
EXPECTED = f"expected the {MANIFEST_NAME} that convert writes, or what `h3-mapper manifest PATH` prints"
_Word = TypeVar("_Word", bound=StrEnum)


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
    if not isinstance(parsed, dict):
        raise FileFormatError(f"{path}: not a JSON object; {EXPECTED}")
    if "components" in parsed and "format" not in parsed:
        raise FileFormatError(
            f"{path}: manifests of several transformers; save one of them as a file of its own"
        )
    _word(parsed, "format", _Format, path)
    layout, algorithm = _word(parsed, "layout", Layout, path), _word(parsed, "algorithm", Digest, path)
    if algorithm is Digest.NONE:
        raise FileFormatError(f"{path}: 'algorithm' is none, which compares nothing; {EXPECTED}")
    lines = parsed.get("atoms")
    if not isinstance(lines, dict) or not lines:
        raise FileFormatError(
            f"{path}: 'atoms' is {'absent' if lines is None else 'no object of atoms'}; {EXPECTED}"
        )
    return Manifest(
        layout, algorithm, {name: _line(name, line, algorithm, path) for name, line in lines.items()}
    )


class _Format(StrEnum):
    """The formats that are read."""

    V1 = FORMAT


def _word(parsed: Mapping[str, Any], key: str, kind: type[_Word], path: Path) -> _Word:
    """One of the words a manifest may have under a key."""
    if key not in parsed:
        raise FileFormatError(f"{path}: {key!r} is absent; {EXPECTED}")
    if parsed[key] not in list(kind):
        raise FileFormatError(f"{path}: {key!r} is {parsed[key]!r}, not one of {', '.join(kind)}; {EXPECTED}")
    return kind(parsed[key])


def _line(name: str, line: Any, algorithm: Digest, path: Path) -> AtomDigest:
    held = line if isinstance(line, dict) else {}
    shape, dtype, digest = held.get("shape"), held.get("dtype"), held.get("digest")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise FileFormatError(f"{path}: atom {name!r}: shape is {shape!r}; {EXPECTED}")
    if not isinstance(dtype, str):
        raise FileFormatError(f"{path}: atom {name!r}: dtype is {dtype!r}; {EXPECTED}")
    digits = len(algorithm.hasher().hexdigest())
    if not isinstance(digest, str) or not re.fullmatch(rf"[0-9a-f]{{{digits}}}", digest):
        raise FileFormatError(
            f"{path}: atom {name!r}: digest is {digest!r}, not {digits} hexadecimal digits of {algorithm}; {EXPECTED}"
        )
    return AtomDigest(tuple(shape), dtype, digest)
