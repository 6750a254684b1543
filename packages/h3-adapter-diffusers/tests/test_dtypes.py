"""A model is bound in the checkpoint's dtypes or wholly in fp32, and refused in any other mix: rounded tensors are not
the rollout's."""

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from h3_adapter_diffusers.errors import InstallError
from h3_adapter_diffusers.install import handle_of, install_h3_training
from h3_adapter_diffusers.testing.tiny import build
from h3_mapper import H3Config, Layout, tensors
from peft import LoraConfig

pytestmark = pytest.mark.engine

SCOPES = ["linears", "projections", "model"]


def with_lora(model):
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "proj_in"]))
    return model


def refused(model, scope="projections", mode="strict"):
    with pytest.raises(InstallError, match=r"from_pretrained\(torch_dtype=torch\.bfloat16\)") as caught:
        install_h3_training(model, scope=scope, mode=mode)
    assert handle_of(model) is None
    assert all("forward" not in vars(module) for module in model.modules())
    return caught.value.reasons


@pytest.mark.parametrize("wrap", [lambda model: model, with_lora], ids=["bare", "lora"])
@pytest.mark.parametrize("mode", ["strict", "audit"])
@pytest.mark.parametrize("scope", SCOPES)
def test_a_model_cast_to_bf16_is_refused_naming_every_fp32_tensor(scope, mode, wrap):
    model = wrap(build()).bfloat16()
    table = tensors(H3Config.from_mapping(dict(model.config)), Layout.DIFFUSERS)
    names = [t.name for t in table if t.dtype == "F32"]
    assert len(names) == 12
    (reason,) = refused(model, scope, mode)
    listed, _, rest = reason.partition(": ")
    assert listed.split(", ") == [*names, "rope.inv_freq"]
    assert rest.startswith("are torch.bfloat16, expected torch.float32; load with from_pretrained")


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wrap", [lambda model: model, with_lora], ids=["bare", "lora"])
def test_what_the_refusal_advises_is_accepted(scope, dtype, wrap, tmp_path):
    """Negative twin: from_pretrained keeps the fp32 tensors, and in fp32 nothing is rounded."""
    build().save_pretrained(tmp_path)
    model = wrap(MiniMaxH3Transformer3DModel.from_pretrained(tmp_path, torch_dtype=dtype))
    install_h3_training(model, scope=scope).remove()


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    ("name", "before", "now", "expected"),
    [
        ("rope.inv_freq", torch.bfloat16, torch.bfloat16, torch.float32),
        ("time_embedder.linear_1", torch.bfloat16, torch.bfloat16, torch.float32),
        ("transformer_blocks.0.attn.to_q", torch.bfloat16, torch.float32, torch.bfloat16),
        ("transformer_blocks.1.norm1", torch.bfloat16, torch.float32, torch.bfloat16),
        ("transformer_blocks.1.norm1", torch.bfloat16, torch.float16, torch.bfloat16),
        ("transformer_blocks.0.attn.to_q", torch.float32, torch.bfloat16, torch.float32),
        ("proj_out", torch.float32, torch.bfloat16, torch.float32),
    ],
)
def test_a_mix_that_differs_is_refused_naming_what_differs(scope, name, before, now, expected):
    model = build(dtype=before)
    model.get_submodule(name.removesuffix(".inv_freq")).to(now)
    (reason,) = refused(model, scope)
    listed, _, rest = reason.partition(": ")
    assert all(tensor.startswith(name) for tensor in listed.split(", "))
    assert f"{now}, expected {expected}; " in rest


def test_many_names_are_counted_not_listed():
    model = build()
    model.transformer_blocks.float()
    (reason,) = refused(model)
    assert " more: are torch.float32, expected torch.bfloat16; " in reason
    assert len(reason) < 1000
