"""LoRA on bound linears: the strict term wherever PEFT puts its wrapper, and the gradient gate."""

import pytest
import torch
from h3_adapter_diffusers.errors import BoundModelError, InputError, InstallError
from h3_adapter_diffusers.install import install_h3_training
from h3_adapter_diffusers.lora_gate import lora_gate
from h3_adapter_diffusers.testing.packings import fl2va
from h3_adapter_diffusers.testing.tiny import build, velocities
from h3_adapter_diffusers.training import velocity
from h3_kernels.binding import Bound
from h3_kernels.lora import ColumnStyle, RowStyle, lora_linear
from peft import LoHaConfig, LoraConfig

pytestmark = pytest.mark.engine

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]
SCOPES = ["projections", "model"]


def add_lora(model, *, name="default", alpha=16, rank=8, seed=7, **options):
    torch.manual_seed(seed)
    options = {"target_modules": TARGETS, "init_lora_weights": False, **options}
    model.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, **options), adapter_name=name)
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            parameter.data = parameter.data.bfloat16()
    return model


def bits(*tensors):
    return [t.detach().contiguous().view(torch.uint8).clone() for t in tensors]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("scope", SCOPES)
def test_wrapped_before_or_after_the_install_gives_the_same_bits(scope):
    request = fl2va()
    before = add_lora(build())
    install_h3_training(before, scope=scope)
    after = build()
    handle = install_h3_training(after, scope=scope)
    plain = bits(*velocities(after, request))
    add_lora(after)
    assert same(bits(*velocities(before, request)), bits(*velocities(after, request)))
    assert not same(plain, bits(*velocities(after, request)))
    assert not handle.report().refused()


def test_the_report_names_linear_and_term_of_a_wrapped_node():
    model = add_lora(build())
    handle = install_h3_training(model, scope="model")
    velocities(model, fl2va())
    report = handle.report()
    for node in (
        "blocks.0.attn.qkv_proj",
        "blocks.0.attn.qkv_proj.lora",
        "token_refiner.blocks.1.mlp.fc2.lora",
    ):
        assert isinstance(report[node], Bound), node
    assert report["blocks.0.attn.qkv_proj"].provider == "reference"
    assert len(report.bound()) == 69 + 4 * 4


def test_the_term_around_a_row_parallel_linear_shrinks_by_the_unit_tree():
    model = add_lora(build())
    u = torch.randn(300, 128, generator=torch.Generator().manual_seed(0)) * 100
    x = torch.cat((u, -u), dim=1).bfloat16()  # halves that cancel show the order of the sum
    with install_h3_training(model, scope="projections"):
        wrapper = model.transformer_blocks[0].attn.to_out[0]
        a, b = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
        a.data[:, 128:] = a.data[:, :128] * 1.01
        ours = wrapper(x)
        base = wrapper.base_layer(x)
    assert same(bits(ours), bits(lora_linear(x, base, a, b, 2.0, style=RowStyle())))
    assert not same(bits(ours), bits(lora_linear(x, base, a, b, 2.0, style=ColumnStyle())))


@pytest.mark.parametrize("scope", ["linears", *SCOPES])
def test_audit_returns_peft_bits_and_compares_with_the_strict_term(scope):
    model, request = add_lora(build()), fl2va()
    stock = bits(*velocities(model, request))
    handle = install_h3_training(model, scope=scope, mode="audit")
    assert same(bits(*velocities(model, request)), stock)
    assert all(row.compared for row in handle.audit())
    if scope != "linears":  # at this size their roundings to bf16 happen to agree
        assert any(row.differing for row in handle.audit())


def test_kept_nodes_have_peft_bits():
    """With every node kept, the wrapped model has its own bits; with the linears strict, it has others."""
    model, request = add_lora(build()), fl2va()
    stock = bits(*velocities(model, request))
    for overlay, equal in (("*", True), ("*.norm2", False)):
        with install_h3_training(model, scope="model", overlay=overlay):
            assert same(bits(*velocities(model, request)), stock) == equal


@pytest.mark.parametrize("scope", SCOPES)
def test_unloading_disabling_and_zero_weights_leave_the_base_bits(scope):
    model, request = build(), fl2va()
    handle = install_h3_training(model, scope=scope)
    plain = bits(*velocities(model, request))
    add_lora(model)
    assert not same(plain, bits(*velocities(model, request)))
    model.disable_adapters()
    assert same(plain, bits(*velocities(model, request)))
    model.enable_adapters()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    assert same(plain, bits(*velocities(model, request)))
    model.delete_adapters("default")
    model.unload_lora()
    assert same(plain, bits(*velocities(model, request)))
    handle.remove()


