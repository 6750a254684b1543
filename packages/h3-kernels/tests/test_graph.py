"""The graph gives one set of bits, forward and backward, however the same rows and weights are laid out or spread."""

from __future__ import annotations

import itertools
from dataclasses import replace

import graph_tiny as tiny
import pytest
import torch
from h3_kernels import nodes
from h3_kernels.contract import row_range
from h3_kernels.errors import InputError
from h3_kernels.graph import DiTConfig, ModuleWeights, PackedDiT, PackedInputs, Settings
from h3_kernels.logical_keys import LogicalKeys
from h3_kernels.testing import assert_bitwise_equal, count_differing
from h3_kernels.trace import Recorder, first_divergence, load, merge_ranks
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def module():
    return tiny.weights()


@pytest.fixture(scope="module")
def expected(module):
    return tiny.train(module, tiny.request())


def assert_same(found, expected, context=""):
    for name, a, b in zip(("video", "audio"), found, expected, strict=True):
        assert_bitwise_equal(a, b, f"{context} {name}")


def assert_same_gradients(found, expected, context=""):
    assert found.keys() == expected.keys()
    for name in expected:
        assert_bitwise_equal(found[name], expected[name], f"{context} {name}")


def test_the_full_model_has_every_parameter_of_the_module_layout():
    """534 parameters of the released model (545 names less the absent biases), each used by a node."""
    graph = PackedDiT(DiTConfig())
    names = {name for node in graph.nodes for name in node.parameters}
    unbiased = ("qkv_proj.bias", "out_proj.bias", "fc1.bias", "fc2.bias")
    assert len([name for name in names if not name.endswith(unbiased)]) == 534
    assert len(graph.nodes) == len({node.name for node in graph.nodes})


def test_every_weight_gets_a_gradient(module, expected):
    assert expected[1].keys() == module.keys()
    assert all(g.abs().amax() > 0 for g in expected[1].values())


@pytest.mark.parametrize(
    "change", [{"checkpoint": True}, {"fuse": False}, {"checkpoint": True, "fuse": False}]
)
def test_checkpointing_and_fusion_change_no_bit(module, expected, change):
    results, gradients = tiny.train(module, tiny.request(), Settings(**change))
    assert_same(results, expected[0])
    assert_same_gradients(gradients, expected[1])


def test_separate_q_k_v_and_value_first_fc1_change_no_bit(module, expected):
    results, gradients = tiny.train(tiny.pieces(module), tiny.request())
    assert_same(results, expected[0])
    assert_same_gradients(gradients, tiny.pieces(expected[1]))


def test_fc1_halves_taken_for_each_other_are_caught(module, expected):
    """Negative twin: [value; gate] rows served under the name of [gate; value] rows."""
    wrong = tiny.pieces(module)
    for name in [name for name in wrong if "value_gate" in name]:
        wrong[name.replace("value_gate.", "")] = wrong.pop(name)
    assert count_differing(tiny.run(wrong, tiny.request())[0], expected[0][0]) > 0


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallel_ranks_have_the_bits_of_one(module, expected, tp):
    def work(rank, collective):
        settings = Settings(tp=tp, rank=rank, collective=collective)
        return tiny.train(tiny.shard(module, tp, rank), tiny.request(), settings)

    for rank, (results, gradients) in enumerate(tiny.on_threads(tp, work)):
        assert_same(results, expected[0], f"rank {rank}")
        assert_same_gradients(gradients, tiny.shard(expected[1], tp, rank), f"rank {rank}")


def in_float32(module):
    """The same weights in fp32, so that no rounding to bf16 hides another order of addition."""
    return {name: t.float() for name, t in module.items()}


def test_another_unit_count_is_another_contract(module):
    """Negative twin: fewer units give other bits, so both engines must state the same id."""
    found = [
        tiny.run(in_float32(module), tiny.request(), Settings(contract=f"h3-parallel-v1-u{n}"))
        for n in (8, 4)
    ]
    assert count_differing(found[0][0], found[1][0]) > 0


