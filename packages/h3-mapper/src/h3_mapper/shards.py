"""Target tensors -> output files: the hub's sharding and naming rules, the library's order within a file.

The rules are those of `huggingface_hub.split_torch_state_dict_into_shards`: greedy in state-dict order, a
tensor above the limit gets its own shard, one shard keeps the plain name and has no index.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from h3_mapper.errors import MapperError
from h3_mapper.safetensors_io import Entry, encode_header, file_order

DIFFUSERS_STEM = "diffusion_pytorch_model"
NATIVE_STEM = "model"
"""vLLM-Omni 0.30 reads either index name."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class Sized(Protocol):
    """What sharding needs to know of a tensor (`Target` and `TensorSpec` are such)."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> str:
        """Its safetensors dtype name."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""


@dataclass(frozen=True, slots=True)
class OutFile:
    """One file to write: its encoded header and its tensors in file order."""

    name: str
    header: bytes
    entries: tuple[Entry, ...]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + (self.entries[-1].end if self.entries else 0)


def parse_size(text: str | int) -> int:
    """`5GB` -> 5 * 10**9, `5GiB` -> 5 * 2**30, as the hub library reads sizes. Raises MapperError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = _UNITS.get(match[2].upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size <= 0:
        raise MapperError(f"max shard size {text!r} is not a size such as 5GB or 500MB")
    return size


def out_files(
    tensors: Sequence[Sized], stem: str, max_shard_size: int, metadata: Mapping[str, str]
) -> tuple[OutFile, ...]:
    """The files that hold `tensors`; each carries `metadata` (`format: pt` is added, engines require it)."""
    shards = _split(tensors, max_shard_size)
    count = len(shards)
    names = [f"{stem}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    if count == 1:
        names = [f"{stem}.safetensors"]
    return tuple(_out_file(name, shard, metadata) for name, shard in zip(names, shards, strict=True))


def _split(tensors: Iterable[Sized], limit: int) -> list[list[Sized]]:
    shards: list[list[Sized]] = []
    current: list[Sized] = []
    size = 0
    for tensor in tensors:
        if tensor.nbytes > limit:
            shards.append([tensor])
            continue
        if size + tensor.nbytes > limit:
            shards.append(current)
            current, size = [], 0
        current.append(tensor)
        size += tensor.nbytes
    return [*shards, current] if current else shards


def _out_file(name: str, tensors: Sequence[Sized], metadata: Mapping[str, str]) -> OutFile:
    entries, offset = [], 0
    for tensor in sorted(tensors, key=lambda t: file_order(t.dtype, t.name)):
        entries.append(Entry(tensor.name, tensor.dtype, tensor.shape, offset, offset + tensor.nbytes))
        offset += tensor.nbytes
    return OutFile(name, encode_header(entries, {"format": "pt", **metadata}), tuple(entries))


def index_json(files: Sequence[OutFile]) -> str:
    """The index of a sharded set, as the hub library writes it."""
    weight_map = {entry.name: file.name for file in files for entry in file.entries}
    total = sum(entry.end - entry.begin for file in files for entry in file.entries)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"
