"""The graph on a GPU keeps the promises it keeps on the CPU; the nodes that claim the CPU's bits have them."""

from __future__ import annotations

import os
from dataclasses import fields, replace

import graph_tiny as tiny
import pytest
import torch
from h3_kernels import nodes
from h3_kernels.graph import DiTConfig, ModuleWeights, PackedDiT, Replays, Settings
from h3_kernels.logical_keys import LogicalKeys
from h3_kernels.testing import assert_bitwise_equal
from h3_kernels.trace import Recorder, first_divergence

# H3_TEST_DEVICE=cpu tries this file's own code where there is no GPU.
DEVICE = os.environ.get("H3_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Heads of 128 with 96 rotary channels, as the released model: what every attention provider takes.
SIZES = dict(tiny.SIZES, attention_head_dim=128, hidden_size=256, ffn_dim=512, rope_freq_dim=16, text_dim=64)
SIZES |= {"time_embed_hidden_dim": 256, "time_embed_dim": 64, "freq_dim": 32}


@pytest.fixture(scope="module", autouse=True)
def sizes():
    """The helpers' graph at these sizes, for this module."""
    config = DiTConfig.from_mapping(SIZES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "CONFIG", config)
        patch.setattr(tiny, "GRAPH", PackedDiT(config))
        yield


def on_device(inputs):
    moved = {f.name: getattr(inputs, f.name) for f in fields(inputs) if f.init}
    moved = {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in moved.items()}
    keys = None if inputs.keys is None else LogicalKeys(inputs.keys.keys.to(DEVICE))
    return replace(inputs, **moved | {"keys": keys})


@pytest.fixture(scope="module")
def module(sizes):
    return {name: t.to(DEVICE) for name, t in tiny.weights().items()}


@pytest.fixture(scope="module")
def inputs(sizes):
    return on_device(tiny.request(text=37, audio=66, video=190))


@pytest.fixture(scope="module")
def expected(module, inputs):
    return tiny.train(module, inputs)


def assert_same(found, expected, pick=lambda t: t):
    for name, a, b in zip(("video", "audio"), found[0], expected[0], strict=True):
        assert_bitwise_equal(a, b, name)
    for name, gradient in expected[1].items():
        assert_bitwise_equal(found[1][name], pick(gradient), name)


@pytest.mark.parametrize("change", [{}, {"checkpoint": True}, {"fuse": False}])
def test_repetition_checkpointing_and_fusion_change_no_bit(module, inputs, expected, change):
    assert_same(tiny.train(module, inputs, Settings(**change)), expected)


def test_separate_weights_change_no_bit(module, inputs, expected):
    video, audio = tiny.run(tiny.pieces(module), inputs)
    assert_same(((video, audio), {}), (expected[0], {}))


@pytest.mark.parametrize("padding", [1, 91])
def test_padding_changes_no_bit(module, inputs, expected, padding):
    rows = torch.zeros(padding, 3, dtype=torch.float64, device=DEVICE)
    bounds = torch.tensor([0, inputs.rows, inputs.rows + padding], dtype=torch.int32, device=DEVICE)
    dead = torch.full((padding,), -1, device=DEVICE)
    padded = replace(
        inputs,
        keys=LogicalKeys(torch.cat([inputs.keys.keys, dead[:, None].expand(-1, 2)])),
        positions=torch.cat([inputs.positions, rows]),
        tags=torch.cat([inputs.tags, dead]),
        timestep_index=torch.cat([inputs.timestep_index, torch.zeros_like(dead)]),
        cu_seqlens=bounds,
    )
    assert_same(tiny.train(module, padded), expected)


def test_permuted_rows_with_their_keys_change_no_bit(module, inputs, expected):
    permutation = torch.randperm(inputs.rows, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    inverse = torch.argsort(permutation)
    moved = {name: getattr(inputs, name)[permutation] for name in ("positions", "tags", "timestep_index")}
    places = {
        f"{n}_positions": inverse[getattr(inputs, f"{n}_positions")] for n in ("video", "audio", "text")
    }
    permuted = replace(inputs, **moved, **places, keys=LogicalKeys(inputs.keys.keys[permutation]))
    assert_same(tiny.train(module, permuted), expected)


def test_replays_have_the_bits_of_the_forwards_they_stand_for(module, inputs):
    """Other rows, then weights changed in place, then a weight that moved: each against the forward run anew."""
    weights, replays = {name: t.clone() for name, t in module.items()}, Replays()

    def both(rows):
        with torch.no_grad():
            places = tuple(t.data_ptr() for t in weights.values())
            found = replays.run(tiny.GRAPH, ModuleWeights(weights), rows, Settings(), places)
        assert_same((found, {}), (tiny.run(weights, replace(rows, keys=None)), {}))

    other = replace(inputs, video=inputs.video.flip(0), timesteps=inputs.timesteps.flip(0))
    for rows in (inputs, inputs, other, inputs):
        both(rows)
    assert len(replays) == 1
    weights["blocks.0.mlp.fc2.weight"].mul_(1.5)
    both(inputs)
    weights["blocks.0.mlp.fc2.weight"] = weights["blocks.0.mlp.fc2.weight"] * 0.5
    both(inputs)
    both(inputs)
    assert len(replays) == 2


@pytest.mark.parametrize("tp", [2, 8])
def test_tensor_parallel_ranks_have_the_bits_of_one(module, inputs, expected, tp):
    """Ranks are threads on one device: no collective of a library takes part."""

    def work(rank, collective):
        settings = Settings(tp=tp, rank=rank, collective=collective)
        return tiny.run(tiny.shard(module, tp, rank), inputs, settings)

    for found in tiny.on_threads(tp, work):
        assert_same((found, {}), (expected[0], {}))


def test_velocities_are_those_of_the_cpu_within_bf16(module, inputs, expected):
    there = {name: t.cpu() for name, t in module.items()}
    video, audio = tiny.run(there, tiny.request(text=37, audio=66, video=190))
    for a, b in zip(expected[0], (video, audio), strict=True):
        assert (a.cpu() - b).norm() < 0.02 * b.norm()


def test_a_planted_deviation_is_found_at_its_node(module, inputs):
    def nudge(strict, *slots):
        (x,) = strict(*slots)
        return (x.index_fill(0, torch.tensor([11], device=x.device), 3.0),)

    traces = []
    for overlay in ({}, {"blocks.1.mlp.act_fn": nudge}):
        recorder = Recorder("gpu")
        with torch.no_grad():
            tiny.GRAPH.run(ModuleWeights(module), inputs, Settings(tracer=recorder, overlay=overlay))
        traces.append(recorder.trace)
    found = first_divergence(*traces)
    assert (found.node, found.row, found.differing) == ("blocks.1.mlp.act_fn", 11, 1)


def test_silu_and_angle_tables_have_the_bits_of_the_cpu():
    x = torch.randn(5, 5376, generator=torch.Generator().manual_seed(0)) * 20
    dy = torch.randn(5, 5376, generator=torch.Generator().manual_seed(1))
    results = []
    for device in ("cpu", DEVICE):
        leaf = x.to(device).requires_grad_()
        y = nodes.silu(leaf)
        results.append((y.detach().cpu(), torch.autograd.grad(y, leaf, dy.to(device))[0].cpu()))
    for a, b in zip(*results, strict=True):
        assert_bitwise_equal(a, b, "silu")
    positions = torch.rand(997, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 900
    inv_freq = nodes.inverse_frequencies(16)
    there = nodes.rope_table(positions.to(DEVICE), inv_freq.to(DEVICE)).cpu()
    assert_bitwise_equal(there, nodes.rope_table(positions, inv_freq), "rope")
    times, frequencies = (
        torch.rand(9, generator=torch.Generator().manual_seed(3)),
        nodes.sinusoid_frequencies(256),
    )
    there = nodes.timestep_sinusoid(times.to(DEVICE), frequencies.to(DEVICE)).cpu()
    assert_bitwise_equal(there, nodes.timestep_sinusoid(times, frequencies), "sinusoid")
