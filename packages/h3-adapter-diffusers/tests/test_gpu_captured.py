"""Training steps replayed from CUDA graphs have the bits of launched ones, whatever happens between them."""

import contextlib
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from h3_adapter_diffusers import BoundModelError, capture_steps, handle_of, install_h3_training, velocity
from h3_adapter_diffusers.testing.packings import packings
from h3_adapter_diffusers.testing.tiny import build
from h3_kernels.backward_session import backward_session
from h3_kernels.errors import CaptureError
from h3_kernels.testing.tiny import SMALL
from peft import LoraConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),
]
DEVICE, RANK = "cuda", 16
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]


def lora_model(dtype=torch.bfloat16, alpha=2 * RANK):
    model = build(SMALL, device=DEVICE)
    model.requires_grad_(False)
    torch.manual_seed(5)
    model.add_adapter(LoraConfig(r=RANK, lora_alpha=alpha, target_modules=TARGETS, init_lora_weights=False))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(DEVICE, dtype)
    model.train()
    model.enable_gradient_checkpointing()
    return model


def requests():
    return [request.to(DEVICE) for request in packings(SMALL)]


def forward(model, request, handle=None, video_t=0.6, sample_id=0):
    """A scalar that every velocity enters, and the velocities."""
    v, a = velocity(
        model, request.packed, request.video, request.audio, request.text, video_t, 0.2, handle=handle,
        sample_id=sample_id,
    )  # fmt: skip
    return v.square().sum() + a.square().sum(), v, a


def grads(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def train(model, request, *, clear=True, **how):
    """Velocities and gradients of one step."""
    if clear:
        model.zero_grad(set_to_none=True)
    loss, v, a = forward(model, request, **how)
    loss.backward()
    return {"video": v.detach(), "audio": a.detach(), **grads(model)}


def differing(a, b):
    assert a.keys() == b.keys()
    return [n for n in a if not torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8))]


@pytest.mark.parametrize(
    ("keyed", "dtype", "alpha"),
    [(False, torch.bfloat16, 32), (True, torch.float32, 32), (True, torch.bfloat16, 7)],
    ids=str,
)
def test_replayed_steps_have_the_bits_of_launched_ones(keyed, dtype, alpha):
    """Three packings in turn, other timesteps, then the optimizer's step in place, then all again."""
    model = lora_model(dtype, alpha)
    installed = install_h3_training(model)
    handle = installed if keyed else None
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    seen = []
    for _ in range(2):
        plan = [(request, t) for request in requests() for t in (0.6, 0.35, 0.6)]
        launched = [train(model, request, handle=handle, video_t=t) for request, t in plan]
        with capture_steps(model) as steps:
            for (request, t), expected in zip(plan, launched, strict=True):
                assert not differing(train(model, request, handle=handle, video_t=t), expected)
            assert len(steps) == 3
        assert len(launched[0]) == 2 + 2 * 6 * 4
        assert differing(launched[0], launched[1]), "another input shows in the bits"
        seen.append(launched[0])
        optimizer.step()
    assert differing(*seen), "another weight shows in the bits"