def test_processes_have_the_bits_of_one(module, tmp_path):
    """Tensor parallel and Ulysses over gloo on 4 ranks, which do not divide the 21 rows."""
    inputs = tiny.request(video=10)
    whole, whole_x = tiny.train(module, inputs), tiny.block_input_gradient(module, inputs)
    for rank, results in enumerate(tiny.on_processes(4, tmp_path)):
        assert_same(results["tp"][0], whole[0], f"tp rank {rank}")
        assert_same_gradients(results["tp"][1], tiny.shard(whole[1], 4, rank), f"tp rank {rank}")
        assert_same(results["ulysses"], whole[0], f"ulysses rank {rank}")
        start, stop = row_range(21, 4, rank)
        assert_bitwise_equal(results["ulysses_gradient"], whole_x[start:stop], f"ulysses rank {rank}")
    recorder = Recorder("one process")
    tiny.run(module, inputs, Settings(tracer=recorder))
    merged = merge_ranks([load(tmp_path / f"trace{rank}") for rank in range(4)])
    assert first_divergence(recorder.trace, merged) is None


def packed(parts: list[PackedInputs], padding: int) -> PackedInputs:
    """Requests one after the other, each a document with its own noise levels, then a document of padding rows."""
    starts = torch.tensor([0, *(p.rows for p in parts)]).cumsum(0)
    levels = torch.tensor([0, *(len(p.timesteps) for p in parts)]).cumsum(0)
    texts = torch.tensor([0, *(len(p.text) for p in parts)]).cumsum(0)

    def joined(name, offsets=None, tail=None):
        values = [getattr(p, name) + (0 if offsets is None else offsets[i]) for i, p in enumerate(parts)]
        return torch.cat(values if tail is None else [*values, tail.to(values[0].dtype)])

    keys = [torch.cat([torch.full((p.rows, 1), i), p.keys.keys[:, 1:]], dim=1) for i, p in enumerate(parts)]
    bounds = [*starts.tolist(), *([int(starts[-1]) + padding] if padding else [])]
    return PackedInputs(
        **{name: joined(name) for name in ("video", "audio", "text", "timesteps")},
        **{f"{n}_positions": joined(f"{n}_positions", starts) for n in ("video", "audio", "text")},
        positions=joined("positions", tail=torch.zeros(padding, 3)),
        tags=joined("tags", tail=torch.full((padding,), -1)),
        timestep_index=joined("timestep_index", levels, torch.zeros(padding)),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        text_cu_seqlens=texts.to(torch.int32),
        max_seqlen=max(padding, *(p.rows for p in parts)),
        text_max_seqlen=max(len(p.text) for p in parts),
        keys=LogicalKeys(torch.cat([*keys, torch.full((padding, 2), -1)])),
    )


@settings(max_examples=12, deadline=None)
@given(padding=st.integers(0, 40), keyed=st.booleans())
def test_padding_changes_no_bit(padding, keyed):
    module = tiny.weights()
    alone = tiny.train(module, tiny.request())
    inputs = packed([tiny.request()], padding)
    results, gradients = tiny.train(module, inputs if keyed else replace(inputs, keys=None))
    assert_same(results, alone[0])
    assert_same_gradients(gradients, alone[1])


@settings(max_examples=8, deadline=None)
@given(first=st.booleans(), padding=st.integers(0, 9), seed=st.integers(2, 50))
def test_another_document_changes_no_bit_of_a_request(first, padding, seed):
    module, mine = tiny.weights(), tiny.request()
    other = tiny.request(seed, text=3, audio=4, video=12)
    video, audio = tiny.run(module, packed([mine, other] if first else [other, mine], padding))
    alone = tiny.run(module, mine)
    assert_same((video[:9], audio[:6]) if first else (video[12:], audio[4:]), alone)


def test_a_batch_packed_together_sums_gradients_in_key_order(module):
    """Two packings of the same two requests, in either order, give the same gradients: keys, not places, decide."""
    requests = [tiny.request(2), tiny.request(3, video=12)]
    one = packed(requests, 0)
    other = packed(requests[::-1], 5)
    swapped = other.keys.keys.clone()
    swapped[:, 0] = torch.where(swapped[:, 0] < 0, swapped[:, 0], 1 - swapped[:, 0])
    gradients = [tiny.train(module, i)[1] for i in (one, replace(other, keys=LogicalKeys(swapped)))]
    # Rows over timesteps have no keys: their order is that of ``timesteps``, which the packings do not share.
    over_rows = [name for name in gradients[0] if "adaln" not in name and "time_embedder" not in name]
    for name in over_rows:
        assert_bitwise_equal(gradients[0][name], gradients[1][name], name)


