"""Trainer and rollout wired as an RL framework wires them: one install call on each side, weights and adapters synced
between steps, log-probabilities equal to the last bit."""

import inspect
import json
from dataclasses import replace

import pytest
import torch
from h3_adapter_diffusers import base_state, install_h3_training, joint_log_prob, replay, transition
from h3_adapter_diffusers.lora import is_wrapper
from h3_adapter_diffusers.testing.native import native_inputs
from h3_adapter_diffusers.testing.packings import fl2va
from h3_adapter_diffusers.testing.tiny import build, velocities
from h3_adapter_diffusers.training import AUDIO_SHIFT, VIDEO_SHIFT, Step, sigma_grid
from h3_kernels.testing import count_differing
from h3_mapper import H3Config, Layout
from h3_mapper.apply import diffusers_to_native
from h3_mapper.lora.engine import complete_stacked_mapping, map_lora_update_to_engine
from h3_mapper.sync import WeightSync, through_loaders
from h3_mapper.sync_proof import LiveDigest, assert_same, combine
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn

pytestmark = pytest.mark.engine

PADDING = 13
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]


@pytest.fixture(scope="module")
def engine():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what vLLM says while it is imported
        from h3_adapter_vllm.testing import engine as module
    with module.engine():
        yield module


@pytest.fixture
def engines(engine):
    """(trainer, rollout) on the same weights, nothing installed; the rollout keeps its AdaLN cache."""
    trainer, rollout = build(), engine.build(adaln_cache=True)
    state = diffusers_to_native(base_state(trainer), layout="release", config=dict(trainer.config))
    rollout.load_weights(state.items())
    return trainer, rollout


def differing(trainer, rollout, request):
    with torch.no_grad():
        theirs = rollout(**native_inputs([request], padding=PADDING))
    return sum(count_differing(a, b) for a, b in zip(velocities(trainer, request), theirs, strict=True))


# One call on each side.


def test_both_installs_take_the_same_words_with_the_same_defaults(engine):
    from h3_adapter_vllm import install_h3_rollout

    ours, theirs = (inspect.signature(f).parameters for f in (install_h3_training, install_h3_rollout))
    shared = ours.keys() & theirs.keys()
    assert shared == {"model", "mode", "tp", "contract", "provider", "attention", "scope"}
    assert all(ours[name].default == theirs[name].default for name in shared)


def test_the_same_call_without_arguments_gives_the_same_velocities(engines):
    from h3_adapter_vllm import install_h3_rollout

    trainer, rollout = engines
    assert differing(trainer, rollout, fl2va()) > 0
    with install_h3_training(trainer) as ours, install_h3_rollout(rollout) as theirs:
        assert differing(trainer, rollout, fl2va()) == 0
        nodes = [
            {name.removesuffix(".lora") for name in handle.report().bound()} for handle in (ours, theirs)
        ]
        assert nodes[0] == nodes[1]
        assert not ours.report().external()
        assert not theirs.report().external()
    assert differing(trainer, rollout, fl2va()) > 0


@pytest.mark.parametrize("scope", ["linears", "projections"])
def test_smaller_scopes_promise_each_linear_on_both_sides(engines, scope):
    """On the same input, a linear of one engine has the bits of the other's: q, k, v and the halves of fc1 as rows."""
    from h3_adapter_diffusers.weights import native_names
    from h3_adapter_vllm import install_h3_rollout

    trainer, rollout = engines
    with (
        install_h3_training(trainer, scope=scope) as ours,
        install_h3_rollout(rollout, scope=scope) as theirs,
        torch.no_grad(),
    ):
        velocities(trainer, fl2va())
        names = native_names(trainer)
        bound = [name for name in ours.report().bound() if not name.endswith(".lora")]
        assert {names[name] for name in bound} == theirs.linears.keys()
        for name in bound:
            linear, layer = trainer.get_submodule(name), theirs.linears[names[name]]
            x = torch.randn(5, linear.in_features).to(linear.weight.dtype)
            assert count_differing(linear(x), rows_of(layer(x)[0], name)) == 0, name


