"""PATH -> what it is: a folder with an index, a file, a hub snapshot, or a root of partitions.

A component is one transformer: its shards' headers, its config.json and what it declares about its layout.
The index decides which shards are read; a folder is never globbed past it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from h3_mapper.config import H3Config
from h3_mapper.errors import (
    ConfigError,
    DuplicateTensorError,
    FileFormatError,
    IndexFileError,
    MissingShardError,
    SourceError,
    StrayTensorError,
    UnsafePathError,
    listed,
)
from h3_mapper.safetensors_io import AGAIN, Entry, Header, parse_json, read_header
from h3_mapper.stream import CHUNK

PARTITIONS = {
    "transformer": "FL2VA",
    "transformer_ref": "Ref2VA",
    "FL2VA/transformer": "FL2VA",
    "Ref2VA/transformer": "Ref2VA",
}
"""Where a root keeps its transformers (Diffusers repositories, then the release's) -> which partition it is."""

SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
RANK = re.compile(r"rank-\d+-of-\d+")
"""Folders of `convert --tp`."""

MAX_JSON = 16 * 1024 * 1024
LAYOUT_KEY = "h3.layout"
"""safetensors metadata key that states the layout of a file we wrote."""


@dataclass(frozen=True, slots=True)
class Component:
    """One transformer on disk. path: its folder. given: what messages name, the folder or the one file pointed at.

    config: None when there is no config.json.
    """

    path: Path
    given: Path
    headers: tuple[Header, ...]
    config: Mapping[str, Any] | None
    tensors: Mapping[str, tuple[Header, Entry]] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(entry.end - entry.begin for _, entry in self.tensors.values())

    @property
    def footprint(self) -> int:
        """Most disk a copy can take, bytes: holes of sparse shards are kept, but only whole CHUNKs of them."""
        grain = CHUNK // 4096  # the least data that makes a chunk no hole is one 4 KiB page
        stats = [header.path.stat() for header in self.headers]
        return sum(min(stat.st_size, stat.st_blocks * 512 * grain) for stat in stats)

    @property
    def declared(self) -> frozenset[str]:
        """The layouts its files' metadata state."""
        return frozenset(h.metadata[LAYOUT_KEY] for h in self.headers if LAYOUT_KEY in h.metadata)


PICKLED = frozenset({".bin", ".pt", ".pth", ".ckpt"})
"""Endings of files that torch.load would unpickle."""


def open_source(path: Path) -> dict[str, Component]:
    """Components under `path` by their relative folder (`""` for `path` itself), headers read and checked.

    Raises SourceError or FileFormatError and their narrower kinds; nothing but headers is read.
    """
    if path.is_file():
        shards = _shards_of_file(path)
        return {"": _component(path.parent, shards, path if shards.names == (path.name,) else path.parent)}
    if not path.is_dir():
        raise SourceError(f"{path}: no such file or folder")
    found = [name for name in PARTITIONS if (path / name).is_dir() and _has_weights(path / name)]
    families = {"/" in name for name in found}
    if len(families) > 1:
        raise SourceError(
            f"{path}: holds both kinds of partition ({listed(found)}); point at the one you want"
        )
    if found:
        return {name: _component(path / name, _shards_of_folder(path / name)) for name in found}
    return {"": _component(path, _shards_of_folder(path))}


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json"))


@dataclass(frozen=True, slots=True)
class _Shards:
    """Shard file names in one folder, and what the index says each holds (None without an index)."""

    names: tuple[str, ...]
    weight_map: Mapping[str, str] | None = None


def _shards_of_file(path: Path) -> _Shards:
    if path.name.endswith(".safetensors.index.json"):
        return _indexed(path)
    if path.suffix == ".gguf":
        raise FileFormatError(f"{path}: this is a GGUF file; h3-mapper reads safetensors")
    if path.suffix != ".safetensors":
        raise SourceError(
            f"{path}: not a .safetensors file, an index or a folder; point at the folder or file that holds the weights"
        )
    return _shards_of_folder(path.parent) if SHARD.fullmatch(path.name) else _Shards((path.name,))


def _shards_of_folder(folder: Path) -> _Shards:
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        raise IndexFileError(
            f"{folder}: two indexes ({listed(i.name for i in indexes)}); point at one of them"
        )
    if indexes:
        return _indexed(indexes[0])
    names = sorted(p.name for p in folder.glob("*.safetensors"))
    if not names:
        raise SourceError(
            f"{folder}: no safetensors file, index or transformer/ folder here{instead(folder)}"
        )
    if len(names) == 1 and not SHARD.fullmatch(names[0]):
        return _Shards((names[0],))
    return _Shards(_family(folder, names))


def instead(folder: Path) -> str:
    """What lies in a folder without safetensors files, if people take it for a checkpoint."""
    if (folder / "snapshots").is_dir():
        found = listed(f"snapshots/{each.name}" for each in (folder / "snapshots").iterdir())
        return f"; a hub cache's root: point at a snapshot ({found})"
    if gguf := listed(path.name for path in folder.glob("*.gguf")):
        return f"; h3-mapper reads no GGUF ({gguf})"
    if pickled := listed(path.name for path in folder.iterdir() if path.suffix in PICKLED):
        return f"; pickled weights are never opened ({pickled}): save them as safetensors"
    held = [path.name for path in folder.iterdir() if path.is_dir() and _has_weights(path)]
    if any(RANK.fullmatch(name) for name in held):
        return f"; one rank's part each in {listed(held)}: use the whole checkpoint that they were cut from"
    return f"; point at one of {listed(held)}" if held else ""


def _family(folder: Path, names: list[str]) -> tuple[str, ...]:
    """Without an index, only one complete -of-N family is unambiguous."""
    matches = [SHARD.fullmatch(name) for name in names]
    families = {(m["stem"], m["count"]) if m else (name, "") for m, name in zip(matches, names, strict=True)}
    if len(families) > 1:
        raise SourceError(f"{folder}: no index and several sets of weights ({listed(names)}); point at one")
    stem, count = next(iter(families))
    expected = {f"{stem}-{number:05d}-of-{count}.safetensors" for number in range(1, int(count) + 1)}
    if expected != set(names):
        raise MissingShardError(
            f"{folder}: no index and not all of {count} shards: absent or misnumbered {listed(expected ^ set(names))}; "
            "put them into the folder"
        )
    return tuple(names)


def _indexed(index: Path) -> _Shards:
    """The shards an index names. Names are checked before any is opened."""
    parsed = read_json(index)
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise IndexFileError(
            f"{index}: weight_map must be an object of tensor name -> shard file; {AGAIN}, or remove it if the folder "
            "holds one whole set of shards"
        )
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard:
            raise IndexFileError(f"{index}: weight_map[{tensor!r}] is {shard!r}, not a file name")
        if PurePosixPath(shard).name != shard or shard in (".", "..") or "\\" in shard or "\0" in shard:
            raise UnsafePathError(
                f"{index}: weight_map[{tensor!r}] is {shard!r}; shards must lie in the folder itself"
            )
    names = tuple(sorted(set(weight_map.values())))
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise MissingShardError(
            f"{index}: {len(absent)} of {len(names)} shards are absent: {listed(absent)}; "
            f"{_fetch(index.parent, absent)}"
        )
    return _Shards(names, weight_map)


def _fetch(folder: Path, absent: list[str]) -> str:
    """What to do about shards that are not there: in a hub cache they may be links to blobs never fetched."""
    if any((folder / name).is_symlink() for name in absent):
        return "they are links to files that are not there: download the snapshot again"
    return f"put them into {folder}"


def _component(folder: Path, shards: _Shards, given: Path | None = None) -> Component:
    headers = tuple(read_header(folder / name) for name in shards.names)
    tensors: dict[str, tuple[Header, Entry]] = {}
    for header in headers:
        for name, entry in header.entries.items():
            if name in tensors:
                raise DuplicateTensorError(
                    f"{folder}: {name!r} is in two shards, {tensors[name][0].path.name} and {header.path.name}"
                )
            tensors[name] = (header, entry)
    if shards.weight_map is not None:
        _check_index(folder, shards.weight_map, tensors)
    return Component(folder, given or folder, headers, _read_config(folder), tensors)


def _check_index(
    folder: Path, weight_map: Mapping[str, str], tensors: Mapping[str, tuple[Header, Entry]]
) -> None:
    held = {name: header.path.name for name, (header, _) in tensors.items()}
    differing = {name for name, shard in weight_map.items() if held.get(name) != shard}
    if differing:
        raise StrayTensorError(
            f"{folder}: not in the shard the index names: {listed(differing)}; index and shards are not of one "
            "checkpoint: copy them again, together"
        )
    if stray := held.keys() - weight_map.keys():
        raise StrayTensorError(
            f"{folder}: in a shard and not in the index: {listed(stray)}; index and shards are not of one checkpoint: "
            "copy them again, together"
        )


def _read_config(folder: Path) -> Mapping[str, Any] | None:
    path = folder / "config.json"
    if not path.is_file():
        return None
    parsed = read_json(path)
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path}: not a JSON object; expected H3's config.json")
    return parsed


def config_file(path: Path) -> H3Config:
    """The dimensions a config.json file states, whatever its name. Raises ConfigError or FileFormatError, naming it."""
    parsed = read_json(path)
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path}: not a JSON object; expected H3's config.json")
    return H3Config.from_mapping(parsed, str(path))


def read_json(path: Path) -> Any:
    """A JSON file of at most 16 MiB, without duplicate keys. Raises FileFormatError or its kinds."""
    if path.stat().st_size > MAX_JSON:
        raise FileFormatError(f"{path}: over {MAX_JSON} bytes; not what it is named")
    return parse_json(path.read_bytes(), path)
