"""CUDA kernels of `nodes.swiglu`: silu(gate) * value, elementwise in fp32 with one rounding, so no order to fix.

exp and the division are the device's fast ones (2 ulp in fp32, 2**-15 of a bf16 rounding). gate and value are two
views, so the halves of one projection may come in either order: [gate; value] as vLLM-Omni's fc1, [value; gate] as
Diffusers'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from h3_kernels.triton.rows import launcher

if TYPE_CHECKING:
    from torch import Tensor

OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
BLOCK = 1024
"""Columns of one program: 128 threads of 16 bytes. 14336 = 14 blocks, and 14336 / 8 = 1.75 blocks at tp 8."""


@triton.jit
def swiglu_kernel(
    y_ptr, gate_ptr, value_ptr, y_stride, gate_stride, value_stride, COLS: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK columns of one row."""
    blocks = tl.cdiv(COLS, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    live = columns < COLS
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=live, other=0.0).to(tl.float32)
    value = tl.load(value_ptr + row * value_stride + columns, mask=live, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    tl.store(y_ptr + row * y_stride + columns, (gate * s * value).to(y_ptr.dtype.element_ty), mask=live)


@triton.jit
def swiglu_backward_kernel(
    dgate_ptr, dvalue_ptr, dy_ptr, gate_ptr, value_ptr,
    dgate_stride, dvalue_stride, dy_stride, gate_stride, value_stride, COLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one row."""
    blocks = tl.cdiv(COLS, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    live = columns < COLS
    dy = tl.load(dy_ptr + row * dy_stride + columns, mask=live, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=live, other=0.0).to(tl.float32)
    value = tl.load(value_ptr + row * value_stride + columns, mask=live, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    dgate = dy * value * (s * (1.0 + gate * (1.0 - s)))
    dvalue = dy * (gate * s)
    tl.store(dgate_ptr + row * dgate_stride + columns, dgate.to(dgate_ptr.dtype.element_ty), mask=live)
    tl.store(dvalue_ptr + row * dvalue_stride + columns, dvalue.to(dvalue_ptr.dtype.element_ty), mask=live)


@launcher
def launch_swiglu(gate: Tensor, value: Tensor) -> Tensor:
    """See `nodes.swiglu.swiglu`."""
    rows, columns = gate.shape
    y = torch.empty((rows, columns), dtype=gate.dtype, device=gate.device)
    if y.numel():
        swiglu_kernel[(triton.cdiv(columns, BLOCK) * rows,)](
            y, gate, value, y.stride(0), gate.stride(0), value.stride(0), COLS=columns, BLOCK=BLOCK, **OPTIONS
        )
    return y


@launcher
def launch_swiglu_backward(
    dy: Tensor, gate: Tensor, value: Tensor, *, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of (gate, value)."""
    rows, columns = gate.shape
    dgate, dvalue = _gradients(gate, value)
    if dy.numel():
        swiglu_backward_kernel[(triton.cdiv(columns, BLOCK) * rows,)](
            dgate, dvalue, dy, gate, value,
            dgate.stride(0), dvalue.stride(0), dy.stride(0), gate.stride(0), value.stride(0),
            COLS=columns, BLOCK=BLOCK, **OPTIONS,
        )  # fmt: skip
    return dgate if needs[0] else None, dvalue if needs[1] else None


def _gradients(gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Room for both gradients; side by side, in the same order, where gate and value are halves of one tensor.

    `nodes.column_blocks` then takes the whole as the projection's gradient without copying.
    """
    rows, columns = gate.shape
    apart = int(value.storage_offset()) - int(gate.storage_offset())
    one = gate.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    if not one or abs(apart) != columns or gate.stride(0) != 2 * columns or value.stride(0) != 2 * columns:
        return torch.empty_like(gate), torch.empty_like(value)
    both = torch.empty((rows, 2 * columns), dtype=gate.dtype, device=gate.device)
    first, second = both.chunk(2, dim=1)
    return (first, second) if apart > 0 else (second, first)