def rows_of(y, name):
    """The columns of a fused native output that one Diffusers linear computes, in its order."""
    leaf = name.rpartition(".attn.")[2]
    if leaf in ("to_q", "to_k", "to_v"):
        return y.chunk(3, dim=-1)[("to_q", "to_k", "to_v").index(leaf)].contiguous()
    if name.endswith("ff.net.0.proj"):
        gate, value = y.chunk(2, dim=-1)
        return torch.cat((value, gate), dim=-1)
    return y


# Full-parameter training.


def through_load_weights(trainer, rollout, config):
    """Buckets to the engine's own ``load_weights``: verl-omni's older form."""
    sync = WeightSync(config, Layout.RELEASE)
    for bucket in buckets(trainer):
        pairs = ((name.removeprefix("transformer."), tensor) for name, tensor in sync.push(bucket))
        rollout.load_weights(list(pairs))
    return sync.finish()


def through_weight_loaders(trainer, rollout, config):
    """Rows to ``param.weight_loader``: verl-omni's newer form, which bypasses the model's ``load_weights``."""
    live = {f"transformer.{n}": t for n, t in rollout.state_dict(keep_vars=True).items()}
    sync = WeightSync(config, Layout.RELEASE)
    for bucket in buckets(trainer):
        through_loaders(live, sync.push_shards(bucket))
    return sync.finish()


def into_live_tensors(trainer, rollout, config):
    """Straight into the parameters: h3_adapter_vllm's own form."""
    from h3_adapter_vllm import load_h3_weights

    return load_h3_weights(rollout, base_state(trainer).items(), layout="diffusers")


def buckets(trainer, size=7):
    pairs = [(f"transformer.{name}", tensor) for name, tensor in base_state(trainer).items()]
    return [pairs[i : i + size] for i in range(0, len(pairs), size)]


def assert_weights_equal(trainer, rollout, config):
    digests = []
    for layout, tensors in ((Layout.DIFFUSERS, base_state(trainer)), (Layout.MODULE, rollout.state_dict())):
        live = LiveDigest(config, layout)
        for name, tensor in tensors.items():
            live.add(name, tensor)
        digests.append(combine(config, [live.partials()]))
    assert_same(*digests)


def sampled(rollout, request, index, generator):
    """One recorded step of the rollout and its log-probability."""
    (s, s_next), (a, a_next) = (sigma_grid(6, x)[index : index + 2] for x in (VIDEO_SHIFT, AUDIO_SHIFT))
    with torch.no_grad():
        inputs = native_inputs([request], video_t=float(1 - s), audio_t=float(1 - a), padding=PADDING)
        speeds = rollout(**inputs)
    moves = [
        transition(
            x,
            v,
            *pair,
            noise=torch.randn(x.shape, generator=generator),
            rows=request.packed.generated_rows(name),
        )
        for name, x, v, pair in zip(
            ("video", "audio"),
            (request.video, request.audio),
            speeds,
            ((s, s_next), (a, a_next)),
            strict=True,
        )
    ]
    step = Step(request.video, request.audio, *(m.next_sample for m in moves), s, s_next, a, a_next)
    return step, joint_log_prob(*moves)


