"""The small matrices an adapter is made of, moved by whole rows.

A tensor here is a `Raw` (bytes of a file: needs neither numpy nor torch), a numpy array or a torch tensor. Every
function returns the kind it was given, and copies bits: nothing in this module computes.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

ITEMSIZE = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I32": 4, "I64": 8}
"""Bytes of the dtypes adapters have; integers only as alpha."""


@dataclass(frozen=True, slots=True)
class Raw:
    """Row-major little-endian values as the safetensors format stores them."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first axis."""
        return len(self.data) // self.shape[0] if self.shape and self.shape[0] else 0

    def __getitem__(self, rows: slice) -> Raw:
        start, stop, _ = rows.indices(self.shape[0])
        size = self.row_bytes
        return Raw(
            self.dtype, (stop - start, *self.shape[1:]), memoryview(self.data)[start * size : stop * size]
        )


Tensor: TypeAlias = Any
"""`Raw`, `numpy.ndarray` or `torch.Tensor`."""


def shape(tensor: Tensor) -> tuple[int, ...]:
    """Shape as plain integers."""
    return tuple(int(n) for n in tensor.shape)


def dtype_name(tensor: Tensor) -> str:
    """Safetensors dtype name of a `Raw`; the library's own name otherwise."""
    return tensor.dtype if isinstance(tensor, Raw) else str(tensor.dtype).removeprefix("torch.")


def _is_torch(tensor: Tensor) -> bool:
    return type(tensor).__module__.partition(".")[0] == "torch"


def rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Rows [start, stop): a view."""
    return tensor[start:stop]


def layer(tensor: Tensor, index: int) -> Tensor:
    """Matrix `index` of a stack [n, rows, columns]: a view."""
    if not isinstance(tensor, Raw):
        return tensor[index]
    return Raw(tensor.dtype, tensor.shape[1:], tensor[index : index + 1].data)


def reshaped(tensor: Tensor, size: tuple[int, ...]) -> Tensor:
    """The same values in the same order under another shape."""
    return Raw(tensor.dtype, size, tensor.data) if isinstance(tensor, Raw) else tensor.reshape(size)


def used_columns(tensor: Raw) -> tuple[int, int]:
    """The narrowest [start, stop) of columns outside which every bit of a matrix is zero; (0, 0) if all is zero."""
    data, width, size = memoryview(tensor.data), tensor.row_bytes, ITEMSIZE[tensor.dtype]
    union = 0
    for i in range(0, len(data), width):
        union |= int.from_bytes(data[i : i + width], "little")
        if i % (16 * width) == 0 and union and _span(union, size) == (0, tensor.shape[1]):
            break  # a shared A uses every column, and a few rows show it
    return _span(union, size) if union else (0, 0)


def _span(bits: int, size: int) -> tuple[int, int]:
    """[first, last + 1) of the little-endian values of `size` bytes that have a bit set."""
    lowest = (bits & -bits).bit_length() - 1
    return lowest // 8 // size, -(-bits.bit_length() // 8 // size)


def columns(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Columns [start, stop) of a matrix [n, m]: a copy for `Raw`, a view otherwise."""
    if not isinstance(tensor, Raw):
        return tensor[:, start:stop]
    size = ITEMSIZE[tensor.dtype]
    data, width = memoryview(tensor.data), tensor.row_bytes
    picked = b"".join(data[i + start * size : i + stop * size] for i in range(0, len(data), width))
    return Raw(tensor.dtype, (tensor.shape[0], stop - start), picked)


