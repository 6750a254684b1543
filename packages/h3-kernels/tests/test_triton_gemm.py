"""The Triton GEMM without a GPU: interpreted in a child process, compiled ahead of time for Hopper and Blackwell."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from h3_kernels import tuning
from interpreter import assert_passes_interpreted

pytest.importorskip("triton")
SUITE = Path(__file__).with_name("triton_gemm_interpreted.py")
SHARED_BLOCK = 232448
TILES = {
    "large": (tuning.TRITON_LARGE, (1,), "bf16"),
    "fp32 result": (tuning.TRITON_FP32_RESULT, (1, 8), "fp32"),
    "small, fc1": (tuning.triton_tile(70, 28672, 1, fp32=False, fp32_result=False), (1,), "bf16"),
    "small, qkv_proj": (tuning.triton_tile(70, 21504, 1, fp32=False, fp32_result=False), (1,), "bf16"),
    "small, fp32 result": (tuning.triton_tile(70, 21504, 1, fp32=False, fp32_result=True), (1, 8), "fp32"),
    "narrow": (tuning.triton_tile(70, 512, 1, fp32=False, fp32_result=True), (1, 8), "fp32"),
    "plain": (tuning.TRITON_PLAIN, (1, 8), "bf16"),
}


def test_in_the_interpreter() -> None:
    assert_passes_interpreted(SUITE)


def compiled(tile, units, out, capability, *, tma=True, transposed=(False, False), operand="bf16"):
    from h3_kernels.triton.gemm import gemm_kernel
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    a_t, b_t = transposed
    tail = tile.tail if tma and units == 1 else 0
    constants = {
        "UNITS": units, "TMA": tma, "A_T": a_t, "B_T": b_t, "BIAS": False, "BM": tile.m, "BN": tile.n, "BK": tile.k,
        "TAIL": tail, "BAND": tile.band, "PROGRAMS": 132 if tile.persistent else 0, "FLATTEN": tile.flatten,
    }  # fmt: skip

    def operand_type(rows, across):
        return (
            f"tensordesc<{operand}{[tile.k, rows] if across else [rows, tile.k]}>" if tma else f"*{operand}"
        )

    def result(columns):
        return (
            f"tensordesc<{out}{[tile.m, columns]}>"
            if tma and units == 1
            else f"*{'fp32' if units > 1 else out}"
        )

    signature = {
        "a": operand_type(tile.m, a_t), "b": operand_type(tile.n, b_t), "y": result(tile.n),
        "b_tail": operand_type(tail or tile.n, b_t), "y_tail": result(tail or tile.n), "bias": f"*{out}",
        **dict.fromkeys(("M", "N", "K", "a_stride", "b_stride", "n_tail"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }  # fmt: skip
    aligned = [
        i
        for i, kind in enumerate(list(signature.values())[:12])
        if i != 6 and not kind.startswith("tensordesc")
    ]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(fn=gemm_kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("name", TILES)
def test_hopper_code_uses_wgmma_fits_and_does_not_spill(name):
    """Bits rest on one instruction, wgmma: a tile that fell back to an older one would have another order in a step."""
    tile, unit_counts, out = TILES[name]
    for units, tma in itertools.product(unit_counts, (True, False)):
        kernel = compiled(tile, units, out, 90, tma=tma)
        code = kernel.asm["ptx"]
        assert "wgmma.mma_async" in code
        assert "mma.sync" not in code
        assert ".spill" not in code
        assert ("cp.async.bulk.tensor" in code) == tma
        assert kernel.metadata.shared <= SHARED_BLOCK


@pytest.mark.parametrize("transposed", [(False, True), (True, True)], ids=["dX", "dW"])
def test_backward_layouts_compile(transposed):
    assert "wgmma.mma_async" in compiled(tuning.TRITON_LARGE, 1, "bf16", 90, transposed=transposed).asm["ptx"]


def test_a_tile_too_wide_for_fp32_results_is_known():
    """The twin of the limit above: 256 columns do not fit with fp32 results, which is why tuning narrows them."""
    assert compiled(tuning.TRITON_LARGE, 1, "fp32", 90).metadata.shared > SHARED_BLOCK
    for units, fp32_result in ((8, False), (1, True)):
        assert tuning.triton_tile(925, 5376, units, fp32=False, fp32_result=fp32_result).n <= 128


def test_few_rows_take_the_widest_tile_that_makes_enough_programs():
    small = [
        (tile.n, tile.k)
        for tile in (
            tuning.triton_tile(70, n, 1, fp32=False, fp32_result=False) for n in (28672, 21504, 10752, 5376)
        )
    ]
    assert small == [(256, 64), (256, 32), (128, 64), (64, 64)]
    assert tuning.triton_tile(70, 5376, 8, fp32=False, fp32_result=False).n == 128  # units are programs too


@pytest.mark.parametrize(
    "tile", [tile for _, tile in tuning.TRITON_FP32], ids=lambda tile: f"{tile.m}x{tile.n}"
)
def test_fp32_operands_use_no_tensor_cores(tile):
    code = compiled(tile, 1, "fp32", 90, tma=False, operand="fp32").asm["ptx"]
    assert "fma.rn.f32" in code
    assert "mma" not in code.replace("gemm_kernel", "")


def test_blackwell_code_compiles():
    assert "tcgen05.mma" in compiled(tuning.TRITON_FP32_RESULT, 1, "bf16", 100).asm["ptx"]
