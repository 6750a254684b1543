"""Installing and removing: what is bound, what is said, what is refused, and that nothing is left behind."""

import functools
import json

import pytest
import torch
from diffusers.hooks import apply_layerwise_casting
from h3_adapter_diffusers.errors import BoundModelError, InstallError, RemoveError
from h3_adapter_diffusers.install import handle_of, install_h3_training
from h3_adapter_diffusers.testing.packings import fl2va, packings, t2va
from h3_adapter_diffusers.testing.tiny import build, velocities
from h3_kernels.binding import Bound, External, Refused
from h3_kernels.contract import PROJECTION, parallel_id
from h3_kernels.errors import ModeError
from h3_kernels.modes import Mode

pytestmark = pytest.mark.engine

SCOPES = ["linears", "projections", "model"]
IN_BLOCK = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2")


@pytest.fixture(scope="module")
def request_():
    return fl2va()


def bits(tensors):
    return [t.detach().contiguous().view(torch.int32) for t in tensors]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


@pytest.mark.parametrize("scope", SCOPES)
def test_everything_in_scope_is_bound_and_remove_restores_every_bit(scope, request_):
    model = build()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stock = velocities(model, request_)
    handle = install_h3_training(model, scope=scope)
    strict = velocities(model, request_)
    assert same(strict, velocities(model, request_)), "a forward repeats"
    if scope != "linears":  # at this size their roundings to bf16 happen to agree
        assert not same(strict, stock)
    report = handle.report()
    assert not report.refused()
    assert len(report.bound()) == {"linears": 24, "projections": 34, "model": 69}[scope]
    assert handle_of(model) is handle
    assert handle.installed
    handle.remove()
    handle.remove()
    assert not handle.installed
    assert handle_of(model) is None
    assert all("forward" not in vars(module) for module in model.modules())
    assert same(velocities(model, request_), stock)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_the_report_names_contract_and_provider_of_each_linear(request_):
    model = build()
    handle = install_h3_training(model, scope="projections")
    assert all(isinstance(handle.report()[f"transformer_blocks.0.{n}"], Refused) for n in IN_BLOCK), (
        "not run yet"
    )
    velocities(model, request_)
    report = handle.report()
    for name in IN_BLOCK:
        state = report[f"transformer_blocks.1.{name}"]
        row = name in ("attn.to_out.0", "ff.net.2")
        assert isinstance(state, Bound)
        assert (state.contract, state.provider) == (parallel_id(8) if row else PROJECTION, "reference")
    assert isinstance(report["transformer_blocks.0.attn.attention"], External)
    assert list(report)[:3] == ["time_proj", "time_embedder.act", "rope"]
    document = json.loads(report.to_json())
    assert len(document["nodes"]) == len(report)
    assert "mode strict, scope projections, h3-parallel-v1-u8" in str(report).splitlines()[0]


def test_a_bypassed_linear_is_reported(request_):
    model = build()
    handle = install_h3_training(model, scope="projections")
    velocities(model, request_)
    layer = model.transformer_blocks[0].ff.net[2]
    model.transformer_blocks[0].ff.net[2] = torch.nn.Sequential()
    model.transformer_blocks[0].ff.net[2] = layer
    velocities(model, request_)
    assert isinstance(handle.report()["transformer_blocks.0.ff.net.2"], Bound)
    model.transformer_blocks[0].ff.net[2] = torch.nn.Linear(384, 80, bias=False, dtype=torch.bfloat16)
    assert "replaced after the install" in handle.report()["transformer_blocks.0.ff.net.2"].detail
    with pytest.raises(BoundModelError, match="was replaced after the install"):
        velocities(model, request_)


@pytest.mark.parametrize("scope", SCOPES)
def test_audit_returns_diffusers_bits_and_says_what_differs(scope, request_):
    model = build()
    stock = velocities(model, request_)
    handle = install_h3_training(model, scope=scope, mode="audit")
    assert same(velocities(model, request_), stock)
    rows = handle.audit()
    assert any(row.differing for row in rows)
    assert all(row.compared for row in rows)
    assert not handle.report().bound()
    assert "values differ from" in str(handle.report())


def test_audit_compares_with_the_contract_and_not_with_itself(request_):
    """Negative twin: a weight moved between the two computations must show in every value of the row."""
    model = build()
    handle = install_h3_training(model, scope="model", mode="audit")
    velocities(model, request_)
    exact = {row.node for row in handle.audit() if not row.differing}
    assert "blocks.0.attn.qkv_proj" in exact | {row.node for row in handle.audit()}
    assert {"blocks.0.norm1", "blocks.0.attn_residual"}.isdisjoint(exact), "Diffusers rounds in between"