def concat(tensors: Sequence[Tensor]) -> Tensor:
    """Stack along the first axis. All of one kind and dtype."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    if isinstance(first, Raw):
        total = sum(t.shape[0] for t in tensors)
        return Raw(first.dtype, (total, *first.shape[1:]), b"".join(bytes(t.data) for t in tensors))
    if _is_torch(first):
        import torch

        return torch.cat(list(tensors))
    import numpy

    return numpy.concatenate(tensors)


def pad_columns(tensor: Tensor, left: int, right: int) -> Tensor:
    """A matrix with `left` and `right` zero columns around it."""
    height, width = shape(tensor)
    if isinstance(tensor, Raw):
        size, step = ITEMSIZE[tensor.dtype], tensor.row_bytes
        before, after, data = bytes(left * size), bytes(right * size), memoryview(tensor.data)
        padded = b"".join(before + data[i : i + step] + after for i in range(0, len(data), step))
        return Raw(tensor.dtype, (height, left + width + right), padded)
    wide = zeros(tensor, (height, left + width + right))
    wide[:, left : left + width] = tensor
    return wide


def zeros(like: Tensor, size: tuple[int, ...]) -> Tensor:
    """A zero tensor of the kind and dtype of `like`."""
    if isinstance(like, Raw):
        return Raw(like.dtype, size, bytes(math.prod(size) * ITEMSIZE[like.dtype]))
    if _is_torch(like):
        return like.new_zeros(size)
    import numpy

    return numpy.zeros(size, like.dtype)


def scalar_like(like: Tensor, value: float) -> Tensor:
    """A tensor of one value, fp32 if that is exact and fp64 if not."""
    exact = struct.unpack("<f", struct.pack("<f", value))[0] == value
    if isinstance(like, Raw):
        return Raw("F32", (), struct.pack("<f", value)) if exact else Raw("F64", (), struct.pack("<d", value))
    if _is_torch(like):
        import torch

        return torch.tensor(value, dtype=torch.float32 if exact else torch.float64)
    import numpy

    return numpy.array(value, numpy.float32 if exact else numpy.float64)


def raw(tensor: Tensor) -> Raw:
    """The bytes of any of the three kinds; torch tensors are copied to the host."""
    if isinstance(tensor, Raw):
        return tensor
    if _is_torch(tensor):
        import torch

        flat = tensor.detach().to("cpu").contiguous()
        name = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}[
            flat.dtype
        ]
        return Raw(name, shape(tensor), memoryview(flat.view(torch.uint8).reshape(-1).numpy()))
    name = {"float16": "F16", "float32": "F32", "float64": "F64"}[str(tensor.dtype)]
    return Raw(name, shape(tensor), tensor.tobytes())


def same(one: Tensor, two: Tensor) -> bool:
    """Equal dtype, shape and bits."""
    if one is two:
        return True
    if shape(one) != shape(two) or dtype_name(one) != dtype_name(two):
        return False
    return bytes(raw(one).data) == bytes(raw(two).data)


_HALF_INF = (*range(0x7C, 0x80), *range(0xFC, 0x100))


def is_finite(tensor: Tensor) -> bool:
    """False if any value is an infinity or a NaN."""
    if not isinstance(tensor, Raw):
        return bool((abs(tensor) < math.inf).all())
    value = tensor
    data = bytes(value.data)
    if value.dtype == "F16":  # exponent 31: sign and exponent are the six high bits of the high byte
        high = data[1::2]
        return not any(byte in high for byte in _HALF_INF)
    size = ITEMSIZE[value.dtype]
    high = data[size - 1 :: size]
    # All exponent bits set means the top byte is 7f or ff and the next begins with ones. Trained factors hold no
    # such top byte at all, so two searches at memory speed decide.
    if 0x7F not in high and 0xFF not in high:
        return True
    below = data[size - 2 :: size]
    ones = 0xF0 if value.dtype == "F64" else 0x80
    return all(below[hit.start()] & ones != ones for hit in re.finditer(rb"[\x7f\xff]", high))


def is_zero(tensor: Tensor) -> bool:
    """True if every value is +0 or -0."""
    if not isinstance(tensor, Raw):
        return not bool(tensor.any())
    value = tensor
    data, size = bytes(value.data), ITEMSIZE[value.dtype]
    if data[size - 1 :: size].strip(b"\x00\x80"):
        return False
    return not any(data[i::size].strip(b"\x00") for i in range(size - 1))
