"""Replay and the training step: exact log-probabilities, and gradients that no packing can change."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from h3_adapter_diffusers.cps import transition
from h3_adapter_diffusers.errors import BoundModelError, InputError, ReplayError
from h3_adapter_diffusers.install import install_h3_training
from h3_adapter_diffusers.testing.packings import packings, t2va
from h3_adapter_diffusers.testing.tiny import build
from h3_adapter_diffusers.training import AUDIO_SHIFT, VIDEO_SHIFT, Step, replay, sigma_grid, velocity
from h3_kernels.backward_session import backward_session
from h3_kernels.errors import LogicalKeysError, SessionError
from h3_kernels.logical_keys import LogicalKeys
from peft import LoraConfig
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

pytestmark = pytest.mark.engine

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]
SCOPES = ["projections", "model"]


def lora_model(seed=7, dtype=torch.bfloat16, alpha=16):
    model = build()
    torch.manual_seed(seed)
    model.add_adapter(LoraConfig(r=8, lora_alpha=alpha, target_modules=TARGETS, init_lora_weights=False))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    return model.train()


def recorded(model, request, *, index=2, seed=3):
    """A step as a rollout records it, sampled with the model's own velocity."""
    generator = torch.Generator().manual_seed(seed)
    video_grid, audio_grid = sigma_grid(8, VIDEO_SHIFT), sigma_grid(8, AUDIO_SHIFT)
    levels = (*video_grid[index : index + 2], *audio_grid[index : index + 2])
    with torch.no_grad():
        v = velocity(
            model, request.packed, request.video, request.audio, request.text, 1 - levels[0], 1 - levels[2]
        )
    following, log_probs = [], []
    for name, rows, speed, pair in zip(
        ("video", "audio"), (request.video, request.audio), v, (levels[:2], levels[2:]), strict=True
    ):
        noise = torch.randn(rows.shape, generator=generator)
        taken = transition(rows, speed, *pair, noise=noise, rows=request.packed.generated_rows(name))
        following.append(taken.next_sample)
        log_probs.append(taken.log_prob)
    step = Step(request.video, request.audio, *following, *levels)
    return step, 0.5 * log_probs[0] + 0.5 * log_probs[1]


def grads(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(a, b):
    assert a.keys() == b.keys()
    return [n for n in a if not torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8))]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("request_", packings(), ids=lambda r: r.name)
def test_replay_gives_the_recorded_log_prob_exactly(scope, request_):
    model = lora_model()
    handle = install_h3_training(model, scope=scope)
    step, log_prob = recorded(model, request_)
    result = replay(model, request_.packed, request_.text, step, handle=handle)
    assert result.difference(log_prob) == 0.0
    result.log_prob.backward()
    assert len(grads(model)) == 2 * 6 * 4
    shown = replay(
        model, request_.packed, request_.text, replace(step, sigma=step.sigma + 1e-3), handle=handle
    )
    assert shown.difference(log_prob) != 0.0


def test_condition_rows_receive_no_gradient_from_the_density():
    model = lora_model()
    request = packings()[1]
    install_h3_training(model, scope="model")
    step, _ = recorded(model, request)
    result = replay(model, request.packed, request.text, step)
    (grad,) = torch.autograd.grad(result.log_prob, result.video_velocity)
    assert not grad[~request.packed.video_generated].any()
    assert grad[request.packed.video_generated].all()


def test_a_record_that_does_not_fit_is_refused():
    model, request = lora_model(), packings()[0]
    step, _ = recorded(model, request)
    with pytest.raises(ReplayError, match=r"video rows must be \[12, channels\]"):
        replay(model, request.packed, request.text, replace(step, video=step.video[1:]))
    with pytest.raises(InputError, match="deterministic"):
        replay(model, request.packed, request.text, replace(step, sigma_next=0.0))


def step_gradients(scope, requests, *, checkpoint=False, order=None, ids=None, session=True, **adapter):
    """One optimizer step's gradients: a replayed step of every request, each its own microbatch, one
    session (or none)."""
    model = lora_model(**adapter)
    handle = install_h3_training(model, scope=scope)
    if checkpoint:
        model.enable_gradient_checkpointing()
    steps = [recorded(model, request) for request in requests]
    with backward_session(model) if session else nullcontext():
        for i in order or range(len(requests)):
            result = replay(
                model, requests[i].packed, requests[i].text, steps[i][0], handle=handle,
                sample_id=i if ids is None else ids[i],
            )  # fmt: skip
            (result.log_prob * (1 + i)).backward()
    return grads(model)


