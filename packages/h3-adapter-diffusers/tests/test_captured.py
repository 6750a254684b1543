"""When a training step is captured, kept, captured anew or refused. Its bits on a device: test_gpu_captured.py.

The stand-in for a CUDA graph runs its block once and nothing on a replay; `computing` computes anew, from the tensors
that the graph holds.
"""

import contextlib
from dataclasses import replace

import pytest
import torch
from h3_adapter_diffusers import (
    BoundModelError,
    InstallError,
    capture_steps,
    install_h3_training,
    step_capture,
)
from h3_adapter_diffusers.testing.packings import packings, t2va
from h3_adapter_diffusers.testing.tiny import build
from h3_adapter_diffusers.training import velocity
from h3_kernels.backward_session import backward_session
from h3_kernels.errors import CaptureError
from h3_kernels.graph import StepGraphs
from h3_kernels.testing.graphs import Graph, stand_in
from peft import LoraConfig

pytestmark = pytest.mark.engine
TARGETS = ["to_q", "to_out.0", "ff.net.0.proj"]
_OBSTACLES = step_capture.obstacles


@pytest.fixture(autouse=True)
def captures(monkeypatch):
    """Counts captured graphs, two a step; CUDA's own parts replaced."""
    monkeypatch.setattr(step_capture, "obstacles", lambda *a: [r for r in _OBSTACLES(*a) if "CUDA" not in r])
    return stand_in(monkeypatch)


class Anew:
    """A graph that runs a function."""

    def __init__(self, function):
        self.function = function

    def replay(self):
        Graph.replays += 1
        self.function()


@pytest.fixture
def computing(monkeypatch):
    """Replays compute what was captured from the inputs, weights and gradients that lie in the graph's tensors."""
    record = StepGraphs._record

    def recorded(graphs, step, own, wanted, given):
        captured, ran = record(graphs, step, own, wanted, given), []

        def forward():
            with step.leaves() as leaves, torch.enable_grad():
                ran[:] = [step.forward(own), leaves]
            for kept, fresh in zip(captured.outputs, ran[0], strict=True):
                kept.copy_(fresh.detach())

        def backward():
            outputs, leaves = ran
            with step.leaves():  # recomputation reads them
                grads = torch.autograd.grad(outputs, leaves, given, allow_unused=True)
            for kept, fresh in zip(captured.grads, grads, strict=True):
                kept.copy_(fresh)

        return replace(captured, forward=Anew(forward), backward=Anew(backward))

    monkeypatch.setattr(StepGraphs, "_record", recorded)


@pytest.fixture
def model():
    model = build().requires_grad_(False)
    torch.manual_seed(7)
    model.add_adapter(LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, init_lora_weights=False))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.bfloat16()
    model.train()
    model.enable_gradient_checkpointing()
    return model


def loss_of(model, request, handle=None, sample_id=0):
    v, a = velocity(
        model, request.packed, request.video, request.audio, request.text, 0.6, 0.2, handle=handle,
        sample_id=sample_id,
    )  # fmt: skip
    return v.square().sum() + a.square().sum()


def train(model, request, *, clear=True, **how):
    if clear:
        model.zero_grad(set_to_none=True)
    loss_of(model, request, **how).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def differing(a, b):
    assert a.keys() == b.keys()
    return [n for n in a if not torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8))]


@pytest.mark.parametrize("keyed", [False, True])
def test_a_kind_is_captured_at_its_first_step_and_replayed_from_then_on(model, captures, computing, keyed):
    """Every gradient finds its parameter, the parameters are the model's own again, and no replay can overwrite one."""
    handle = install_h3_training(model)
    own = {n: id(p) for n, p in model.named_parameters()}
    launched = train(model, t2va(), handle=handle if keyed else None)
    with capture_steps(model) as steps:
        for _ in range(3):
            found = train(model, t2va(), handle=handle if keyed else None)
            assert not differing(found, launched)
        assert (len(captures), Graph.replays, len(steps)) == (2, 6, 1)
        (kept,) = steps._graphs._known.values()
        inside = {g.data_ptr() for g in kept.grads}
        assert not inside & {p.grad.data_ptr() for p in model.parameters() if p.grad is not None}
        train(model, packings()[1])
        assert (len(captures), len(steps)) == (4, 2)
    assert {n: id(p) for n, p in model.named_parameters()} == own
    train(model, t2va())
    assert len(captures) == 4, "released steps are launched"


def test_gradients_add_up_and_zeroing_in_place_reaches_no_graph(model, computing):
    install_h3_training(model)
    results = []
    for captured in (False, True):
        with capture_steps(model) if captured else contextlib.nullcontext():
            train(model, t2va())
            twice = train(model, t2va(), clear=False)
            model.zero_grad(set_to_none=False)
            results.append((twice, train(model, t2va(), clear=False)))
    for launched, replayed in zip(*results, strict=True):
        assert not differing(launched, replayed)
    assert differing(results[1][0], results[1][1])