def test_off_touches_nothing(request_):
    model = build()
    stock = velocities(model, request_)
    with install_h3_training(model, mode="off", scope="projections") as handle:
        assert all("forward" not in vars(module) for module in model.modules())
        assert same(velocities(model, request_), stock)
        assert len(handle.report().external()) == len(handle.report())


def test_the_environment_overrides_the_mode(monkeypatch):
    monkeypatch.setenv("H3_MODE", "audit")
    model = build()
    with install_h3_training(model, mode="strict", scope="projections") as handle:
        assert handle.mode is Mode.AUDIT
    monkeypatch.setenv("H3_MODE", "fast")
    with pytest.raises(ModeError, match="H3_MODE mode 'fast'"):
        install_h3_training(model, scope="projections")


def test_installing_again_is_the_same_handle_or_an_error():
    model = build()
    handle = install_h3_training(model, scope="projections")
    assert install_h3_training(model, scope="projections") is handle
    with pytest.raises(InstallError, match="already installed with other arguments"):
        install_h3_training(model, scope="model")


@pytest.mark.parametrize("scope", ["projections", "model"])
def test_a_batch_of_packed_requests_is_each_request_alone(scope):
    """The batch axis replicates a layout: every item has the bits it has alone."""
    model, r = build(), t2va()
    install_h3_training(model, scope=scope)
    arguments = r.packed.arguments(0.7, 0.3)

    def run(video, audio, text):
        with torch.no_grad():
            return model(
                hidden_states=video,
                audio_hidden_states=audio,
                encoder_hidden_states=text,
                **arguments,
            )

    other = torch.randn_like(r.video), torch.randn_like(r.audio), torch.randn_like(r.text)
    both = run(*(torch.stack(pair) for pair in zip((r.video, r.audio, r.text), other, strict=True)))
    for item, rows in enumerate(((r.video, r.audio, r.text), other)):
        alone = run(*(t[None] for t in rows))
        assert same((both.sample[item], both.audio_sample[item]), (alone.sample[0], alone.audio_sample[0]))


@pytest.mark.parametrize("scope", SCOPES)
def test_fused_projections_before_or_after_have_the_unfused_bits(scope, request_):
    model = build()
    handle = install_h3_training(model, scope=scope)
    separate = velocities(model, request_)
    model.fuse_qkv_projections()
    assert same(velocities(model, request_), separate)
    assert not handle.report().refused()
    if scope != "model":
        assert isinstance(handle.report()["transformer_blocks.0.attn.to_qkv"], Bound)
        assert "transformer_blocks.0.attn.to_q" not in handle.report()
    handle.remove()
    install_h3_training(model, scope=scope)
    assert same(velocities(model, request_), separate)
    model.unfuse_qkv_projections()
    assert same(velocities(model, request_), separate)


def test_fused_weights_are_what_runs(request_):
    """Negative twin: the fused copy is used, not to_q beside it."""
    model = build()
    install_h3_training(model, scope="model")
    model.fuse_qkv_projections()
    before = velocities(model, request_)
    model.transformer_blocks[0].attn.to_qkv.weight.data[0, 0] += 1
    assert not same(velocities(model, request_), before)


@pytest.mark.parametrize("scope", SCOPES)
def test_autocast_is_refused(scope, request_):
    model = build()
    install_h3_training(model, scope=scope)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(BoundModelError, match=r"torch\.autocast is on"),
    ):
        velocities(model, request_)


def test_a_cast_after_the_install_is_refused(request_):
    model = build()
    install_h3_training(model, scope="projections")
    model.to(torch.float32)
    with pytest.raises(BoundModelError, match=r"weight is torch\.float32, was torch\.bfloat16 at install"):
        velocities(model, request_)


def half(model):
    model.transformer_blocks[0].attn.to_q.weight.data = model.transformer_blocks[
        0
    ].attn.to_q.weight.data.half()


def quantised(model):
    model.transformer_blocks[1].ff.net[2] = torch.nn.Identity()


def hooked(model):
    apply_layerwise_casting(model, torch.bfloat16, torch.bfloat16)


