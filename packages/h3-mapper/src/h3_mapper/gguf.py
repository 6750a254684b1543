"""The header of a GGUF file: enough to say what it holds. Nothing is converted from GGUF.

Format: ggml's gguf.md (version 2 and 3): magic, version, counts, typed key-values, then a name, dimensions, a type and
an offset for each tensor.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from h3_mapper.config import H3Config
from h3_mapper.errors import FileFormatError
from h3_mapper.plan import tensors
from h3_mapper.spec import Layout
from h3_mapper.wrappers import unwrap

MAX_COUNT = 1 << 20
MAX_STRING = 1 << 24
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1"}
_TYPES |= {10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 30: "BF16"}


@dataclass(frozen=True, slots=True)
class Gguf:
    """architecture: what the file calls itself; often empty or another model's for H3. types: tensors by ggml type."""

    architecture: str
    names: tuple[str, ...]
    types: dict[str, int]


def read_gguf(path: Path) -> Gguf:
    """Read a GGUF header. Raises FileFormatError for anything malformed; sizes are checked before they are read."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise FileFormatError(f"{path}: not a GGUF file")
        try:
            return _read(file)
        except struct.error:
            raise FileFormatError(f"{path}: malformed GGUF header: the file ends within it") from None
        except (UnicodeDecodeError, _TooLargeError) as error:
            raise FileFormatError(f"{path}: malformed GGUF header: {error}") from None


class _TooLargeError(Exception):
    """A count or a length that no real file has."""


def _number(file: BinaryIO, form: str) -> int:
    return int(struct.unpack(form, file.read(struct.calcsize(form)))[0])


def _text(file: BinaryIO) -> str:
    length = _bounded(_number(file, "<Q"), MAX_STRING)
    return file.read(length).decode()


def _bounded(count: int, limit: int) -> int:
    if count > limit:
        raise _TooLargeError(f"a count of {count}")
    return count


def _value(file: BinaryIO, kind: int, keep: Callable[[str], None]) -> None:
    if kind == _STRING:
        keep(_text(file))
    elif kind == _ARRAY:
        inner = _number(file, "<I")
        for _ in range(_bounded(_number(file, "<Q"), MAX_STRING)):
            _value(file, inner, lambda _: None)
    elif kind in _SCALARS:
        file.read(struct.calcsize(_SCALARS[kind]))
    else:
        raise _TooLargeError(f"a value of unknown type {kind}")


def _read(file: BinaryIO) -> Gguf:
    version = _number(file, "<I")
    if version not in (2, 3):
        raise _TooLargeError(f"version {version}")
    tensors, pairs = (_bounded(_number(file, "<Q"), MAX_COUNT) for _ in range(2))
    texts: dict[str, str] = {}
    for _ in range(pairs):
        key = _text(file)
        _value(file, _number(file, "<I"), lambda text, key=key: texts.__setitem__(key, text))  # type: ignore[misc]
    names, types = [], Counter[str]()
    for _ in range(tensors):
        names.append(_text(file))
        for _ in range(_bounded(_number(file, "<I"), 8)):
            _number(file, "<Q")
        kind = _number(file, "<I")
        types[_TYPES.get(kind, f"ggml type {kind}")] += 1
        _number(file, "<Q")
    return Gguf(texts.get("general.architecture", ""), tuple(names), dict(types))


def describe_gguf(path: Path, found: Gguf) -> tuple[list[str], dict[str, Any]]:
    """(lines for people, JSON object): what the tensor names say, whatever the architecture string claims."""
    native = {spec.name for spec in tensors(H3Config(), Layout.MODULE)}
    bare = {unwrap(name).name for name in found.names}
    share = len(bare & native) / max(1, len(bare))
    model = "MiniMax-H3 by its tensor names" if share > 0.5 else "unknown"
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(found.types.items()))
    problem = "GGUF is not converted: its blocks pack values across columns; use the safetensors release"
    lines = [
        f"{path}",
        f"  variant   GGUF: {model}; the file calls itself {found.architecture or 'nothing'!r}",
        f"  tensors   {len(found.names)}, {share:.0%} of them H3 native names",
        f"  precision {counts}",
        f"  problem   {problem}",
    ]
    data = {
        "path": str(path),
        "variant": "gguf",
        "model": model,
        "architecture": found.architecture,
        "tensors": len(found.names),
        "precision": found.types,
        "problems": [problem],
    }
    return lines, data
