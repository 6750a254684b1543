"""The five things a plan does to a tensor, for torch and for numpy. Neither is imported unless it is used."""

from __future__ import annotations

import sys
from typing import Any, Protocol, TypeAlias

from h3_mapper.errors import UnsupportedTensorError
from h3_mapper.runs import Run

Array: TypeAlias = Any
"""A torch.Tensor or numpy.ndarray."""

_DTYPES = {
    **{"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "uint16": "U16"},
    **{"int8": "I8", "uint8": "U8", "int16": "I16", "int32": "I32", "int64": "I64", "bool": "BOOL"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
}
"""Array dtype name -> safetensors name."""


class Backend(Protocol):
    """One array library."""

    def describe(self, array: Array) -> tuple[tuple[int, ...], str]:
        """(shape, safetensors dtype name). Raises UnsupportedTensorError for what cannot be cut by rows."""

    def whole(self, array: Array) -> Array:
        """The tensor itself, or a contiguous copy if it is a window of a larger storage."""

    def empty(self, shape: tuple[int, ...], like: Array) -> Array:
        """Uninitialised memory of `like`'s dtype and device."""

    def copy(self, out: Array, source: Array, run: Run) -> None:
        """Copy a run of row blocks, bit for bit."""

    def from_bytes(self, data: bytes, shape: tuple[int, ...], like: Array) -> Array:
        """An fp32 tensor of these little-endian bytes, on `like`'s device."""

    def to_bytes(self, array: Array) -> bytes | None:
        """Its bytes; None if it has no values (meta)."""


class _Torch:
    """torch.Tensor on any device; subclasses that redirect operations (DTensor) are refused."""

    def __init__(self) -> None:
        self.torch = sys.modules["torch"]

    def describe(self, array: Array) -> tuple[tuple[int, ...], str]:
        kind = type(array).__name__
        if kind == "DTensor":
            raise UnsupportedTensorError(
                "a DTensor holds one rank's shard; pass full_tensor(), or map the shards by rank"
            )
        if array.layout is not self.torch.strided or array.is_quantized:
            raise UnsupportedTensorError(
                f"a {kind} of layout {array.layout} has no rows to move; pass dense tensors"
            )
        return tuple(array.shape), _safe_name(str(array.dtype).removeprefix("torch."))

    def whole(self, array: Array) -> Array:
        window = array.untyped_storage().nbytes() > array.numel() * array.element_size()
        return array.detach().clone(memory_format=self.torch.contiguous_format) if window else array

    def empty(self, shape: tuple[int, ...], like: Array) -> Array:
        return self.torch.empty(shape, dtype=like.dtype, device=like.device)

    def copy(self, out: Array, source: Array, run: Run) -> None:
        with self.torch.no_grad():
            _strided_torch(out, run.row, run.row_step, run).copy_(
                _strided_torch(source, run.start, run.step, run)
            )

    def from_bytes(self, data: bytes, shape: tuple[int, ...], like: Array) -> Array:
        made = self.torch.frombuffer(bytearray(data), dtype=self.torch.float32).reshape(shape)
        return made.to(like.device)

    def to_bytes(self, array: Array) -> bytes | None:
        if array.device.type == "meta":
            return None
        values = array.detach().to("cpu").contiguous().view(self.torch.uint8)
        return bytes(values.flatten().tolist())


class _Numpy:
    """numpy.ndarray. numpy has no bfloat16: ml_dtypes' is taken, and uint16 as raw bits."""

    def __init__(self) -> None:
        self.numpy = sys.modules["numpy"]

    def describe(self, array: Array) -> tuple[tuple[int, ...], str]:
        name = array.dtype.name
        return tuple(array.shape), "BF16" if name == "uint16" else _safe_name(name)

    def whole(self, array: Array) -> Array:
        window = not array.flags.c_contiguous or (
            array.base is not None and _extent(array.base) > array.nbytes
        )
        return array.copy() if window else array

    def empty(self, shape: tuple[int, ...], like: Array) -> Array:
        return self.numpy.empty(shape, dtype=like.dtype)

    def copy(self, out: Array, source: Array, run: Run) -> None:
        strided = self.numpy.lib.stride_tricks.as_strided
        views = []
        for array, first, step in ((out, run.row, run.row_step), (source, run.start, run.step)):
            shape = (run.count, run.length, *array.shape[1:])
            strides = (step * array.strides[0], *array.strides)
            views.append(strided(array[first:], shape, strides, writeable=array is out))
        self.numpy.copyto(*views)

    def from_bytes(self, data: bytes, shape: tuple[int, ...], like: Array) -> Array:
        return self.numpy.frombuffer(bytearray(data), dtype="<f4").reshape(shape)

    def to_bytes(self, array: Array) -> bytes | None:
        return bytes(array.tobytes())


def _strided_torch(array: Array, first: int, step: int, run: Run) -> Array:
    """[count, length, *row] view: blocks of `length` rows every `step` rows from `first` on."""
    strides = array.stride()
    return array.as_strided(
        (run.count, run.length, *array.shape[1:]),
        (step * strides[0], *strides),
        array.storage_offset() + first * strides[0],
    )


def _extent(base: Any) -> int:
    """Bytes of what an array's memory belongs to; unknown owners count as large."""
    return int(getattr(base, "nbytes", sys.maxsize))


def _safe_name(dtype: str) -> str:
    return _DTYPES.get(dtype, dtype)


def backend(array: Array) -> Backend:
    """The backend of an array. Raises UnsupportedTensorError for anything but torch and numpy."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(array, numpy.ndarray):
        return _Numpy()
    if torch is not None and isinstance(array, torch.Tensor):
        return _Torch()
    raise UnsupportedTensorError(f"a {type(array).__name__} is neither a torch.Tensor nor a numpy.ndarray")
