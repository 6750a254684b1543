"""Headers: what the format forbids is refused with its own error, what the library writes is read and
written alike, and no bytes whatever raise anything but a MapperError."""

import json
import struct

import numpy as np
import pytest
import safetensors.numpy
from h3_mapper import MapperError
from h3_mapper.errors import (
    DuplicateKeyError,
    FileFormatError,
    GapError,
    HugeHeaderError,
    OverlapError,
    TrailingBytesError,
    TruncatedFileError,
)
from h3_mapper.safetensors_io import DTYPE_BITS, Entry, encode_header, file_order, read_header
from hypothesis import given, settings
from hypothesis import strategies as st
from mapper_testkit import write_raw


def entry(shape, begin, end, dtype="BF16"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def text(**entries) -> bytes:
    return json.dumps(entries).encode()


BAD = {
    "not JSON": (FileFormatError, b"{nonsense", b""),
    "not an object": (FileFormatError, b"[1, 2]  ", b""),
    "leading space": (FileFormatError, b" {}", b""),
    "byte order mark": (FileFormatError, b"\xef\xbb\xbf{}", b""),
    "not UTF-8": (FileFormatError, b'{"\xff": 1}', b""),
    "NaN": (FileFormatError, b'{"a": NaN}', b""),
    "nesting bomb": (FileFormatError, b'{"a":' + b"[" * 100_000, b""),
    "endless number": (FileFormatError, b'{"a": ' + b"9" * 10_000 + b"}", b""),
    "entry is a number": (FileFormatError, b'{"a": 3}', b""),
    "unknown dtype": (FileFormatError, text(a=entry([2], 0, 4, "BF17")), bytes(4)),
    "dtype is a list": (FileFormatError, text(a=entry([2], 0, 4, ["BF16"])), bytes(4)),
    "negative size": (FileFormatError, text(a=entry([-2], 0, 4)), bytes(4)),
    "fractional size": (FileFormatError, text(a=entry([2.0], 0, 4)), bytes(4)),
    "boolean size": (FileFormatError, text(a=entry([True, 2], 0, 4)), bytes(4)),
    "one offset": (FileFormatError, b'{"a": {"dtype": "BF16", "shape": [2], "data_offsets": [4]}}', bytes(4)),
    "no shape": (FileFormatError, b'{"a": {"dtype": "BF16", "data_offsets": [0, 4]}}', bytes(4)),
    "shape larger than bytes": (FileFormatError, text(a=entry([1000, 1000], 0, 4)), bytes(4)),
    "shape overflows 64 bits": (FileFormatError, text(a=entry([2**62, 2**62], 0, 4)), bytes(4)),
    "metadata not strings": (FileFormatError, b'{"__metadata__": {"a": 1}}', b""),
    "duplicate name": (
        DuplicateKeyError,
        b'{"a": %b, "a": %b}' % ((json.dumps(entry([2], 0, 4)).encode(),) * 2),
        bytes(4),
    ),
    "duplicate inner key": (DuplicateKeyError, b'{"a": {"dtype": "U8", "dtype": "I8"}}', b""),
    "gap at the start": (GapError, text(a=entry([2], 2, 6)), bytes(6)),
    "gap between": (GapError, text(a=entry([2], 0, 4), b=entry([2], 6, 10)), bytes(10)),
    "overlap": (OverlapError, text(a=entry([2], 0, 4), b=entry([2], 2, 6)), bytes(6)),
    "truncated data": (TruncatedFileError, text(a=entry([2], 0, 4), b=entry([2], 4, 8)), bytes(7)),
    "trailing bytes": (TrailingBytesError, text(a=entry([2], 0, 4)), bytes(20)),
}


@pytest.mark.parametrize("case", BAD)
def test_a_malformed_file_has_its_own_error(tmp_path, case):
    """Comfy-Org/ComfyUI#15602 (trailing), ml-explore/mlx#3363 (shape), ztxz16/fastllm#713 (duplicate)."""
    error, header, data = BAD[case]
    write_raw(tmp_path / "x.safetensors", header, data)
    with pytest.raises(MapperError, match=r"x\.safetensors") as caught:
        read_header(tmp_path / "x.safetensors")
    assert type(caught.value) is error


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 16 * 1024 * 1024 + 1])
def test_a_huge_header_is_refused_before_it_is_read(tmp_path, length):
    """ollama/ollama#17149"""
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(HugeHeaderError):
        read_header(path)