@pytest.mark.parametrize(
    ("dtype", "alpha"), [(torch.float32, 16), (torch.float32, 3), (torch.bfloat16, 3)], ids=str
)
def test_a_session_takes_fp32_masters_and_any_scale(dtype, alpha):
    """A of 8, alpha 3: B is rounded, scaled in bf16, and still reduced once: in any order of microbatches, the same
    gradients; of one microbatch, those of a plain backward. Adding microbatches up is the twin."""
    one, both = packings()[:1], packings()[:2]
    plain = step_gradients("model", one, session=False, dtype=dtype, alpha=alpha)
    assert {g.dtype for g in plain.values()} == {dtype}
    assert not same(plain, step_gradients("model", one, dtype=dtype, alpha=alpha))
    reference = step_gradients("model", both, dtype=dtype, alpha=alpha)
    assert not same(reference, step_gradients("model", both, order=[1, 0], dtype=dtype, alpha=alpha))
    assert same(reference, step_gradients("model", both, session=False, dtype=dtype, alpha=alpha))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda p: setattr(p, "grad", torch.zeros_like(p)), "already has a gradient"),
        (lambda p: p.detach().mul_(2), "was changed in place"),
    ],
)
def test_a_session_refuses_a_master_that_has_a_gradient_or_was_changed(change, match):
    model, request = lora_model(dtype=torch.float32), packings()[0]
    handle = install_h3_training(model)
    step, _ = recorded(model, request)
    master = next(p for n, p in model.named_parameters() if "lora_B" in n)

    def run():
        with backward_session(model):
            replay(model, request.packed, request.text, step, handle=handle).log_prob.backward()
            change(master)

    with pytest.raises(SessionError, match=match):
        run()


@pytest.mark.parametrize("scope", SCOPES)
def test_a_training_step_repeats_in_any_order_of_microbatches(scope):
    """Two runs; microbatches reversed; forwards before backwards would be the same records: the same
    gradients."""
    requests = packings()
    reference = step_gradients(scope, requests)
    assert not same(reference, step_gradients(scope, requests))
    assert not same(reference, step_gradients(scope, requests, order=(2, 0, 1)))


@pytest.mark.parametrize("scope", SCOPES)
def test_checkpointing_changes_no_gradient(scope):
    requests = packings()
    assert not same(step_gradients(scope, requests), step_gradients(scope, requests, checkpoint=True))


def test_a_checkpoint_that_loses_the_keys_is_refused():
    """torch's checkpoint_wrapper recomputes blocks by itself: without the rows' keys, so in another order."""
    request = t2va()
    for keyed in (False, True):
        model = lora_model()
        handle = install_h3_training(model, scope="projections")
        for i, block in enumerate(model.transformer_blocks):
            model.transformer_blocks[i] = checkpoint_wrapper(block)
        v, a = velocity(
            model, request.packed, request.video, request.audio, request.text, 0.6, 0.2,
            handle=handle if keyed else None,
        )  # fmt: skip
        loss = v.square().sum() + a.square().sum()
        if not keyed:
            loss.backward()
            continue
        with pytest.raises(BoundModelError, match="logical keys of its rows are lost"):
            loss.backward()


def test_in_scope_model_any_checkpoint_keeps_the_keys():
    """The stages of a forward hold its rows' keys themselves."""
    request, results = t2va(), []
    for wrapped in (False, True):
        model = lora_model()
        handle = install_h3_training(model, scope="model")
        for i, block in enumerate(model.transformer_blocks if wrapped else ()):
            model.transformer_blocks[i] = checkpoint_wrapper(block)
        v, a = velocity(
            model, request.packed, request.video, request.audio, request.text, 0.6, 0.2, handle=handle
        )
        (v.square().sum() + a.square().sum()).backward()
        results.append({n.replace("_checkpoint_wrapped_module.", ""): g for n, g in grads(model).items()})
    assert not same(*results)


@pytest.mark.parametrize("scope", SCOPES)
def test_another_identity_of_the_rows_is_another_order(scope):
    """Negative twin: swapping two samples' ids reorders the reduction of dA and dB, and bits change."""
    requests = packings()
    assert same(step_gradients(scope, requests), step_gradients(scope, requests, ids=(2, 1, 0)))


