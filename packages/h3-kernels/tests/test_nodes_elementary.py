"""The CUDA kernels of SiLU and of the angle tables: the CPU's bits in the interpreter, no contraction when compiled."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from h3_kernels.nodes import _elementary as written

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
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(SUITE)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]
    assert "skipped" not in child.stdout


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