@pytest.mark.parametrize("scope", SCOPES)
def test_fp32_masters_are_rounded_as_the_weight_sync_rounds_them(scope):
    """An fp32 adapter computes the bits of its bf16 copy, and receives fp32 gradients."""
    request = fl2va()
    masters = add_lora(build())
    copy = add_lora(build())
    for (_, p), (name, q) in zip(masters.named_parameters(), copy.named_parameters(), strict=True):
        if "lora_" in name:
            p.data = p.data.float() * 1.001
            q.data = p.data.bfloat16()
    outputs = []
    for model in (masters, copy):
        handle = install_h3_training(model, scope=scope)
        video, audio = velocity(
            model, request.packed, request.video, request.audio, request.text, 0.7, 0.3, handle=handle
        )
        (video.square().mean() + audio.square().mean()).backward()
        outputs.append(bits(video, audio))
    assert same(*outputs)
    grads = {p.grad.dtype for n, p in masters.named_parameters() if "lora_" in n}
    assert grads == {torch.float32}


@pytest.mark.parametrize("scope", SCOPES)
def test_a_scale_that_is_no_power_of_two_is_the_rollouts(scope):
    """The engine multiplies the scale into B in bf16 before the product; so does the strict term."""
    request = fl2va()
    model = add_lora(build(), alpha=12)
    folded = add_lora(build(), alpha=8)
    for name, parameter in folded.named_parameters():
        if "lora_B" in name:
            parameter.data *= 1.5
    for m in (model, folded):
        install_h3_training(m, scope=scope)
    assert same(bits(*velocities(model, request)), bits(*velocities(folded, request)))


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    ("options", "message"),
    [({"use_dora": True}, "variant"), ({"lora_bias": True}, "bias"), ({"lora_dropout": 0.1}, "dropout")],
)
def test_what_a_rollout_does_not_compute_is_refused(scope, options, message):
    if "lora_bias" in options:
        options = {**options, "target_modules": ["context_embedder"]}
    model = add_lora(build().train(), **options)
    with pytest.raises(InstallError, match=message):
        install_h3_training(model, scope=scope)
    assert "forward" not in vars(model.transformer_blocks[0].attn.to_q)
    late = build().train()
    install_h3_training(late, scope=scope)
    add_lora(late, **options)
    with pytest.raises(BoundModelError, match=message):
        velocities(late, fl2va())


def test_dropout_in_eval_is_no_obstacle():
    model = add_lora(build(), lora_dropout=0.1).eval()
    install_h3_training(model, scope="projections")
    velocities(model, fl2va())


def test_other_adapters_are_refused():
    model = build()
    model.add_adapter(LoHaConfig(r=4, target_modules=["to_q"]), adapter_name="loha")
    with pytest.raises(InstallError, match="loha has no contract"):
        install_h3_training(model, scope="projections")


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
@pytest.mark.parametrize("scope", SCOPES)
def test_active_adapters_are_all_added(scope):
    request = fl2va()
    model = add_lora(add_lora(build()), name="second", seed=8)
    install_h3_training(model, scope=scope)
    seen = []
    for active in (["default"], ["second"], ["default", "second"]):
        model.set_adapter(active)
        seen.append(bits(*velocities(model, request)))
    assert not same(seen[0], seen[1])
    assert not same(seen[0], seen[2])
    assert not same(seen[1], seen[2])


def loss_of(model, request=None, handle=None):
    request = request or fl2va()
    video, audio = velocity(
        model, request.packed, request.video, request.audio, request.text, 0.7, 0.3, handle=handle
    )
    return video.square().mean() + audio.square().mean()


def test_gate_strict_gradients_are_not_worse_than_the_providers():
    model = add_lora(build())
    report = lora_gate(model, lambda: loss_of(model))
    assert len(report.rows) == 2 * 6 * 4
    assert report.passed, str(report)


def test_gate_runs_on_an_installed_model_with_checkpointing():
    model = add_lora(build())
    install_h3_training(model, scope="projections")
    model.train()
    model.enable_gradient_checkpointing()
    report = lora_gate(model, lambda: loss_of(model), targets="transformer_blocks.1.*")
    assert len(report.rows) == 2 * 6
    assert report.passed, str(report)


def test_gate_catches_a_worse_gradient(monkeypatch):
    """Negative twin: a strict term whose shrunk activation loses bits."""
    from h3_adapter_diffusers import lora_gate as module

    def coarse(y, x, term, rule, s, keys):
        return y + ((x @ term.a.t() * 64).round() / 64) @ term.b.t() * term.scaling

    model = add_lora(build())
    monkeypatch.setattr(module, "add_term", coarse)
    report = lora_gate(model, lambda: loss_of(model))
    assert not report.passed
    assert "FAILED" in str(report)


def test_gate_needs_wrappers_that_are_called():
    with pytest.raises(InputError, match="no LoRA wrapper"):
        lora_gate(build(), lambda: torch.zeros(()))
    model = add_lora(build())
    install_h3_training(model, scope="model")
    with pytest.raises(InputError, match="scope 'model'"):
        lora_gate(model, lambda: loss_of(model))
