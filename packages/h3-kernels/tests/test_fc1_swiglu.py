"""fc1 and SwiGLU in one launch, off the GPU: interpreted, compiled for Hopper, and where the graph runs it.

The bits themselves are the GPU's (test_gpu_fc1_swiglu.py). Here: every element is the one of the two nodes apart, the
code neither spills nor moves operands through registers, and the graph's results are the same with the launch and
without, while a trace sees both nodes.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import graph_tiny as tiny
import pytest
import torch
from h3_kernels import fc1_swiglu as subject
from h3_kernels import nodes, reference, tuning
from h3_kernels.graph import Settings
from h3_kernels.providers import GemmCall
from h3_kernels.testing import assert_bitwise_equal, count_differing
from h3_kernels.trace import Recorder, first_divergence
from interpreter import assert_passes_interpreted

pytest.importorskip("triton")
SUITE = Path(__file__).with_name("fc1_swiglu_interpreted.py")

BF16 = torch.bfloat16
SHARED_BLOCK = 232448
CALL = GemmCall(8349, 28672, 5376, 1, BF16, BF16, "k", "k", False, "cuda", (9, 0))


def test_in_the_interpreter() -> None:
    assert_passes_interpreted(SUITE)


def compiled(gate_first, capability=90):
    from h3_kernels.triton.fc1_swiglu import fc1_swiglu_kernel
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tile = tuning.FC1_SWIGLU
    constants = {
        "BM": tile.m, "BF": tile.n, "BK": tile.k, "BAND": tile.band, "PROGRAMS": 132, "GATE_FIRST": gate_first,
    }  # fmt: skip
    blocks = {"x": [tile.m, tile.k], "weight": [2, tile.n, tile.k], "y": [tile.m, tile.n]}
    signature = {
        **{name: f"tensordesc<bf16{block}>" for name, block in blocks.items()},
        **dict.fromkeys(("M", "F", "K"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i in (4, 5)}
    source = ASTSource(fn=fc1_swiglu_kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    return compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("gate_first", [True, False], ids=["gate first", "value first"])
def test_hopper_code_multiplies_256_columns_at_once_and_does_not_spill(gate_first, tmp_path):
    """Bits rest on wgmma alone. Operands go from the copy engine to it without a trip through registers."""
    kernel = compiled(gate_first)
    code = kernel.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16" in code
    assert "mma.sync" not in code
    assert "fma.rn.f32" not in code
    assert "ld.shared" not in code
    assert "ldmatrix" not in code
    assert not re.findall(r"\b(atom|red)\.", code)
    assert kernel.metadata.shared <= SHARED_BLOCK
    report = ptxas(code, tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    assert "C7510" not in report  # ptxas's notice that no two wgmma may overlap


def ptxas(ptx, tmp_path):
    """What ptxas says of its register allocation."""
    import triton

    source = tmp_path / "kernel.ptx"
    source.write_text(ptx)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [
        str(tool),
        "-v",
        "--fmad=false",
        "--gpu-name=sm_90a",
        str(source),
        "-o",
        str(tmp_path / "cubin"),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


# The graph.


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"capability": (10, 0)}, "compute capability 9.0"),
        ({"capability": None}, "compute capability 9.0"),
        ({"a_dtype": torch.float32}, "multiplies bf16"),
        ({"n": 28672 + 128}, "halves of a multiple of 128"),
        ({"m": tuning.FC1_SWIGLU_ROWS}, "slower than the two nodes"),
    ],
    ids=str,
)
def test_what_is_refused(change, reason):
    assert subject.refuses(CALL) is None
    assert reason in subject.refuses(replace(CALL, **change))


def test_operands_on_the_cpu_are_not_served():
    x, weight = torch.zeros(4, 16, dtype=BF16), torch.zeros(256, 16, dtype=BF16)
    assert not subject.served(x, weight, gate_first=True)


class OneLaunch:
    """Stands in for the kernel on the CPU: the reference's bits, and a count. ``swapped`` takes the halves wrongly."""

    def __init__(self, monkeypatch, swapped=False):
        self.calls = 0
        self.swapped = swapped
        monkeypatch.setattr(subject, "served", lambda x, weight, *, gate_first: True)
        monkeypatch.setattr(subject, "fc1_swiglu", self)

    def __call__(self, x, weight, *, gate_first):
        self.calls += 1
        y = reference.tree_gemm(x, weight, units=1, out_dtype=x.dtype, bias=None)
        first, second = y.chunk(2, dim=1)
        return nodes.swiglu(first, second) if gate_first != self.swapped else nodes.swiglu(second, first)