def test_accumulating_rounded_microbatches_is_order_dependent():
    """Negative twin: without a session, gradients are rounded per microbatch and then added."""
    results = []
    for order in ((0, 1, 2), (2, 1, 0)):
        model = lora_model()
        install_h3_training(model, scope="projections")
        for i in order:
            step, _ = recorded(model, packings()[i])
            (replay(model, packings()[i].packed, packings()[i].text, step).log_prob * (1 + i)).backward()
        results.append(grads(model))
    assert same(*results)


def test_the_same_rows_twice_in_a_session_are_refused():
    requests = [packings()[0]] * 2
    with pytest.raises(LogicalKeysError):
        step_gradients("projections", requests, ids=(4, 4))


def batch_gradients(scope, request, others, batches):
    """Gradients over four samples of one layout, cut into microbatches as `batches` says."""
    model = lora_model()
    handle = install_h3_training(model, scope=scope)
    packed = request.packed
    arguments = packed.arguments(0.6, 0.2)
    with backward_session(model):
        for samples in batches:
            streams = [torch.stack([others[s][i] for s in samples]) for i in range(3)]
            with handle.rows(packed.keys(samples, len(arguments["timestep"]))):
                out = model(
                    hidden_states=streams[0],
                    audio_hidden_states=streams[1],
                    encoder_hidden_states=streams[2],
                    **arguments,
                )
            (out.sample.square().sum() + out.audio_sample.square().sum()).backward()
    return grads(model)


@pytest.mark.parametrize("scope", SCOPES)
def test_microbatch_packing_changes_no_gradient(scope):
    """Four samples as 1+1+1+1, 2+2, 3+1 in another order, and 4: bitwise the same dA and dB."""
    request = t2va()
    generator = torch.Generator().manual_seed(9)
    shapes = (request.video.shape, request.audio.shape, request.text.shape)
    others = [[torch.randn(s, generator=generator) for s in shapes] for _ in range(4)]
    reference = batch_gradients(scope, request, others, [(0,), (1,), (2,), (3,)])
    for batches in ([(0, 1), (2, 3)], [(3, 1, 0), (2,)], [(0, 1, 2, 3)]):
        assert not same(reference, batch_gradients(scope, request, others, batches)), batches


def moved(request, seed=1):
    """The same request with its packed rows in another order."""
    place = torch.randperm(len(request.packed), generator=torch.Generator().manual_seed(seed))
    return replace(request, packed=request.packed.permuted(place))


def full_gradients(request, *, keyed, checkpoint=False):
    """Gradients of every parameter of the model, not only of an adapter."""
    model = build().train()
    handle = install_h3_training(model, scope="model")
    if checkpoint:
        model.enable_gradient_checkpointing()
    v, a = velocity(
        model, request.packed, request.video, request.audio, request.text, 0.6, 0.2,
        handle=handle if keyed else None,
    )  # fmt: skip
    (v.square().sum() + a.square().sum()).backward()
    return {"video": v.detach(), "audio": a.detach(), **grads(model)}


@pytest.mark.parametrize("request_", packings(), ids=lambda r: r.name)
def test_packed_row_order_changes_no_bit_of_any_parameters_gradient(request_):
    """Scope model, every parameter trained: outputs and all 62 gradients, rows permuted under logical
    keys."""
    reference = full_gradients(request_, keyed=True)
    assert len(reference) == 2 + 62
    assert not same(reference, full_gradients(moved(request_), keyed=True))
    assert not same(reference, full_gradients(moved(request_), keyed=True, checkpoint=True))
    assert same(reference, full_gradients(moved(request_), keyed=False)), "without keys the order shows"


def test_keys_that_do_not_fit_the_rows_are_refused():
    model, request = build(), t2va()
    handle = install_h3_training(model, scope="projections")
    keys = request.packed.keys(0, timesteps=2)
    with (
        handle.rows({**keys, "packed": keys["packed"][1:]}),
        pytest.raises(LogicalKeysError, match="keys for"),
    ):
        velocity(model, request.packed, request.video, request.audio, request.text, 0.6, 0.2)


def test_batch_keys_are_those_of_the_samples():
    packed = t2va().packed
    both = packed.keys((5, 2), timesteps=2)
    assert torch.equal(both["packed"], torch.cat((packed.keys(5, 2)["packed"], packed.keys(2, 2)["packed"])))
    LogicalKeys(both["packed"])
    for wrong in ((), (1, 1), -1):
        with pytest.raises(ReplayError, match="distinct and >= 0"):
            packed.keys(wrong, timesteps=2)