@pytest.mark.parametrize("raw", [b"", b"\x02", struct.pack("<Q", 100) + b"{}"])
def test_a_short_file_is_truncated(tmp_path, raw):
    (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises(TruncatedFileError):
        read_header(tmp_path / "x.safetensors")


def test_gguf_is_named(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(FileFormatError, match="GGUF"):
        read_header(tmp_path / "x.safetensors")


def test_an_unaligned_data_start_is_fine(tmp_path):
    """Real files have header lengths that are no multiple of 8; offsets count from the data all the same."""
    header = text(a=entry([2], 0, 4)) + b" "
    write_raw(tmp_path / "x.safetensors", header, b"\x01\x02\x03\x04")
    assert read_header(tmp_path / "x.safetensors").data_start == 8 + len(header)


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_of_the_format_has_its_size(tmp_path, dtype):
    write_raw(
        tmp_path / "x.safetensors", text(a=entry([8], 0, DTYPE_BITS[dtype], dtype)), bytes(DTYPE_BITS[dtype])
    )
    assert read_header(tmp_path / "x.safetensors").entries["a"].shape == (8,)


def test_headers_are_the_librarys_own_bytes(tmp_path):
    """Same order, separators, escapes and padding as the safetensors library writes."""
    arrays = {
        "b": np.zeros((2, 3), "f4"),
        "ä": np.zeros((5,), "i8"),
        "a": np.zeros((0, 4), "f4"),
        "s": np.zeros((), "u1"),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    ordered = sorted(header.entries.values(), key=lambda e: file_order(e.dtype, e.name))
    assert [e.begin for e in ordered] == sorted(e.begin for e in ordered)
    ours = encode_header(ordered, header.metadata)
    assert (tmp_path / "x.safetensors").read_bytes()[: len(ours)] == ours


GOOD = text(a=entry([2, 3], 0, 12), b=entry([4], 12, 28, "F32")) + b" "


@settings(max_examples=8 * settings().max_examples)
@given(data=st.data())
def test_damaged_bytes_never_raise_anything_but_our_error(tmp_path, data):
    raw = bytearray(struct.pack("<Q", len(GOOD)) + GOOD + bytes(28))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                raw[at] = data.draw(st.integers(0, 255))
            case "cut":
                del raw[at : at + data.draw(st.integers(1, 8))]
            case "insert":
                raw[at:at] = data.draw(st.binary(max_size=8))
        if not raw:
            break
    (tmp_path / "x.safetensors").write_bytes(bytes(raw))
    try:
        header = read_header(tmp_path / "x.safetensors")
    except MapperError:
        return
    assert sum(e.end - e.begin for e in header.entries.values()) == len(raw) - header.data_start


JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYED = st.fixed_dictionaries(
    {}, optional={"dtype": JSONISH | st.just("BF16"), "shape": JSONISH, "data_offsets": JSONISH}
)


@settings(max_examples=8 * settings().max_examples)
@given(header=st.dictionaries(st.text(max_size=8) | st.just("__metadata__"), JSONISH | KEYED, max_size=4))
def test_any_json_never_raises_anything_but_our_error(tmp_path, header):
    write_raw(tmp_path / "x.safetensors", json.dumps(header).encode(), bytes(16))
    try:
        read_header(tmp_path / "x.safetensors")
    except MapperError:
        return


def test_entries_round_trip(tmp_path):
    entries = [Entry("a", "BF16", (2, 3), 0, 12), Entry("b", "F32", (), 12, 16)]
    (tmp_path / "x.safetensors").write_bytes(encode_header(entries, {"k": "v"}) + bytes(16))
    header = read_header(tmp_path / "x.safetensors")
    assert list(header.entries.values()) == entries
    assert header.metadata == {"k": "v"}
