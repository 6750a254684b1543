"""Scope "model": the whole graph in the place of the engine's forward. No node is left to change a velocity."""

from dataclasses import replace

import pytest
import torch
from h3_adapter_vllm import BoundModelError, InstallError, RemoveError, install_h3_rollout
from h3_adapter_vllm.testing import engine as tiny
from h3_kernels import fc1_swiglu, nodes
from h3_kernels.binding import Bound
from h3_kernels.projection import projection
from h3_kernels.row_parallel import row_parallel

pytestmark = pytest.mark.engine


def same(a, b):
    return all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b, strict=True))


def close(a, b):
    return all((x - y).abs().max() <= 4e-2 * y.abs().max() for x, y in zip(a, b, strict=True))


def test_velocities_are_within_rounding_of_the_engine(model, engine):
    request = engine.request()
    before = engine.velocities(model, [request])
    with install_h3_rollout(model, scope="model"):
        after = engine.velocities(model, [request])
    assert close(after, before)
    assert same(engine.velocities(model, [request]), before)


def test_velocities_are_the_graphs(model, engine):
    """Bit for bit what h3-kernels computes from a plain dictionary of the engine's weights."""
    from h3_kernels.graph import DiTConfig, ModuleWeights, PackedDiT, vllm_inputs

    request = engine.request()
    inputs = vllm_inputs(engine.forward_inputs([request]))
    with torch.no_grad():
        expected = PackedDiT(DiTConfig.from_mapping(engine.TINY)).run(
            ModuleWeights(model.state_dict()), inputs
        )
    with install_h3_rollout(model, scope="model"):
        assert same(engine.velocities(model, [request]), expected)


def test_without_the_graph_padding_changes_velocities(model, engine):
    """Negative twin: the engine masks padding rows with another attention kernel."""
    request = engine.request()
    assert not same(engine.velocities(model, [request], padding=12), engine.velocities(model, [request]))


@pytest.mark.parametrize("padding", [1, 12])
def test_padding_changes_no_bit(model, engine, padding):
    request = engine.request()
    with install_h3_rollout(model, scope="model"):
        assert same(engine.velocities(model, [request], padding=padding), engine.velocities(model, [request]))


def test_packed_requests_have_the_bits_they_have_alone(model, engine):
    """Three requests in one forward, with padding behind: each one's rows are those of its own forward."""
    requests = [engine.request(seed=s, text=3 + s, video=4 * s, audio=5) for s in (1, 2, 3)]
    with install_h3_rollout(model, scope="model"):
        alone = [engine.velocities(model, [r]) for r in requests]
        together = engine.velocities(model, requests, padding=5)
    for stream in (0, 1):
        assert same([torch.cat([v[stream] for v in alone])], [together[stream]])


def test_report_binds_every_node(model, engine):
    with install_h3_rollout(model, scope="model") as handle:
        assert handle.report().refused()
        engine.velocities(model, [engine.request()])
        report = handle.report()
    assert report.bound().keys() == set(report)
    assert report["blocks.0.attn.qkv_proj"].provider == "reference"
    assert report["blocks.1.attn.attention"] == Bound("h3-node-v1:attention", "written order")
    assert {"time_embedder.proj_out", "blocks.0.norm1", "final_layer.video_out"} <= set(report)


def test_fc1_and_swiglu_in_one_launch_keep_their_bits_and_their_lines(model, engine, monkeypatch):
    """The reference stands in for the kernel; with its halves swapped velocities differ."""
    velocities, providers = [], []
    for served, order in ((False, 1), (True, 1), (True, -1)):

        def stand_in(x, weight, *, gate_first, order=order):
            assert gate_first
            return nodes.swiglu(*projection(x, weight).chunk(2, dim=1)[::order])

        monkeypatch.setattr(fc1_swiglu, "served", lambda x, weight, *, gate_first, served=served: served)
        monkeypatch.setattr(fc1_swiglu, "fc1_swiglu", stand_in)
        with install_h3_rollout(model, scope="model") as handle:
            velocities.append(engine.velocities(model, [engine.request()]))
            report = handle.report()
            providers.append([report[f"blocks.1.mlp.{node}"].provider for node in ("fc1", "act_fn")])
            assert report.bound().keys() == set(report)
    assert providers == [["reference", "written order"], [fc1_swiglu.NAME] * 2, [fc1_swiglu.NAME] * 2]
    assert same(velocities[1], velocities[0])
    assert not same(velocities[2], velocities[0])


