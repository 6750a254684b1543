"""bf16 in Triton's interpreter, repaired, and random bf16 inputs: for the suites that run there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="module", autouse=True)
def bf16_arithmetic() -> None:
    """Repair bf16 in the interpreter: as shipped (3.6, 3.7) it truncates casts and multiplies bit patterns in dot."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    stock_cast, stock_fp, stock_dot = builder.cast_impl, builder.create_fp_to_fp, builder.create_dot

    def widen(bits: np.ndarray) -> np.ndarray:
        return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)

    def narrow(x: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)

    def cast(self, source, target):  # type: ignore[no-untyped-def]
        pair = (source.dtype.scalar, target.scalar)
        if pair == (tl.bfloat16, tl.float32):
            return handle(widen(source.data), tl.float32)
        if pair == (tl.float32, tl.bfloat16):
            return handle(narrow(source.data), tl.bfloat16)
        return stock_cast(self, source, target)

    def fp_to_fp(self, source, target, mode):  # type: ignore[no-untyped-def]
        if {source.dtype.scalar, target.scalar} == {tl.bfloat16, tl.float32}:
            return cast(self, source, target)
        return stock_fp(self, source, target, mode)

    def dot(self, a, b, acc, precision, terms):  # type: ignore[no-untyped-def]
        a, b = (handle(widen(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return stock_dot(self, a, b, acc, precision, terms)

    builder.cast_impl, builder.create_fp_to_fp, builder.create_dot = cast, fp_to_fp, dot


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)