MLPS = sum(node.op == "swiglu" for node in tiny.GRAPH.nodes)


@pytest.fixture(scope="module")
def module():
    return tiny.weights()


def halves(module):
    """fc1 as two tensors."""
    weights = dict(module)
    for name in [name for name in module if name.endswith("fc1.weight")]:
        for half, held in zip(("gate", "value"), weights.pop(name).chunk(2), strict=True):
            weights[name.replace("fc1.", f"fc1.{half}.")] = held.clone()
    return weights


@pytest.mark.parametrize("stored", [dict, tiny.pieces], ids=["gate first", "value first"])
def test_one_launch_changes_no_bit_of_the_model(monkeypatch, module, stored):
    expected = tiny.run(stored(module), tiny.request())
    launch = OneLaunch(monkeypatch)
    found = tiny.run(stored(module), tiny.request())
    assert launch.calls == MLPS > 0
    for a, b in zip(found, expected, strict=True):
        assert_bitwise_equal(a, b)
    OneLaunch(monkeypatch, swapped=True)  # twin
    assert count_differing(tiny.run(stored(module), tiny.request())[0], expected[0]) > 0


@pytest.mark.parametrize("tp", [2, 8])
def test_ranks_launch_their_shards(monkeypatch, module, tp):
    expected = tiny.run(module, tiny.request())
    launch = OneLaunch(monkeypatch)

    def work(rank, collective):
        settings = Settings(tp=tp, rank=rank, collective=collective)
        return tiny.run(tiny.shard(module, tp, rank), tiny.request(), settings)

    for found in tiny.on_threads(tp, work):
        for a, b in zip(found, expected, strict=True):
            assert_bitwise_equal(a, b)
    assert launch.calls == tp * MLPS


FC1 = "blocks.0.mlp.fc1"
ACT = "blocks.0.mlp.act_fn"


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        (Settings(fuse=False), 0),
        (Settings(provider="reference"), 0),
        (Settings(overlay={FC1: lambda strict, *x: strict(*x)}), MLPS - 1),
        (Settings(overlay={ACT: lambda strict, *x: strict(*x)}), MLPS - 1),
        (Settings(tracer=Recorder("reader")), 0),
    ],
    ids=[
        "fuse off",
        "a provider by name",
        "overlay of fc1",
        "overlay of act_fn",
        "a tracer that reads values",
    ],
)
def test_where_the_two_nodes_run_apart(monkeypatch, module, settings, left):
    launch = OneLaunch(monkeypatch)
    tiny.run(module, tiny.request(), settings)
    assert launch.calls == left


def test_gradients_and_separate_halves_run_apart(monkeypatch, module):
    launch = OneLaunch(monkeypatch)
    tiny.train(module, tiny.request())
    tiny.run(halves(module), tiny.request())
    assert launch.calls == 0


class Watcher:
    """A tracer that asks who computed a node, not what."""

    reads_values = False

    def __init__(self):
        self.seen = {}

    def begin(self, inputs):
        pass

    def record(self, node, requested, actual, outputs):
        self.seen[node.name] = actual, next(iter(outputs.values())).shape[0]


def test_a_tracer_that_reads_no_values_sees_both_nodes_of_a_launch(monkeypatch, module):
    OneLaunch(monkeypatch)
    watcher = Watcher()
    tiny.run(module, tiny.request(), Settings(tracer=watcher))
    assert watcher.seen.keys() == {node.name for node in tiny.GRAPH.nodes}
    rows = tiny.request().rows
    assert watcher.seen[FC1] == (f"h3-projection-gemm-v1 by {subject.NAME}", rows)
    assert watcher.seen[ACT] == (f"h3-node-v1:swiglu by {subject.NAME}", rows)


def test_a_trace_has_both_nodes_and_the_bits_of_a_run_with_the_launch(monkeypatch, module):
    """The trace of a run that would launch once: the same nodes, the same values, and the same end."""

    def traced():
        recorder = Recorder("apart")
        return tiny.run(module, tiny.request(), Settings(tracer=recorder)), recorder.trace

    apart, trace = traced()
    launch = OneLaunch(monkeypatch)
    _, found = traced()
    assert first_divergence(trace, found) is None
    assert launch.calls == 0
    for a, b in zip(tiny.run(module, tiny.request()), apart, strict=True):
        assert_bitwise_equal(a, b)
    assert launch.calls == MLPS
