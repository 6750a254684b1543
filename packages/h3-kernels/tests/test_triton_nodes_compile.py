"""Every node kernel compiles ahead of time on a CPU, for Hopper and Blackwell, and its code keeps the promises.

No atomic anywhere; no fused multiply-add in the row kernels; 16-byte loads and stores of bf16 rows; tensor-core
products and bulk copies in attention, without register spills.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted in this process"
)
HEAD = 128
ROW = {"COLS": 5376, "CHUNK": 2048, "CHUNKS": 3, "LEVELS": 11}
FORWARD = ROW | {"STORE_LAST": True}
HEADS = {"D": HEAD, "HALF": 48, "HEADS": 8}


@dataclass(frozen=True)
class Case:
    """A kernel, its compile-time arguments and launch options; pointers are bf16 unless named in `types`."""

    module: str
    kernel: str
    constants: dict[str, object]
    warps: int
    stages: int = 1
    types: dict[str, str] = field(default_factory=dict)
    spills: bool = False


def attention_cases() -> list[Case]:
    from h3_kernels.triton import attention
    from h3_kernels.triton import attention_backward as backward

    fp32 = {name: "*fp32" for name in ("lse_ptr", "delta_ptr")} | {"bound_ptr": "*i32"}
    tiles: dict[str, tuple[dict[str, object], dict[str, int]]] = {
        "dkdv_kernel": ({"STORE": True}, backward.DKDV_TILE),
        "dq_kernel": ({"SLOT": backward.DKDV_TILE["KEYS"]}, backward.DQ_TILE),
        "recomputed_dq_kernel": ({}, backward.RECOMPUTED_DQ_TILE),
    }
    warps, stages = attention.OPTIONS["num_warps"], attention.OPTIONS["num_stages"]
    forward: dict[str, object] = {"D": HEAD, "ROWS": attention.ROWS, "KEYS": attention.KEYS}
    cases = [Case("attention", "attention_kernel", forward, warps, stages, fp32)]
    for kernel, (constants, tile) in tiles.items():
        shape = {"D": HEAD, "ROWS": tile["ROWS"], "KEYS": tile["KEYS"]}
        case = Case(
            "attention_backward", kernel, constants | shape, tile["num_warps"], tile["num_stages"], fp32
        )
        cases.append(case)
    return cases


def row_cases() -> list[Case]:
    on, off = {"MODULATED": True}, {"MODULATED": False}
    terms = {"weight_term_ptr": "*fp32", "scale_term_ptr": "*fp32"}
    backward = {"RESIDUAL": True, "WEIGHT_TERM": True, "SCALE_TERM": True}
    plain = dict.fromkeys(backward, False)
    return [
        Case("rms_norm", "rms_norm_kernel", off | FORWARD, 8),
        Case("rms_norm", "rms_norm_kernel", on | FORWARD, 8),
        Case("rms_norm", "rms_norm_kernel", on | ROW | {"STORE_LAST": False}, 4),
        Case("rms_norm", "rms_norm_backward_kernel", off | plain | ROW, 4, types=terms),
        Case("rms_norm", "rms_norm_backward_kernel", on | backward | ROW, 4, types=terms),
        Case("gated_residual", "gated_residual_kernel", {"RESIDUAL": True, "GATED": True} | ROW, 4),
        Case("gated_residual", "gated_residual_kernel", {"RESIDUAL": True, "GATED": False} | ROW, 4),
        Case("gated_residual", "gated_residual_norm_kernel", FORWARD, 8),
        Case("qk_norm_rope", "qk_norm_rope_kernel", HEADS, 1),
        Case("qk_norm_rope", "qk_norm_rope_kernel", HEADS | {"HALF": 0}, 1),
        Case("qk_norm_rope", "qk_norm_rope_backward_kernel", HEADS | {"Q_TERM": False, "K_TERM": False}, 1),
        Case("swiglu", "swiglu_kernel", {"COLS": 14336, "BLOCK": 1024}, 4),
        Case("swiglu", "swiglu_backward_kernel", {"COLS": 14336, "BLOCK": 1024}, 4),
    ]


OTHER_CASES = [
    Case(
        "attention_backward", "delta_kernel", {"D": HEAD, "HEADS": 8, "LEVELS": 7}, 4, types={"delta_ptr": "*fp32"}
    ),
    Case("lora", "lora_expand_kernel", {"RANK": 64, "ROWS": 128, "COLS": 128}, 8),
    Case(
        "sum_rows", "sum_rows_kernel", {"GATHER": True, "BLOCK_ROWS": 128, "BLOCK_COLS": 32, "LEVELS": 7}, 4,
        types={"x_ptr": "*fp32", "out_ptr": "*fp32", "position_ptr": "*i64", "bound_ptr": "*i64"},
    ),
]  # fmt: skip


def block(case: Case, descriptor: str) -> tuple[object, object]:
    """Shape of the block a descriptor argument moves."""
    rows, keys = case.constants["ROWS"], case.constants["KEYS"]
    return {"ds_desc": (keys, rows), "q_desc": (rows, HEAD), "dout_desc": (rows, HEAD)}.get(
        descriptor, (keys, HEAD)
    )


def compile_case(case: Case, capability: int, fusion: bool = False) -> str:
    """PTX of the kernel for `sm_<capability>`; `fusion` lets the compiler contract, as no launcher does."""
    import importlib

    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"h3_kernels.triton.{case.module}"), case.kernel)

    def kind(name: str) -> str:
        if name in case.constants:
            return "constexpr"
        if name in case.types:
            return case.types[name]
        if name.endswith("_desc"):
            return f"tensordesc<bf16[{', '.join(map(str, block(case, name)))}]>"
        if name.startswith(("eps", "scale_log2")) or name in {"scale", "zero"}:
            return "fp32"
        return {"index_ptr": "*i64"}.get(name, "*bf16" if name.endswith("_ptr") else "i32")

    signature = {name: kind(name) for name in kernel.arg_names}
    aligned = [
        i
        for i, n in enumerate(kernel.arg_names)
        if signature[n][0] == "*" or "stride" in n or "_row" in n or "_head" in n
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=case.constants,
        attrs={
            (i,): [["tt.divisibility", 16]] for i in aligned if signature[kernel.arg_names[i]] != "constexpr"
        },
    )
    options = {"num_warps": case.warps, "num_stages": case.stages, "enable_fp_fusion": fusion}
    ptx: str = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    return ptx


def spilled_bytes(ptx: str, capability: int, tmp_path: Path) -> int:
    """Bytes ptxas spills to local memory."""
    ptxas = (
        Path(triton.__file__).parent
        / "backends/nvidia/bin"
        / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    )
    source = tmp_path / "kernel.ptx"
    source.write_text(ptx)
    command = [
        str(ptxas),
        "-v",
        "--fmad=false",
        f"--gpu-name=sm_{capability}a",
        str(source),
        "-o",
        "/dev/null",
    ]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", report))


def fused(ptx: str) -> int:
    """Number of fused fp32 multiply-adds."""
    return len(re.findall(r"\bfma\.rn(?:\.ftz)?\.f32", ptx))


def identify(case: Case) -> str:
    flags = [k.lower() for k, v in case.constants.items() if v is True]
    return "-".join([case.kernel, *flags])


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("case", row_cases(), ids=identify)
def test_row_kernels_round_every_operation_and_move_16_bytes(
    case: Case, capability: int, tmp_path: Path
) -> None:
    ptx = compile_case(case, capability)
    assert not re.findall(r"\b(atom|red)\.", ptx)
    assert not fused(ptx)
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx)
    assert re.search(r"st\.global\S*\.v4\.b32", ptx)
    assert spilled_bytes(ptx, capability, tmp_path) <= 16  # a register around the slow path of a division


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("case", attention_cases(), ids=identify)
def test_attention_uses_tensor_cores_and_bulk_copies_and_no_atomic(
    case: Case, capability: int, tmp_path: Path
) -> None:
    ptx = compile_case(case, capability)
    assert not re.findall(r"\b(atom|red)\.", ptx)
    assert ("wgmma.mma_async" if capability == 90 else "tcgen05.mma") in ptx
    assert "cp.async.bulk.tensor" in ptx
    if capability == 90:
        assert "mma.sync" not in ptx
        assert spilled_bytes(ptx, capability, tmp_path) <= 64  # Triton 3.6 spills nothing, 3.7 five registers


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("case", OTHER_CASES, ids=identify)
def test_other_kernels_use_no_atomic(case: Case, capability: int) -> None:
    assert not re.findall(r"\b(atom|red)\.", compile_case(case, capability))


def test_contraction_would_be_seen() -> None:
    """Negative twin: the same kernel compiled with contraction has fused multiply-adds."""
    case = row_cases()[1]
    assert fused(compile_case(case, 90, fusion=True)) > 0 == fused(compile_case(case, 90))