def permuted(inputs: PackedInputs, permutation: torch.Tensor) -> PackedInputs:
    inverse = torch.argsort(permutation)
    moved = {name: getattr(inputs, name)[permutation] for name in ("positions", "tags", "timestep_index")}
    places = {
        f"{n}_positions": inverse[getattr(inputs, f"{n}_positions")] for n in ("video", "audio", "text")
    }
    return replace(inputs, **moved, **places, keys=LogicalKeys(inputs.keys.keys[permutation]))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000))
def test_permuted_rows_with_their_keys_change_no_bit(seed):
    module, inputs = tiny.weights(), tiny.request()
    alone = tiny.train(module, inputs)
    permutation = torch.randperm(inputs.rows, generator=torch.Generator().manual_seed(seed))
    results, gradients = tiny.train(module, permuted(inputs, permutation))
    assert_same(results, alone[0])
    assert_same_gradients(gradients, alone[1])


def test_permuted_rows_without_keys_are_caught(module):
    """Negative twin: attention folds keys in packed order."""
    inputs, module = tiny.request(), in_float32(module)
    permutation = torch.randperm(inputs.rows, generator=torch.Generator().manual_seed(1))
    plain = replace(inputs, keys=None)
    moved = replace(permuted(inputs, permutation), keys=None)
    assert count_differing(tiny.run(module, plain)[0], tiny.run(module, moved)[0]) > 0


def wrong_eps(strict, x, shift, scale, index):
    return (nodes.rms_norm_modulate(x, tiny.weights()["blocks.1.norm1.weight"], shift, scale, index, 1e-2),)


def wrong_rotation(strict, q, k, table):
    return strict(q, k, table.roll(1, 0))


def wrong_documents(strict, q, k, v, cu_seqlens):
    return strict(q, k, v, torch.tensor([0, 10, 20], dtype=torch.int32))


def wrong_accumulator(strict, x):
    """Two halves of K, each rounded to bf16 before they are added."""
    low, high = x.clone(), x.clone()
    low[:, x.shape[1] // 2 :] = 0
    high[:, : x.shape[1] // 2] = 0
    return (strict(low)[0] + strict(high)[0],)


DEVIATIONS = {
    "blocks.1.norm1": wrong_eps,
    "blocks.0.attn.qk_norm_rope": wrong_rotation,
    "blocks.1.attn.attention": wrong_documents,
    "blocks.0.mlp.fc2": wrong_accumulator,
}


@pytest.mark.parametrize("node", DEVIATIONS)
def test_an_overlay_replaces_one_node(module, expected, node):
    found = tiny.run(module, tiny.request(), Settings(overlay={node: DEVIATIONS[node]}))
    assert count_differing(found[0], expected[0][0]) > 0


def test_an_overlay_that_calls_the_strict_node_changes_nothing(module, expected):
    overlay = {node.name: (lambda strict, *x: strict(*x)) for node in tiny.GRAPH.nodes}
    assert_same(tiny.run(module, tiny.request(), Settings(overlay=overlay)), expected[0])


def test_stages_run_one_by_one_are_a_run(module, expected):
    session = tiny.GRAPH.begin(ModuleWeights(module), tiny.request())
    slots = session.slots()
    with torch.no_grad():
        for stage in tiny.GRAPH.stages:
            assert set(stage.reads) <= slots.keys()
            slots |= session.run(stage, slots)
    assert_same((slots["video_velocity"], slots["audio_velocity"]), expected[0])


def test_a_stage_keeps_no_slot_that_nobody_reads():
    for stage in tiny.GRAPH.stages:
        live = set(stage.reads)
        for node, unused in itertools.chain.from_iterable(stage.steps):
            assert set(node.reads) <= live
            live |= set(node.writes)
            live -= set(unused)
        assert live == set(stage.writes)
    freed = {
        node.name: set(unused)
        for node, unused in itertools.chain.from_iterable(tiny.GRAPH.stage("blocks.0").steps)
    }
    assert freed["blocks.0.attn.qkv_proj"] == {"h"}
    assert freed["blocks.0.attn.attention"] >= {"q", "k", "v"}
    assert freed["blocks.0.mlp.act_fn"] == {"gate", "value"}


def test_configuration_is_read_from_either_engine():
    native = {"token_refiner_num_layers": 1, "ffn_hidden_size": 192, "latents_dim": 4, "audio_latents_dim": 8}
    native |= {"timestep_input_dim": 24, "time_embed_hidden_size": 80, "rope_inv_freq_len": 2}
    same = (
        "num_attention_heads",
        "attention_head_dim",
        "hidden_size",
        "num_layers",
        "text_dim",
        "time_embed_dim",
    )
    native |= {name: tiny.SIZES[name] for name in same}
    assert DiTConfig.from_mapping(native) == tiny.CONFIG
    assert DiTConfig.from_mapping({}) == DiTConfig()
    with pytest.raises(InputError, match=r"ffn as \[1, 2\]"):
        DiTConfig.from_mapping({"ffn_dim": 1, "ffn_hidden_size": 2})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tags": torch.zeros(3, dtype=torch.int64)}, r"tags is \[3\]; expected \[20\]"),
        ({"video_positions": torch.zeros(9)}, "video_positions is torch.float32; expected int64"),
        ({"audio": torch.zeros(2, 8)}, r"audio \[2, 8\] does not fit"),
        ({"keys": LogicalKeys(torch.zeros(1, 2, dtype=torch.int64))}, "1 keys for 20 rows"),
    ],
)
def test_rows_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(tiny.request(), **change)


