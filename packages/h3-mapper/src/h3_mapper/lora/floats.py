"""fp32 arithmetic on bf16, fp16 and fp32 bytes with numpy alone: widen exactly, round once to nearest even."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from h3_mapper.lora.arrays import Raw
from h3_mapper.lora.errors import MissingExtraError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Float32 = NDArray[np.float32]


def numpy(purpose: str) -> ModuleType:
    """The numpy module. Raises MissingExtraError naming what needs it."""
    try:
        import numpy as found
    except ModuleNotFoundError:
        raise MissingExtraError(f"{purpose} needs numpy: pip install numpy") from None
    return found


_STORED = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


def widen(tensor: Raw) -> Float32:
    """Values as fp32, in the tensor's shape. Exact for BF16, F16 and F32; F64 is rounded."""
    np = numpy("arithmetic on adapters")
    if tensor.dtype == "BF16":
        bits = np.frombuffer(tensor.data, "<u2").astype("<u4")
        bits <<= 16
        return bits.view("<f4").reshape(tensor.shape)  # type: ignore[no-any-return]
    stored = np.frombuffer(tensor.data, _STORED[tensor.dtype]).reshape(tensor.shape)
    return stored.astype("<f4")  # type: ignore[no-any-return]


def narrow(values: Float32, dtype: str) -> Raw:
    """fp32 values rounded once to `dtype`, to nearest, ties to even; NaN stays NaN, overflow becomes infinity."""
    np = numpy("arithmetic on adapters")
    shape = tuple(values.shape)
    if dtype != "BF16":
        with np.errstate(over="ignore"):
            return Raw(dtype, shape, np.ascontiguousarray(values).astype(_STORED[dtype]).tobytes())
    bits = np.ascontiguousarray(values, "<f4").view("<u4").reshape(-1)
    half = bits >> 16
    half &= 1
    half += 0x7FFF
    half += bits
    half >>= 16
    out = half.astype("<u2")
    broken = np.isnan(values).reshape(-1)
    if broken.any():
        out[broken] = (bits[broken] >> 16) | 0x40
    return Raw(dtype, shape, out.tobytes())