@pytest.mark.parametrize("sync", [through_load_weights, through_weight_loaders, into_live_tensors])
def test_full_parameter_training_keeps_the_log_probability_of_every_step(engines, sync):
    """Three optimizer steps over all 62 parameters, a sync before each. An unsynced step shows."""
    from h3_adapter_vllm import install_h3_rollout

    trainer, rollout = engines
    trainer.train()
    config = H3Config.from_mapping(dict(trainer.config))
    theirs, ours = install_h3_rollout(rollout), install_h3_training(trainer)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
    generator, request = torch.Generator().manual_seed(1), fl2va()
    for number in range(3):
        before = {name: t.clone() for name, t in base_state(trainer).items()}
        assert len(sync(trainer, rollout, config)) == len(rollout.state_dict())
        assert_weights_equal(trainer, rollout, config)
        step, log_prob = sampled(rollout, request, 1, generator)  # the same timesteps every time
        result = replay(trainer, request.packed, request.text, step, handle=ours, sample_id=number)
        assert result.difference(log_prob) == 0.0
        assert not theirs.report().refused()
        assert not theirs.report().external()
        (-torch.exp(result.log_prob - log_prob)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(not torch.equal(t, before[name]) for name, t in base_state(trainer).items())
    step, log_prob = sampled(rollout, request, 1, generator)
    assert replay(trainer, request.packed, request.text, step, handle=ours).difference(log_prob) != 0.0


def test_without_the_adapters_the_log_probability_differs_from_the_first_step(engines):
    trainer, rollout = engines
    step, log_prob = sampled(rollout, fl2va(), 1, torch.Generator().manual_seed(1))
    request = fl2va()
    assert replay(trainer, request.packed, request.text, step).difference(log_prob) != 0.0


# LoRA at any scale, through the engine's own manager.


def with_lora(trainer, rank, alpha, dtype=torch.bfloat16, **options):
    torch.manual_seed(7)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=TARGETS, init_lora_weights=False, **options)
    trainer.add_adapter(config)
    for name, parameter in trainer.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    return config


def serve(rollout, trainer, config, folder):
    """The adapter as a weight sync writes it, loaded and activated by vLLM-Omni's own manager."""
    from vllm.lora.request import LoRARequest
    from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager

    stated = {
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "target_modules": TARGETS,
        "use_rslora": config.use_rslora,
        "peft_type": "LORA",
        "bias": "none",
    }
    tensors = {name: t.detach() for name, t in get_peft_model_state_dict(trainer).items()}
    mapped, engine_config = map_lora_update_to_engine(
        tensors, stated, H3Config.from_mapping(dict(trainer.config)), requested_only=True
    )
    folder.mkdir()
    save_file(
        {f"base_model.model.{name}": t.clone() for name, t in mapped.items()},
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(json.dumps(engine_config))
    complete_stacked_mapping(rollout)
    pipeline = nn.Module()
    pipeline.transformer = rollout
    manager = DiffusionLoRAManager(pipeline, torch.device("cpu"), torch.bfloat16)
    manager.set_active_adapter(LoRARequest("policy", 1, str(folder)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rank", "alpha"), [(7, 3), (8, 16), (6, 7)])
def test_lora_of_any_scale_has_the_same_bits_on_both_sides(engines, tmp_path, rank, alpha, dtype):
    """alpha / rank is 3/7, 2 and 7/6; fp32 masters are rounded to bf16 before they are scaled, as the engine does."""
    from h3_adapter_vllm import install_h3_rollout

    trainer, rollout = engines
    base = velocities(trainer, fl2va())
    config = with_lora(trainer, rank, alpha, dtype)
    install_h3_training(trainer)
    install_h3_rollout(rollout)
    serve(rollout, trainer, config, tmp_path / "adapter")
    assert differing(trainer, rollout, fl2va()) == 0
    assert sum(count_differing(a, b) for a, b in zip(base, velocities(trainer, fl2va()), strict=True)) > 0


def test_a_scale_that_is_applied_to_the_product_shows(engines, tmp_path, monkeypatch):
    """Negative twin: PEFT's own order, scale times the unrounded term, at 3/7."""
    from h3_adapter_diffusers import graph_lora
    from h3_adapter_vllm import install_h3_rollout

    trainer, rollout = engines
    config = with_lora(trainer, 7, 3)
    install_h3_training(trainer)
    install_h3_rollout(rollout)
    serve(rollout, trainer, config, tmp_path / "adapter")
    scaled = graph_lora.active_terms

    def unscaled(name, wrapper, dtype):
        for term in scaled(name, wrapper, dtype):
            yield replace(term, b=wrapper.lora_B["default"].weight.to(dtype), scaling=3 / 7)

    monkeypatch.setattr(graph_lora, "active_terms", unscaled)
    assert any(is_wrapper(module) for module in trainer.modules())
    assert differing(trainer, rollout, fl2va()) > 0