def test_a_linear_called_by_itself_computes_the_contract_too(model, engine):
    """Each scope contains the one before; the report still has one line a node of the graph."""
    with install_h3_rollout(model) as handle:
        layer = handle.linears["blocks.0.mlp.fc2"]
        x = torch.randn(400, layer.input_size).bfloat16()
        assert torch.equal(layer(x)[0], row_parallel(x, layer.weight))
        assert len(handle.linears) == 26
        engine.velocities(model, [engine.request()])
        assert len(handle.report()) == len(handle.report().bound())
    assert not torch.equal(
        row_parallel(x, layer.weight, contract="h3-parallel-v1-u1"), row_parallel(x, layer.weight)
    )


def test_weights_are_read_when_called(model, engine, release):
    request = engine.request()
    changed = {name: t if "inv_freq" in name else t * 1.25 for name, t in release.items()}
    fresh = engine.build()
    fresh.load_weights(changed.items())
    with install_h3_rollout(model, scope="model"), install_h3_rollout(fresh, scope="model"):
        model.load_weights(changed.items())
        assert same(engine.velocities(model, [request]), engine.velocities(fresh, [request]))


def test_condition_rows_are_masked(model, engine):
    kwargs = engine.forward_inputs([engine.request()])
    kwargs["update_mask"][:3] = 0
    kwargs["update_audio_mask"] = torch.zeros(7)
    with install_h3_rollout(model, scope="model"), torch.no_grad():
        video, audio = model(**kwargs)
        assert not video[:3].any()
        assert video[3:].any()
        assert not audio.any()
        unmasked, _ = model(**kwargs, skip_mask_out_condition=True)
        assert unmasked[:3].any()


def test_audit_returns_the_engines_bits_and_compares_once(model, engine):
    request = engine.request()
    before = engine.velocities(model, [request])
    with install_h3_rollout(model, mode="audit", scope="model") as handle:
        for _ in range(2):
            assert same(engine.velocities(model, [request]), before)
        rows = {row.node: row for row in handle.audit()}
        assert not handle.report().bound()
    assert rows["video_velocity"].compared == 8 * 16
    assert rows["audio_velocity"].compared == 7 * 8
    assert rows["video_velocity"].differing > 0
    assert rows["blocks.0.mlp.fc2"].compared == 2 * 20 * 80


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"surprise": 1}, TypeError, r"unexpected kwargs: \['surprise'\]"),
        ({"update_mask": None}, ValueError, r"requires kwargs \['update_mask'\]"),
        ({"rope_table": torch.zeros(20, 24)}, BoundModelError, "rope_table is given"),
        (
            {"img_pos_for_infer_output_info": {"position_ids": torch.arange(3)}},
            BoundModelError,
            "img_pos_for_infer_output_info is not img_pos_info",
        ),
    ],
)
def test_calls_it_cannot_serve_are_refused(model, engine, change, error, match):
    with install_h3_rollout(model, scope="model"), pytest.raises(error, match=match):
        model(**engine.forward_inputs([engine.request()]) | change)


def test_models_it_cannot_serve_are_refused(load):
    gated, ring, patched = load(), load(), load()
    gated.enable_vsa_gates()
    ring.parallel_config.ring_degree = 2
    patched.forward = patched.forward
    for model, match in (
        (gated, "VSA gates are on"),
        (ring, "ring_degree=2"),
        (patched, "forward is patched"),
    ):
        with pytest.raises(InstallError, match=match):
            install_h3_rollout(model, scope="model")


def test_engine_hooks_on_blocks_are_refused_at_the_call(model, engine):
    from vllm_omni.diffusion.hooks.base import HookRegistry

    HookRegistry.get_or_create(model.blocks[0])
    with (
        install_h3_rollout(model, scope="model"),
        pytest.raises(BoundModelError, match="block 0 has engine hooks"),
    ):
        engine.velocities(model, [engine.request()])


