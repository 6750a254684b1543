"""Are two checkpoints the same weights, whatever their layouts? Atom digests decide; differences are located."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from h3_mapper.convert import DEFAULT_THREADS
from h3_mapper.digest import Digest
from h3_mapper.errors import LayoutError, MapperError, SourceError, listed
from h3_mapper.identify import Identified, identified_all
from h3_mapper.manifest import AtomDigest, Manifest, compute, digests_of, read_manifest
from h3_mapper.source import PARTITIONS
from h3_mapper.spec import Layout
from h3_mapper.stream import Progress


@dataclass(frozen=True, slots=True)
class Difference:
    """One atom that differs. reason: what was found, in words."""

    component: str
    atom: str
    reason: str


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of `verify`; equal if there are no differences. hint: the likely cause, if one was found."""

    atoms: int
    algorithm: Digest
    layouts: tuple[Layout, Layout]
    differences: tuple[Difference, ...]
    hint: str = ""

    @property
    def equal(self) -> bool:
        """Whether every atom has the same bits on both sides."""
        return not self.differences


def verify(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    stated: tuple[Layout | None, Layout | None] = (None, None),
    digest: Digest = Digest.XXH3,
    threads: int = DEFAULT_THREADS,
    progress: Progress | None = None,
) -> Verified:
    """Compare two checkpoints, or a checkpoint and a manifest file, atom by atom.

    Both sides' bytes are read (a stored manifest inside a folder is not trusted; a manifest given as a path
    is). stated: the layouts of native files that do not declare theirs. Raises a MapperError kind on bad
    input; a difference is a result.
    """
    if isinstance(stated, str) or len(stated) != 2:
        raise LayoutError(
            f"stated is {stated!r}; expected a pair, the layouts of the two sides (None where they say it)"
        )
    layouts = [None if each is None else Layout(each) for each in stated]
    digest = Digest(digest)
    paths = (Path(a), Path(b))
    stored = [
        read_manifest(p) if p.suffix == ".json" and p.is_file() and not _index(p) else None for p in paths
    ]
    algorithm = next((m.algorithm for m in stored if m), digest)
    if algorithm is Digest.NONE:
        raise MapperError("digest none compares nothing; choose xxh3 or blake3")
    sides, read = [], []
    for path, manifest, layout in zip(paths, stored, layouts, strict=True):
        found = {} if manifest else identified_all(path, layout)
        read.append(found)
        sides.append(
            {"": manifest}
            if manifest
            else {name: compute(item, algorithm, threads, progress) for name, item in found.items()}
        )
    result = _compared(sides[0], sides[1], algorithm)
    return replace(result, hint=_misstated(result, read, sides, paths))


def _misstated(
    result: Verified,
    read: Sequence[Mapping[str, Identified]],
    sides: Sequence[Mapping[str, Manifest]],
    paths: Sequence[Path],
) -> str:
    """Would the first differing qkv_proj agree if one native side were read in the other row order?"""
    name = next((d.atom.partition("[")[0] for d in result.differences if "attn.qkv_proj" in d.atom), None)
    for side, other, path in zip(read, reversed(sides), paths, strict=True):
        for component, found in side.items():
            if name is None or not found.layout.native:
                continue
            swapped = replace(
                found, layout=Layout.MODULE if found.layout is Layout.RELEASE else Layout.RELEASE
            )
            digests = digests_of(swapped, [name], result.algorithm, threads=1)
            facing = _by_partition(other).get(PARTITIONS.get(component, component)) or next(
                iter(other.values())
            )
            if all(facing.atoms[atom].digest == digest for atom, digest in digests.items()):
                return (
                    f"{path}: its qkv_proj rows agree if it is read as {swapped.layout}, not {found.layout}"
                )
    return ""


def _index(path: Path) -> bool:
    return path.name.endswith(".index.json")


def _compared(a: Mapping[str, Manifest], b: Mapping[str, Manifest], algorithm: Digest) -> Verified:
    if len(a) == len(b) == 1:
        pairs = [(next(iter(b)), next(iter(a.values())), next(iter(b.values())))]
    else:
        left, right = _by_partition(a), _by_partition(b)
        if left.keys() != right.keys():
            sides = (listed(side if any(side) else ["one transformer"]) for side in (left, right))
            raise SourceError(
                f"the two hold different partitions: {' and '.join(sides)}; point at one of each"
            )
        pairs = [(name, left[name], right[name]) for name in left]
    differences = tuple(d for name, left, right in pairs for d in _differences(name, left.atoms, right.atoms))
    first = pairs[0]
    return Verified(
        sum(len(p[1].atoms) for p in pairs), algorithm, (first[1].layout, first[2].layout), differences
    )


def _by_partition(side: Mapping[str, Manifest]) -> dict[str, Manifest]:
    return {PARTITIONS.get(name, name): manifest for name, manifest in side.items()}


def _differences(
    component: str, a: Mapping[str, AtomDigest], b: Mapping[str, AtomDigest]
) -> list[Difference]:
    owner = {line.digest: name for name, line in a.items()}
    result = []
    for name in [*a, *(extra for extra in b if extra not in a)]:
        left, right = a.get(name), b.get(name)
        if left is None or right is None:
            result.append(
                Difference(component, name, "only in " + ("the second" if left is None else "the first"))
            )
        elif (left.shape, left.dtype) != (right.shape, right.dtype):
            sides = f"{list(left.shape)} {left.dtype} against {list(right.shape)} {right.dtype}"
            result.append(Difference(component, name, sides))
        elif left.digest != right.digest:
            moved = owner.get(right.digest)
            same_tensor = moved is not None and moved.partition("[")[0] == name.partition("[")[0]
            result.append(
                Difference(component, name, f"holds the first's {moved}" if same_tensor else "bits differ")
            )
    return result
