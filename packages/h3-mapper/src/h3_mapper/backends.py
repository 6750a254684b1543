"""The five things a plan does to a tensor, for torch and for numpy. Neither is imported unless it is used."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, Protocol, TypeAlias

from h3_mapper.errors import UnsupportedTensorError
from h3_mapper.host_copy import SMALL, Blocks, copy_blocks
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

    def copy(self, out: Array, source: Array, run: Run, *, fresh: bool = False) -> None:
        """Copy a run of row blocks, bit for bit. fresh: `out` is of `empty` and nothing was written into it yet."""

    def from_bytes(self, data: bytes, shape: tuple[int, ...], like: Array) -> Array:
        """An fp32 tensor of these little-endian bytes, on `like`'s device."""

    def to_bytes(self, array: Array) -> bytes | None:
        """Its bytes; None if it has no values (meta)."""


WIDE = (("complex128", 16), ("int64", 8), ("int32", 4))
"""dtypes through which spaced blocks of rows are copied, and their bytes: torch copies those an element at a time.

Measured on one H200, heads into grouped rows, TB/s: bf16 1.70, int32 2.65, int64 3.49, complex128 3.63; a plain copy
3.89. A rank's columns of fc2 take the same time at every width (19 MB: 1.9 to 2.0 TB/s), so those are left alone.
"""


class _Torch:
    """torch.Tensor on any device; subclasses that redirect operations (DTensor) are refused."""

    def __init__(self) -> None:
        self.torch = sys.modules["torch"]
        self._names = {
            kind: _safe_name(name)
            for name in dir(self.torch)
            if isinstance(kind := getattr(self.torch, name), self.torch.dtype)
            and str(kind) == f"torch.{name}"
        }
        self._wide = [(getattr(self.torch, name), nbytes) for name, nbytes in WIDE]

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
        return tuple(array.shape), self._names[array.dtype]

    def whole(self, array: Array) -> Array:
        window = array.untyped_storage().nbytes() > array.numel() * array.element_size()
        return array.detach().clone(memory_format=self.torch.contiguous_format) if window else array

    def empty(self, shape: tuple[int, ...], like: Array) -> Array:
        return self.torch.empty(shape, dtype=like.dtype, device=like.device)

    def copy(self, out: Array, source: Array, run: Run, *, fresh: bool = False) -> None:
        out = out.detach() if out.requires_grad else out
        source = source.detach() if source.requires_grad else source
        # A page's first write zeroes it in the cache, where torch's copy finds it and memmove's stores pass it by:
        # 3.5 against 2.7 GB/s into new memory, on two cores.
        if out.is_cpu and not fresh and self._copied_on_host(out, source, run):
            return
        if run.count == 1:
            out = _rows_torch(out, run.row, run.length)
            source = _rows_torch(source, run.start, run.length)
        else:
            out, source = self._widest(out, source)
            out = _strided_torch(out, run.row, run.row_step, run)
            source = _strided_torch(source, run.start, run.step, run)
        out.copy_(source)

    def _copied_on_host(self, out: Array, source: Array, run: Run) -> bool:
        """Whether memmove did it: whole rows, contiguous on both sides, in blocks that are worth a call."""
        row = out[:1].nbytes
        if run.length * row < SMALL or not source.is_cpu:
            return False
        if out.dtype != source.dtype or not (out.is_contiguous() and source.is_contiguous()):
            return False
        out[:0].zero_()  # what autograd saved of `out` is out of date now
        rows = (out.data_ptr() + run.row * row, run.row_step * row, source.data_ptr() + run.start * row)
        blocks = Blocks(*rows, run.step * row, run.length * row, run.count)
        copy_blocks(blocks, self.torch.get_num_threads())
        return True

    def _widest(self, out: Array, source: Array) -> tuple[Array, Array]:
        """Both as the widest elements that their rows consist of: the same bytes in fewer, wider loads and stores."""
        item = out.element_size()
        if out.dim() > 1 and out.dtype == source.dtype:
            for kind, nbytes in self._wide:
                if nbytes > item and _divides(out, nbytes, item) and _divides(source, nbytes, item):
                    return out.view(kind), source.view(kind)
        return out, source

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

    def copy(self, out: Array, source: Array, run: Run, *, fresh: bool = False) -> None:
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


def _rows_torch(array: Array, first: int, length: int) -> Array:
    """Rows [first, first + length); the array itself, if those are all."""
    return array if array.shape[0] == length else array[first : first + length]


def _divides(array: Array, nbytes: int, item: int) -> bool:
    """Whether every row of the array is whole elements of `nbytes` bytes, aligned to them."""
    times, (*steps, inner) = nbytes // item, array.stride()
    if inner != 1 or array.shape[-1] % times or array.data_ptr() % nbytes or array.storage_offset() % times:
        return False
    return not any(step % times for step in steps)


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


@cache
def _torch_backend() -> Backend:
    return _Torch()


@cache
def _numpy_backend() -> Backend:
    return _Numpy()


def backend(array: Array) -> Backend:
    """The backend of an array. Raises UnsupportedTensorError for anything but torch and numpy."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _torch_backend()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, numpy.ndarray):
        return _numpy_backend()
    raise UnsupportedTensorError(f"a {type(array).__name__} is neither a torch.Tensor nor a numpy.ndarray")