def test_other_inputs_and_an_optimizer_step_are_followed(model, captures, computing):
    install_h3_training(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    request = t2va()
    other = replace(request, video=request.video.flip(0), text=request.text * 0.5)
    launched, replayed = [], []
    for results, context in ((launched, contextlib.nullcontext()), (replayed, capture_steps(model))):
        start = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        with context:
            for rows in (request, other, request):
                results.append(train(model, rows))
                optimizer.step()
        with torch.no_grad():
            for name, value in start.items():
                model.get_parameter(name).copy_(value)
    assert len(captures) == 2
    for a, b in zip(launched, replayed, strict=True):
        assert not differing(a, b)
    assert differing(replayed[0], replayed[1])
    assert differing(replayed[0], replayed[2])


def _scale(model):
    wrapper = model.transformer_blocks[0].attn.to_q
    wrapper.scaling["default"] *= 2


def _switch(model):
    model.disable_gradient_checkpointing()


def _freeze(model):
    next(p for p in model.parameters() if p.requires_grad).requires_grad_(False)


@pytest.mark.parametrize("change", [_scale, _switch, _freeze])
def test_what_the_host_has_decided_is_another_capture(model, captures, change):
    install_h3_training(model)
    with capture_steps(model):
        train(model, t2va())
        train(model, t2va())
        assert len(captures) == 2
        change(model)
        train(model, t2va())
        assert len(captures) == 4


def test_a_weight_that_moved_is_captured_anew_and_one_changed_in_place_is_not(model, captures, caplog):
    install_h3_training(model)
    master = next(p for p in model.parameters() if p.requires_grad)
    with capture_steps(model) as steps:
        train(model, t2va())
        with torch.no_grad():
            master.mul_(2)
        train(model, t2va())
        assert (len(captures), caplog.messages) == (2, [])
        master.data = master.data.clone()
        train(model, t2va())
        assert (len(captures), len(steps)) == (4, 1)
        assert "weights moved" in caplog.text


@pytest.mark.parametrize(
    "change", [lambda p: p.mul_(2), lambda p: setattr(p, "data", p.data.clone())], ids=["changed", "moved"]
)
def test_a_weight_changed_between_forward_and_backward_is_refused(model, change):
    install_h3_training(model)
    master = next(p for p in model.parameters() if p.requires_grad)
    with capture_steps(model):
        loss = loss_of(model, t2va())
        with torch.no_grad():
            change(master)
        with pytest.raises(CaptureError, match="moved or were changed in place"):
            loss.backward()
        loss_of(model, t2va()).backward()


def test_the_order_of_keys_is_kept_and_their_values_are_not(model, captures):
    handle = install_h3_training(model)
    request = t2va()
    with capture_steps(model) as steps:
        train(model, request, handle=handle)
        train(model, request, handle=handle, sample_id=5)
        place = torch.randperm(len(request.packed), generator=torch.Generator().manual_seed(1))
        train(model, replace(request, packed=request.packed.permuted(place)), handle=handle)
        assert len(steps) == 1, "packed rows are sorted before the graph"
        packed = replace(request.packed, video_indices=request.packed.video_indices.flip(0))
        train(model, replace(request, packed=packed, video=request.video.flip(0)), handle=handle)
        assert len(steps) == 2, "latent rows are not"
        train(model, request)  # no keys
        assert len(steps) == 3


def test_a_backward_after_another_step_or_for_the_second_time_is_refused(model):
    install_h3_training(model)
    with capture_steps(model):
        losses = [loss_of(model, t2va()) for _ in range(2)]
        with pytest.raises(CaptureError, match="after another step"):
            losses[0].backward()
        losses[1].backward(retain_graph=True)
        with pytest.raises(CaptureError, match="second time"):
            losses[1].backward()


def _hook(model):
    model.transformer_blocks[1].register_forward_hook(lambda *_: None)


def _checkpointing(model):
    model.enable_gradient_checkpointing(lambda block, *reads: block(*reads))


def _dropout(model):
    model.transformer_blocks[0].attn.to_q.lora_dropout["default"] = torch.nn.Dropout(0.5)


@pytest.mark.parametrize(
    ("change", "match"),
    [(_hook, "hooks or wrappers"), (_checkpointing, "checkpointing function"), (_dropout, "dropout")],
)
def test_what_a_replay_would_leave_out_is_refused(model, captures, change, match):
    install_h3_training(model)
    change(model)
    with capture_steps(model), pytest.raises(BoundModelError, match=match):
        loss_of(model, t2va())
    assert not captures


def test_a_backward_session_is_refused(model):
    handle = install_h3_training(model)
    with (
        capture_steps(model),
        pytest.raises(CaptureError, match="backward session"),
        backward_session(model),
    ):
        loss_of(model, t2va(), handle)


def test_what_cannot_be_captured_says_so_in_one_line(model, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    install_h3_training(model)
    monkeypatch.setattr(torch.cuda, "graph", fails)
    with capture_steps(model) as steps:
        with pytest.raises(CaptureError, match=r"rows cannot be captured: operation not permitted [^\n]*$"):
            loss_of(model, t2va())
        assert len(steps) == 0
    loss_of(model, t2va()).backward()


def test_an_install_that_cannot_be_captured_is_refused_with_the_reason(monkeypatch):
    model = build()
    with pytest.raises(InstallError, match="call install_h3_training first"):
        capture_steps(model)
    for words, match in (
        ({"scope": "projections"}, "not in projections and strict"),
        ({"mode": "audit"}, "not in model and audit"),
        ({"overlay": "blocks.0.norm1"}, "an overlay"),
    ):
        with install_h3_training(model, **words), pytest.raises(InstallError, match=match):
            capture_steps(model)
    with install_h3_training(model):
        with capture_steps(model), pytest.raises(InstallError, match="captured already"):
            capture_steps(model)
        with pytest.raises(CaptureError, match="at least 1"):
            capture_steps(model, graphs=0)
        monkeypatch.setattr(step_capture, "obstacles", _OBSTACLES)
        with pytest.raises(InstallError, match="move the model to a CUDA device"):
            capture_steps(model)


def test_the_oldest_step_goes_first_and_removal_releases(model, captures):
    handle = install_h3_training(model)
    steps = capture_steps(model, graphs=2)
    for request in packings():
        train(model, request)
    assert len(steps) == 2
    train(model, packings()[0])
    assert len(captures) == 2 * 4
    handle.remove()
    assert len(steps) == 0
    assert isinstance(steps._graphs, StepGraphs)
