"""The bitwise assertion: raw bytes, so +0 and -0 differ and equal NaNs are equal."""

import torch
from torch import Tensor

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def count_differing(a: Tensor, b: Tensor) -> int:
    """Number of elements whose bytes differ. Raises AssertionError unless shapes and dtypes are equal."""
    return int(_differing(a, b, "").sum())


def assert_bitwise_equal(a: Tensor, b: Tensor, context: str = "") -> None:
    """Raise AssertionError unless a and b have the same shape, dtype and bytes.

    The message gives how many elements differ, the coordinate of the first, both values and both bit patterns.
    """
    differing = _differing(a, b, context)
    count = int(differing.sum())
    if count == 0:
        return
    first = tuple(int(i) for i in differing.nonzero()[0])
    left, right = a.detach().cpu()[first], b.detach().cpu()[first]
    raise AssertionError(
        f"{_prefix(context)}{count} of {differing.numel()} elements differ, first at {list(first)}: "
        f"{left.item()!r} ({_hex(left)}) and {right.item()!r} ({_hex(right)})"
    )


def _differing(a: Tensor, b: Tensor, context: str) -> Tensor:
    if a.shape != b.shape or a.dtype != b.dtype:
        raise AssertionError(
            f"{_prefix(context)}shapes or dtypes differ: {list(a.shape)} {a.dtype}, {list(b.shape)} {b.dtype}"
        )
    return (_bits(a) != _bits(b)).cpu()


def _bits(t: Tensor) -> Tensor:
    return t.detach().contiguous().view(_INTEGER[t.element_size()])


def _hex(value: Tensor) -> str:
    width = value.element_size() * 2
    return f"0x{int(_bits(value)) & (16**width - 1):0{width}x}"


def _prefix(context: str) -> str:
    return f"{context}: " if context else ""