def test_missing_weights_and_unknown_nodes_are_refused(module):
    lacking = {
        name: t for name, t in tiny.pieces(module).items() if name != "blocks.0.attn.qkv_proj.k.weight"
    }
    with pytest.raises(
        InputError, match=r"no complete 'blocks.0.attn.qkv_proj'; expected weight or q.weight\+k"
    ):
        tiny.run(lacking, tiny.request())
    with pytest.raises(InputError, match=r"overlay names nodes that do not exist: blocks\.7\.norm1"):
        tiny.run(module, tiny.request(), Settings(overlay={"blocks.7.norm1": wrong_accumulator}))


@pytest.mark.parametrize("suffixes", [("",), ("qkv_proj", "out_proj"), ("fc1", "fc2")])
def test_a_shard_is_not_taken_for_the_whole(module, suffixes):
    """The shards of a column-parallel and of the row-parallel linear behind it fit: a partial sum would pass."""
    shard = tiny.shard(module, 2, 0)
    mixed = module | {name: t for name, t in shard.items() if any(suffix in name for suffix in suffixes)}
    with pytest.raises(InputError, match=r"holds \d+ columns of \d+ at tp=1; check the weight's shard"):
        tiny.run(mixed, tiny.request())
    column_whole = mixed | {name: t for name, t in module.items() if "qkv_proj" in name or "fc1" in name}
    with pytest.raises(InputError, match=r"holds \d+ (input )?columns of \d+ at tp=1"):
        tiny.run(column_whole, tiny.request())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tags": 3}, "tags: expected -1"),
        ({"tags": -2}, "tags: expected -1"),
        ({"timestep_index": 3}, r"timestep_index: expected 0\.\.2"),
        ({"timestep_index": -1}, r"timestep_index: expected 0\.\.2"),
        ({"cu_seqlens": 19}, "cu_seqlens: expected to rise from 0 to 20 by at most max_seqlen 20"),
        (
            {"text_cu_seqlens": 6},
            "text_cu_seqlens: expected to rise from 0 to 5 by at most text_max_seqlen 5",
        ),
    ],
)
def test_a_value_that_would_be_misread_is_refused(change, message):
    """The last element of one field out of its range: no node is run."""
    inputs = tiny.request()
    (name, value), *_ = change.items()
    wrong = getattr(inputs, name).clone()
    wrong[-1] = value
    with pytest.raises(InputError, match=message):
        tiny.run(tiny.weights(), replace(inputs, **{name: wrong}))
    tiny.run(tiny.weights(), inputs)


def test_a_document_longer_than_max_seqlen_is_refused():
    inputs = tiny.padded(tiny.request(), 30)
    with pytest.raises(InputError, match="by at most max_seqlen 20"):
        tiny.run(tiny.weights(), inputs)
    tiny.run(tiny.weights(), replace(inputs, max_seqlen=30))
