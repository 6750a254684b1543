"""The CUDA extension without a GPU: it builds for both targets, its machine code keeps the promises, its plans fit.

nvcc is part of the test environment (CI compiles sm_90a and sm_100a); running the kernels is the gpu tests' part.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from h3_kernels import extension, fused, tuning
from h3_kernels.extension import ExtensionError, Gemm, Library

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
CONFIGURATIONS = len({tile.key for tile in (*tuning.FUSED, *tuning.FUSED_SMALL)})
SPILL_LIMIT = 120  # bytes: a few words once a tile beside the tree of the widest tiles, none in any loop


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The sm_90a library and what ptxas said of it."""
    out = tmp_path_factory.mktemp("extension") / "h3.so"
    command = extension.command(extension.nvcc(), (9, 0), out, ("-Xptxas", "-v"))
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return out, done.stdout + done.stderr


@pytest.fixture(scope="module")
def library(hopper: tuple[Path, str]) -> Library:
    return Library(hopper[0])


@needs_nvcc
def test_ptxas_serialises_nothing_and_keeps_fragments_in_registers(hopper):
    log = hopper[1]
    assert "serialized" not in log  # C7510 and its kin: wgmma would run one at a time
    assert "C7508" not in log  # setmaxnreg ignored
    spills = [int(size) for size in re.findall(r"(\d+) bytes spill stores", log)]
    # The reduction is compiled for 1, 2, 4 and 8 units, the fp32 GEMM for three tiles.
    assert len(spills) == CONFIGURATIONS + 4 + len(tuning.FMA)
    assert max(spills) <= SPILL_LIMIT


@needs_nvcc
def test_machine_code_multiplies_on_tensor_cores_alone(hopper):
    """HGMMA with fp32 accumulation, and no fused multiply-add: every sum of the tree is an add of its own.

    The fp32 GEMM alone is a chain of them.
    """
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    code = subprocess.run(
        [tool, "-sass", hopper[0]], capture_output=True, text=True, check=True, timeout=300
    ).stdout
    kernels = {part.split("\n")[0]: part for part in code.split("Function : ")[1:]}
    fused_kernels = [text for name, text in kernels.items() if "tree_gemm" in name]
    assert len(fused_kernels) == CONFIGURATIONS
    for text in fused_kernels:
        assert re.search(r"HGMMA\.64x\d+x16\.F32\.BF16", text)
        assert "HMMA" not in text
        assert not re.search(r"\bATOM[GS]?\.|\bREDG?\.E", text)  # no sum depends on arrival
    chains = {name for name, text in kernels.items() if "FFMA" in text}
    assert len(chains) == len(tuning.FMA)
    assert all("fma_gemm" in name for name in chains)


@needs_nvcc
def test_blackwell_gets_the_reduction_and_the_fp32_gemm(tmp_path, monkeypatch):
    monkeypatch.setenv("H3_KERNELS_CACHE", str(tmp_path))
    built = extension.build((10, 0))
    written = built.stat().st_mtime_ns
    assert extension.build((10, 0)) == built
    assert built.stat().st_mtime_ns == written  # from the cache
    assert not Library(built).has_gemm


@needs_nvcc
def test_a_failing_compiler_is_quoted_and_leaves_nothing_behind(tmp_path, monkeypatch):
    sources = tmp_path / "csrc"
    shutil.copytree(extension.SOURCES, sources)
    (sources / "tree_reduce.cu").write_text("int broken( { return 0; }\n")
    monkeypatch.setattr(extension, "SOURCES", sources)
    monkeypatch.setenv("H3_KERNELS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ExtensionError, match="failed with code") as caught:
        extension.build((10, 0))
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("*.so"))


def test_without_nvcc_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ExtensionError, match="H3_NVCC"):
        extension.nvcc()


def test_an_unknown_device_is_named(tmp_path):
    with pytest.raises(ExtensionError, match=r"capability 8\.0; there are for 9\.0, 10\.0"):
        extension.command("nvcc", (8, 0), tmp_path / "x.so")


@needs_nvcc
def test_every_tile_of_the_tuning_table_is_compiled(library):
    compiled = [fused._key(config) for config in library.configs]
    assert len(compiled) == len(set(compiled))
    assert {tile.key for tile in (*tuning.FUSED, *tuning.FUSED_SMALL)} == set(compiled)
    assert max(config.shared_bytes for config in library.configs) <= 232448


@pytest.fixture
def planned(library, monkeypatch):
    """plan() on a device of 132 multiprocessors."""

    def clusters(config: int) -> int:
        return 132 // (library.configs[config].cluster * library.configs[config].halves)

    monkeypatch.setattr(library, "clusters", clusters)
    monkeypatch.setattr(extension, "load", lambda capability: library)
    fused.plan.cache_clear()
    yield fused.plan
    fused.plan.cache_clear()