def test_one_capture_follows_optimizer_steps_in_place():
    model, request = lora_model(), requests()[0]
    install_h3_training(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = {}
    start = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    for captured in (False, True):
        with torch.no_grad():
            for name, value in start.items():
                model.get_parameter(name).copy_(value)
        optimizer.state.clear()
        with capture_steps(model) if captured else contextlib.nullcontext() as steps:
            found[captured] = []
            for _ in range(4):
                found[captured].append(train(model, request))
                optimizer.step()
            assert steps is None or len(steps) == 1
    for launched, replayed in zip(found[False], found[True], strict=True):
        assert not differing(launched, replayed)
    assert differing(found[True][0], found[True][1])


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_add_up_as_launched_ones_do(set_to_none):
    model = lora_model()
    install_h3_training(model)
    results = []
    for captured in (False, True):
        with capture_steps(model) if captured else contextlib.nullcontext():
            kept = []
            for _ in range(2):
                model.zero_grad(set_to_none=set_to_none)
                for request in requests()[:2]:
                    train(model, request, clear=False)
                kept.append(grads(model))
            assert not differing(*kept)
            results.append(kept[0])
        model.zero_grad(set_to_none=True)
    assert not differing(*results)


def test_every_parameter_may_be_trained():
    model, request = build(SMALL, device=DEVICE).train(), requests()[1]
    handle = install_h3_training(model)
    model.enable_gradient_checkpointing()
    launched = train(model, request, handle=handle)
    assert len(launched) == 2 + 62
    with capture_steps(model):
        for _ in range(2):
            assert not differing(train(model, request, handle=handle), launched)


def test_rows_that_want_a_gradient_get_it():
    model, request = lora_model(), requests()[0]
    install_h3_training(model)
    request.video.requires_grad_()
    results = []
    for captured in (False, True):
        with capture_steps(model) if captured else contextlib.nullcontext():
            for _ in range(2):
                request.video.grad = None
                train(model, request)
            results.append({"video": request.video.grad.clone()})
    assert not differing(*results)


def test_permuted_rows_under_their_keys_are_the_same_capture_with_the_same_bits():
    """The graph sorts packed rows before it runs them, so another packing, or another sample, is no other kind."""
    model, request = lora_model(), requests()[0]
    handle = install_h3_training(model)
    place = torch.randperm(len(request.packed), generator=torch.Generator().manual_seed(1))
    moved = replace(request, packed=request.packed.permuted(place))
    launched = train(model, request, handle=handle)
    with capture_steps(model) as steps:
        assert not differing(train(model, request, handle=handle), launched)
        assert not differing(train(model, moved, handle=handle), launched)
        assert not differing(train(model, request, handle=handle, sample_id=9), launched)
        assert len(steps) == 1
        assert differing(train(model, moved), launched), "without keys the order shows"


def test_a_weight_that_moved_is_captured_anew():
    """Never replayed where the old tensor lay; in between, a backward is refused."""
    model, request = lora_model(), requests()[0]
    install_h3_training(model)
    master = next(p for n, p in model.named_parameters() if "lora_B" in n)
    with capture_steps(model) as steps:
        before = train(model, request)
        loss, *_ = forward(model, request)
        kept = master.data
        master.data = kept * 0.5
        with pytest.raises(CaptureError, match="moved or were changed"):
            loss.backward()
        moved = train(model, request)
        assert len(steps) == 1
        assert differing(before, moved)
        loss, *_ = forward(model, request)
        master.data.mul_(2)
        with torch.no_grad():
            master.mul_(0.5)
        with pytest.raises(CaptureError, match="moved or were changed"):
            loss.backward()
    assert not differing(moved, train(model, request))


def test_what_a_replay_would_overwrite_is_refused():
    model = lora_model()
    install_h3_training(model)
    first, second, _ = requests()
    with capture_steps(model):
        losses = [forward(model, request)[0] for request in (first, second)]
        with pytest.raises(CaptureError, match="after another step"):
            losses[0].backward()
        loss, *_ = forward(model, first)
        loss.backward(retain_graph=True)
        with pytest.raises(CaptureError, match="second time"):
            loss.backward()
        with pytest.raises(CaptureError, match="backward session"), backward_session(model):
            forward(model, first)
        model.transformer_blocks[0].register_forward_hook(lambda *_: None)
        with pytest.raises(BoundModelError, match="hooks or wrappers"):
            forward(model, first)


def test_graphs_kept_are_bounded_and_released():
    model = lora_model()
    install_h3_training(model)
    launched = [train(model, request) for request in requests()]
    with capture_steps(model, graphs=1) as steps:
        for _ in range(2):
            for request, expected in zip(requests(), launched, strict=True):
                assert not differing(train(model, request), expected)
                assert len(steps) == 1
    assert len(steps) == 0
    assert not differing(train(model, requests()[0]), launched[0])


def test_forwards_without_gradients_are_launched():
    model, request = lora_model(), requests()[0]
    install_h3_training(model)
    with capture_steps(model) as steps:
        with torch.no_grad():
            loss, *_ = forward(model, request)
        assert len(steps) == 0
        assert float(loss) == float(forward(model, request)[0])
        assert len(steps) == 1


def test_forwards_with_adapters_are_replayed(monkeypatch):
    """Without gradients; a weight changed in place, another scale and adapters off show in the bits."""
    model, (request, *_) = lora_model(), requests()
    install_h3_training(model)
    master = next(p for n, p in model.named_parameters() if "lora_B" in n)
    wrapper = model.transformer_blocks[0].attn.to_q
    changes = (
        lambda: None,
        lambda: master.data.mul_(0.5),
        lambda: wrapper.scaling.update(default=wrapper.scaling["default"] * 4),
        model.disable_adapters,
    )
    seen = []
    for change in changes:
        change()
        with torch.no_grad():
            launched = {"video": forward(model, request)[1]}
            with monkeypatch.context() as patch:
                patch.setenv("H3_CUDA_GRAPHS", "1")
                for _ in range(3):
                    assert not differing({"video": forward(model, request)[1]}, launched)
        seen.append(launched)
    assert len(handle_of(model)._binding._replays) == 3
    assert all(differing(a, b) for a, b in pairwise(seen))