def missing(model):
    del model.transformer_blocks[0].attn.to_k


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (half, r"transformer_blocks.0.attn.to_q: weight is torch\.float16"),
        (quantised, r"transformer_blocks.1.ff.net.2: is a Identity, expected a Linear"),
        (hooked, "already replaced on the instance"),
        (missing, r"transformer_blocks.0.attn.to_k: no such module"),
        (lambda model: model.to("meta"), "on the meta device"),
    ],
    ids=["half", "quantised", "hooked", "missing", "meta"],
)
def test_what_cannot_be_bound_is_refused_and_nothing_changes(scope, change, message):
    model = build()
    change(model)
    before = {id(m) for m in model.modules() if "forward" in vars(m)}
    with pytest.raises(InstallError, match=message):
        install_h3_training(model, scope=scope)
    assert {id(m) for m in model.modules() if "forward" in vars(m)} == before
    assert handle_of(model) is None


@pytest.mark.parametrize("scope", SCOPES)
def test_a_provider_that_cannot_serve_is_refused(scope):
    model = build()
    with pytest.raises(InstallError, match="no provider is named 'fast'"):
        install_h3_training(model, scope=scope, provider="fast")
    assert handle_of(model) is None


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("mode", ["strict", "audit"])
@pytest.mark.parametrize(
    "wrong", [{"contract": "h3-parallel-v1-u16"}, {"provider": "fast"}, {"attention": "fast"}]
)
def test_a_wrong_name_is_one_reason_that_lists_the_known_ones(scope, mode, wrong):
    model = build()
    with pytest.raises(InstallError, match=r"; known: .*(h3-parallel-v1-u8|reference|aten-flash)") as caught:
        install_h3_training(model, scope=scope, mode=mode, **wrong)
    assert len(caught.value.reasons) == 1
    assert len(str(caught.value)) < 200
    assert handle_of(model) is None


def test_another_model_is_refused():
    with pytest.raises(InstallError, match="expected a MiniMaxH3Transformer3DModel"):
        install_h3_training(torch.nn.Linear(2, 2), scope="projections")


@pytest.mark.parametrize("mode", ["strict", "audit", "off"])
@pytest.mark.parametrize("nothing", [None, object()])
def test_what_is_no_module_is_refused_naming_the_expected_class(nothing, mode):
    with pytest.raises(InstallError, match="expected a MiniMaxH3Transformer3DModel"):
        install_h3_training(nothing, mode=mode, scope="projections")


@pytest.mark.parametrize("scope", SCOPES)
def test_a_hook_put_over_a_bound_module_is_left_in_place_and_said(scope):
    model = build()
    handle = install_h3_training(model, scope=scope)
    module = model if scope == "model" else model.transformer_blocks[0].attn.to_q
    ours = module.forward
    module.forward = functools.partial(ours)
    with pytest.raises(RemoveError, match="1 modules were hooked after the install"):
        handle.remove()
    del vars(module)["forward"]
    assert all("forward" not in vars(m) for m in model.modules())


@pytest.mark.parametrize("request_", packings(), ids=lambda r: r.name)
@pytest.mark.parametrize("pattern", ["*", "blocks.1.*", "*.norm2"])
def test_overlay_keeps_nodes_on_diffusers_arithmetic(request_, pattern):
    """With every node kept, the graph has the bits of the stock model: the overlay is Diffusers' own
    arithmetic."""
    model = build()
    stock = velocities(model, request_)
    with install_h3_training(model, scope="model"):
        strict = velocities(model, request_)
    with install_h3_training(model, scope="model", overlay=pattern) as handle:
        kept = velocities(model, request_)
        assert handle.report().external()
    assert same(kept, stock) == (pattern == "*")
    assert not same(kept, strict)


def test_overlay_of_linears(request_):
    model = build()
    with install_h3_training(model, overlay=["*.ff.*", "proj_in"], scope="projections") as handle:
        velocities(model, request_)
        report = handle.report()
    assert isinstance(report["proj_in"], External)
    assert isinstance(report["transformer_blocks.0.ff.net.2"], External)
    assert "kept by the overlay" in report["proj_in"].detail
    assert isinstance(report["audio_proj_in"], Bound)


@pytest.mark.parametrize("scope", SCOPES)
def test_an_overlay_that_names_nothing_is_refused(scope):
    with pytest.raises(InstallError, match=r"overlay 'blocks\.9' names no"):
        install_h3_training(build(), scope=scope, overlay="blocks.9")


def test_replacements_need_the_model_scope():
    with pytest.raises(InstallError, match="need scope='model'"):
        install_h3_training(build(), overlay={"proj_in": lambda strict, x: strict(x)}, scope="projections")
