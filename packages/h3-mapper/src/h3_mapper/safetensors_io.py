"""safetensors headers and indexes: strict reading, the library's own order when writing. No tensor data.

The rules are those of the safetensors format (github.com/safetensors/safetensors, README and
`tensor.rs`), read strictly: the header starts with `{`, no key occurs twice, the tensors tile the data
exactly, nothing follows them. Where the library is lenient (duplicate keys, a leading space) this refuses.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from h3_mapper.errors import (
    DuplicateKeyError,
    FileFormatError,
    GapError,
    HugeHeaderError,
    OverlapError,
    TrailingBytesError,
    TruncatedFileError,
)

MAX_HEADER = 16 * 1024 * 1024
"""Bytes. The 638-tensor Diffusers header is 80 KiB; the format's own bound, 100 MB, only serves attacks here."""

DTYPE_BITS: Mapping[str, int] = {
    **{"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8},
    **{"F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16},
    **{"I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64},
}
"""Every dtype of the format, in the order of its enum: the library writes tensors by descending dtype, then name."""

AGAIN = "copy or download the file again"
"""What to do about a file that is not what its writer wrote."""

_STRANGERS: tuple[tuple[bytes, str], ...] = (
    (b"GGUF", "a GGUF file; h3-mapper reads safetensors"),
    (b"version ", "a Git LFS pointer, not the file itself; fetch it with git lfs pull"),
    (b"<", f"a web page (HTML or XML), not the file itself: the server answered with a page; {AGAIN}"),
    (b"{", f"JSON text, not the file itself: an error message, an index or a config.json; {AGAIN}"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes; pickles are not opened: save it as safetensors"),
    (b"\x80\x02", "a pickle, as torch.save writes; pickles are not opened: save it as safetensors"),
    (b"\x1f\x8b", "gzip-compressed; unpack it first"),
    (b"\x93NUMPY", "a numpy file; save it as safetensors"),
    (b"\x89HDF", "an HDF5 file; save it as safetensors"),
    (bytes(8), f"zeros at its start: an unfinished download or copy; {AGAIN}"),
)
"""First bytes of what people store under a .safetensors name -> what it is. Compared only where there is no header, and
one character only with text after it: a real file starts with a small little-endian number, mostly zero bytes."""

_DTYPE_RANK = {dtype: rank for rank, dtype in enumerate(DTYPE_BITS)}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file; begin and end are byte offsets from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A file's header, checked against its size. data_start: byte offset of the data in the file."""

    path: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    data_start: int


def read_header(path: Path) -> Header:
    """Read and check the header of one safetensors file; no tensor data is read.

    Raises FileFormatError or its narrower kinds: TruncatedFileError, TrailingBytesError, GapError,
    OverlapError, HugeHeaderError, DuplicateKeyError.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        text = _header_text(file, size, path)
    parsed = parse_json(text, path)
    if not isinstance(parsed, dict):
        raise FileFormatError(f"{path}: the header is not a JSON object")
    metadata = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FileFormatError(f"{path}: __metadata__ must map strings to strings")
    entries = [_entry(name, value, path) for name, value in parsed.items()]
    data_start = 8 + len(text)
    _check_tiling(entries, size - data_start, path)
    return Header(path, {entry.name: entry for entry in entries}, metadata, data_start)


def _header_text(file: BinaryIO, size: int, path: Path) -> bytes:
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    text = file.read(length) if len(prefix) == 8 and length <= MAX_HEADER else b""
    if not text.startswith(b"{"):
        _refuse_stranger(prefix, path)
    if len(prefix) < 8:
        raise TruncatedFileError(f"{path}: {size} bytes is too short for a safetensors file; {AGAIN}")
    if length > MAX_HEADER:
        raise HugeHeaderError(
            f"{path}: header length {length} is over {MAX_HEADER}; not a safetensors file of H3; {AGAIN}"
        )
    if len(text) < length:
        raise TruncatedFileError(
            f"{path}: the header says {length} bytes and the file has {len(text)} left; {AGAIN}"
        )
    if not text.startswith(b"{"):
        raise FileFormatError(f"{path}: the header does not start with '{{'; not a safetensors file; {AGAIN}")
    return text


def _refuse_stranger(prefix: bytes, path: Path) -> None:
    """Name a file that is something else, by its first bytes; leading white space of text does not count."""
    start = prefix.lstrip() or prefix
    for magic, what in _STRANGERS:
        if start.startswith(magic) and (len(magic) > 1 or 0 not in prefix):
            raise FileFormatError(f"{path}: is {what}")
    if len(prefix) == 8 and prefix.isascii() and prefix.decode().isprintable():
        raise FileFormatError(
            f"{path}: starts with the text {prefix.decode()!r}; not a safetensors file but perhaps a server's message; "
            f"{AGAIN}"
        )


def parse_json(text: bytes, path: Path) -> Any:
    """JSON without duplicate keys, NaN or nesting bombs. Raises DuplicateKeyError or FileFormatError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            key = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise DuplicateKeyError(f"{path}: key {key!r} occurs twice in one JSON object")
        return result

    def no_constant(name: str) -> NoReturn:
        raise FileFormatError(f"{path}: {name} is not JSON")

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
    except (FileFormatError, DuplicateKeyError):
        raise
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise FileFormatError(f"{path}: malformed JSON: {error}; write it or download it again") from error


def _entry(name: str, value: Any, path: Path) -> Entry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(value, dict):
        raise FileFormatError(f"{where}: its header entry is not an object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise FileFormatError(f"{where}: unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise FileFormatError(f"{where}: shape {shape!r} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise FileFormatError(f"{where}: data_offsets {offsets!r} is not [begin, end]")
    begin, end = offsets
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or end - begin != bits // 8:
        raise FileFormatError(
            f"{where}: shape {shape} of {dtype} needs {bits / 8:g} bytes and data_offsets give {end - begin}"
        )
    return Entry(name, dtype, tuple(shape), begin, end)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _check_tiling(entries: Iterable[Entry], available: int, path: Path) -> None:
    reached, last = 0, "the header"
    for entry in sorted(entries, key=lambda e: (e.begin, e.end)):
        if entry.begin > reached:
            raise GapError(
                f"{path}: bytes {reached}:{entry.begin} between {last} and {entry.name!r} are no tensor's; "
                "save it again with the safetensors library"
            )
        if entry.begin < reached:
            raise OverlapError(
                f"{path}: {last} and {entry.name!r} overlap at byte {entry.begin}; save it again with the safetensors "
                "library"
            )
        reached, last = entry.end, repr(entry.name)
    if available < reached:
        raise TruncatedFileError(
            f"{path}: tensors need {reached} bytes of data and the file has {available}; {AGAIN}"
        )
    if available > reached:
        raise TrailingBytesError(
            f"{path}: {available - reached} bytes follow the last tensor; {AGAIN} (some tools ignore such bytes, the "
            "safetensors library refuses them)"
        )


def file_order(dtype: str, name: str) -> tuple[int, str]:
    """Sort key of the safetensors library's writer: dtype descending, then name."""
    return (-_DTYPE_RANK[dtype], name)


def encode_header(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """Length prefix and header as the library writes them (compact UTF-8 JSON, padded to 8 bytes).

    Metadata keys are sorted: the library leaves them in random order, which makes files irreproducible.
    """
    table: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    for entry in entries:
        table[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