@needs_nvcc
@pytest.mark.parametrize("rows", [1, 16, 17, 70, 128, 129, 300, 925, 2048, 8349, 37710])
def test_every_h3_call_has_a_plan_within_the_scratch_limit(planned, rows):
    n_k_units = [
        (5376, 7168, 8),
        (5376, 14336, 8),
        (5376, 7168, 4),
        (5376, 3584, 4),
        (5376, 1792, 2),
        (5376, 896, 1),
    ]
    for n, k, units in [*n_k_units, (21504, 5376, 1), (28672, 5376, 1)]:
        assert planned(rows, n, k, units, False, False).scratch_bytes <= tuning.SCRATCH_LIMIT
    for n, units in ((21504, 8), (28672, 8), (10752, 4), (5376, 1)):
        assert planned(rows, 5376, n, units, False, True).scratch_bytes <= tuning.SCRATCH_LIMIT
    assert planned(21504, 5376, rows, 1, True, True).nodes == 0


@needs_nvcc
def test_plans_of_the_measured_cells(planned):
    def tile(rows, k):
        found = planned(rows, 5376, k, 8, False, False).tile
        return found.n, found.halves

    assert tile(70, 7168) == (72, 2)
    assert tile(925, 7168) == (160, 1)
    assert tile(8349, 7168) == (160, 1)
    assert tile(8349, 14336) == (192, 1)


@pytest.mark.parametrize("weight_transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 70, 72, 73, 128, 129, 925])
def test_a_swapped_tile_reads_the_weight_as_its_first_operand(rows, weight_transposed):
    found = tuning.fused_candidates(rows, 8, a_transposed=False, b_transposed=weight_transposed)
    assert found
    assert all(
        (tile.swap, tile.a_transposed, tile.b_transposed) == (True, weight_transposed, False)
        for tile in found
    )
    plain = tuning.FusedTile(256, "chain", 2, 4, 1, 1, b_transposed=True)
    assert plain.reads(False, True)
    assert not plain.reads(True, False)


@needs_nvcc
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": 7160}, "k of 64 per unit"),
        ({"m": 5377}, "multiple of 8"),  # features: configuration 0 swaps the operands
        ({"a_stride": 7169}, "strides multiples of 8"),
        ({"a": 8}, "16-byte aligned"),
        ({"config": 99}, "no such configuration"),
        ({"units": 3}, "no such configuration"),
        ({"split": 1}, "no such configuration"),  # half a pair
    ],
)
def test_calls_outside_the_contract_are_refused_with_the_reason(library, change, text):
    call = {
        "a": 16,
        "b": 16,
        "y": 16,
        "m": 5376,
        "n": 925,
        "k": 7168,
        "a_stride": 7168,
        "b_stride": 7168,
        "y_stride": 5376,
    }
    assert library.scratch(Gemm(**call, units=8, config=0), 66)[1] == 0
    with pytest.raises(ExtensionError, match=text):
        library.scratch(Gemm(**{**call, "units": 8, "config": 0, **change}), 66)


def test_a_workspace_serves_one_stream_and_one_capture():
    class Stream:
        flag_bytes = 64
        capture = 0

        def capture_id(self, stream: int) -> int:
            return self.capture

    stream, gemm, device = Stream(), fused.FusedGemm(), torch.device("cpu")
    small, large, sending = (
        fused.Plan(0, tuning.FUSED[0], size, nodes) for size, nodes in ((8, 0), (99, 0), (8, 5))
    )
    first = gemm._workspace(stream, device, 1, small)
    assert first.flags is None
    assert gemm._workspace(stream, device, 1, large) is first
    assert first.scratch.numel() == 99
    assert gemm._workspace(stream, device, 1, sending).flags.count_nonzero() == 0
    assert gemm._workspace(stream, device, 2, small) is not first
    stream.capture = 7  # memory of a graph must serve no launch outside it, nor the other way round
    captured = gemm._workspace(stream, device, 1, sending)
    assert captured is not first
    stream.capture = 0
    assert gemm._workspace(stream, device, 1, small) is not captured


def test_misaligned_operands_are_copied_to_where_the_copy_engine_reads_them():
    whole = torch.randn(5, 65).bfloat16()
    rows, transposed = fused._stored(whole[:, 1:])
    assert (transposed, rows.stride(0), rows.data_ptr() % 16) == (False, 64, 0)
    assert torch.equal(rows, whole[:, 1:])


def test_predicted_cost_counts_the_busiest_cluster():
    tile = tuning.FusedTile(168, "pair", 2, 5, stage_ns=1000, tile_us=0)
    assert math.isclose(tuning.cost(tile, 925, 5376, 7168, 8, 66), 2 * 8 * 14)
    split = tuning.FusedTile(128, "pair", 2, 5, stage_ns=1000, tile_us=0, split=2)
    assert math.isclose(tuning.cost(split, 925, 5376, 7168, 8, 66), (2 * 8 + 6) * 14)