def test_forward_taken_by_something_else_is_left_alone(model):
    handle = install_h3_rollout(model, scope="model")
    theirs = vars(model)["forward"] = lambda **_: None
    with pytest.raises(InstallError, match="half installed: forward was replaced"):
        install_h3_rollout(model, scope="model")
    with pytest.raises(RemoveError, match="first: forward"):
        handle.remove()
    assert model.forward is theirs


# Tensor and sequence parallelism.


def whole_model(path, padding, lora, sequence):
    """Worker: velocities of the bound graph."""
    model = tiny.build(ulysses_degree=sequence)
    model.load_weights(torch.load(path).items())
    install_h3_rollout(model, scope="model")
    if lora:
        wrap(model)
    return [t.numpy() for t in tiny.velocities(model, [tiny.request()], padding=padding)]


def first_step(path):
    """Worker: velocities where video and audio start, at one and the same noise level."""
    model = tiny.build()
    model.load_weights(torch.load(path).items())
    install_h3_rollout(model)
    return [t.numpy() for t in tiny.velocities(model, [replace(tiny.request(), timesteps=(0.0, 0.0))])]


def wrap(model):
    """An adapter on fc2 and out_proj of every main block."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.utils import replace_submodule
    from vllm_omni.diffusion.lora.utils import from_layer_diffusion

    config = LoRAConfig(max_lora_rank=8, max_loras=1, max_cpu_loras=1, lora_dtype=torch.bfloat16)
    packed = {"attn.qkv_proj": ["q", "k", "v"], "attn.out_proj": [], "mlp.fc1": ["0", "1"], "mlp.fc2": []}
    generator = torch.Generator().manual_seed(5)
    for index in range(len(model.blocks)):
        for suffix, parts in packed.items():
            name = f"blocks.{index}.{suffix}"
            layer = model.get_submodule(name)
            wrapper = replace_submodule(model, name, from_layer_diffusion(layer, 1, config, parts))
            slices = max(1, len(parts))
            a = [torch.randn(8, layer.input_size, generator=generator).bfloat16() for _ in range(slices)]
            b = [
                torch.randn(layer.output_size // slices, 8, generator=generator).bfloat16() / 8
                for _ in range(slices)
            ]
            wrapper.set_lora(0, a if parts else a[0], b if parts else b[0])


def test_lora_terms_are_those_of_the_bound_linears(model, engine):
    """The same adapter over the same graph, by overlay and by contract methods, on a model whose other nodes agree."""
    request = engine.request()
    with install_h3_rollout(model, scope="model") as handle:
        base = engine.velocities(model, [request])
        wrap(model)
        tuned = engine.velocities(model, [request])
        assert {n for n in handle.report() if n.endswith(".lora")} == {
            f"blocks.{i}.{s}.lora"
            for i in (0, 1)
            for s in ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
        }
    assert not same(tuned, base)
    with install_h3_rollout(model, scope="projections"):
        assert close(engine.velocities(model, [request]), tuned)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_whole_model_has_the_bytes_of_tp_1(pool, weights, tp, lora):
    (expected,) = pool.run(whole_model, weights, 0, lora, 1, tp=1)
    for rank_result in pool.run(whole_model, weights, 4, lora, 1, tp=tp):
        assert all((a.view("i4") == b.view("i4")).all() for a, b in zip(rank_result, expected, strict=True))


def test_the_first_step_of_a_schedule_has_one_noise_level(pool, weights):
    """So a rank's columns of the AdaLN projections are a single row, whose strides say nothing."""
    (expected,) = pool.run(first_step, weights, tp=1)
    for rank_result in pool.run(first_step, weights, tp=2):
        assert all((a.view("i4") == b.view("i4")).all() for a, b in zip(rank_result, expected, strict=True))


@pytest.mark.parametrize(("tp", "sequence"), [(1, 2), (1, 4), (2, 2), (2, 4)])
def test_sequence_parallel_ranks_have_the_bytes_of_one(pool, weights, tp, sequence):
    """Ulysses over the engine's own groups, rows that do not divide by the ranks, beside tensor parallelism."""
    (expected,) = pool.run(whole_model, weights, 0, False, 1, tp=1)
    for rank_result in pool.run(whole_model, weights, 1, False, sequence, tp=tp, sequence=sequence):
        assert all((a.view("i4") == b.view("i4")).all() for a, b in zip(rank_result, expected, strict=True))
