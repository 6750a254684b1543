"""The CUDA kernels of SiLU and of the angle tables: the CPU's bits in the interpreter, no contraction when compiled."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from h3_kernels.nodes import _elementary as written
from interpreter import assert_passes_interpreted

triton = pytest.importorskip("triton")
SUITE = Path(__file__).with_name("nodes_elementary_interpreted.py")
KERNELS = {
    "silu_kernel": ({"y_ptr": "*fp32", "x_ptr": "*fp32"}, {}, ("_EXP", "_LN2_HIGH", "_LN2_LOW")),
    "silu_backward_kernel": ({"dx_ptr": "*fp32", "dy_ptr": "*fp32", "x_ptr": "*fp32"}, {}, ("_EXP",)),
    "angle_table_kernel": (
        {"out_ptr": "*bf16", "values_ptr": "*fp32", "frequencies_ptr": "*fp32"},
        {"AXES": 3, "COUNT": 16},
        ("_SIN", "_COS", "_HALF_PI", "_TWO_OVER_PI"),
    ),
}


def test_kernels_have_the_written_bits_in_the_interpreter():
    assert_passes_interpreted(SUITE)


@pytest.mark.parametrize("kernel", KERNELS)
def test_compiled_kernels_keep_every_float64_constant_and_contract_nothing(kernel):
    from h3_kernels.triton import elementary
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    types, constants, used = KERNELS[kernel]
    signature = types | {"total": "i32", "BLOCK": "constexpr"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(getattr(elementary, kernel), signature, constants | {"BLOCK": elementary.BLOCK})
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options=dict(elementary.OPTIONS)).asm["ptx"]
    assert "fma.rn" not in ptx
    assert ".approx" not in ptx
    for value in np.hstack([getattr(written, name) for name in used]).tolist():
        bits = [struct.pack(">d", v).hex().upper() for v in (value, -value)]
        assert any(f"0d{b}" in ptx for b in bits) or value == 1.0, (
            f"{value!r} is not a float64 constant of {kernel}"
        )
