"""Strict mode refuses, with the reason and the place, before it touches anything."""

import re

import pytest
import torch
from h3_adapter_vllm import InstallError, handle_of, install_h3_rollout
from torch import nn

pytestmark = pytest.mark.engine


def snapshot(model):
    from vllm.model_executor.layers.linear import LinearBase

    layers = [m for m in model.modules() if isinstance(m, LinearBase)]
    return [(m.quant_method, getattr(m, "reduce_results", None)) for m in layers]


def refuse(model, match, **arguments):
    """Install is refused with a reason that fits ``match`` and the model is as before."""
    before = snapshot(model)
    with pytest.raises(InstallError) as caught:
        install_h3_rollout(model, **{"scope": "linears", **arguments})
    assert any(re.search(match, reason) for reason in caught.value.reasons), str(caught.value)
    assert snapshot(model) == before
    assert handle_of(model) is None
    assert not model._forward_pre_hooks


def test_model_of_another_kind():
    refuse(
        nn.Linear(2, 2), r"Linear has no module list 'token_refiner\.blocks': expected a MiniMaxH3DiTModel$"
    )


def test_pipeline_instead_of_its_transformer(model):
    pipeline = nn.Module()
    pipeline.transformer = model
    refuse(pipeline, r"expected a MiniMaxH3DiTModel; pass pipeline\.transformer")


def test_missing_module_is_named(model):
    del model.blocks[1].mlp.fc2
    refuse(model, r"blocks\.1\.mlp\.fc2: no such module, expected a RowParallelLinear")


def test_module_of_another_class_is_named(model):
    model.blocks[0].attn.out_proj = nn.Linear(256, 80)
    refuse(model, r"blocks\.0\.attn\.out_proj: is a Linear, expected a RowParallelLinear")


def test_wrong_dtype_names_tensor_and_both_dtypes(model):
    model.blocks[0].mlp.fc1.weight.data = model.blocks[0].mlp.fc1.weight.data.float()
    refuse(model, r"blocks\.0\.mlp\.fc1: weight is torch\.float32, expected torch\.bfloat16")


@pytest.mark.parametrize("scope", ["projections", "model"])
def test_wrong_dtype_of_a_bias(model, scope):
    model.final_layer.video_out.bias.data = model.final_layer.video_out.bias.data.bfloat16()
    match = r"final_layer\.video_out: bias is torch\.bfloat16, expected torch\.float32 like the weight"
    refuse(model, match, scope=scope)
    install_h3_rollout(model, scope="linears").remove()


def test_scope_model_checks_what_only_it_reads(model):
    """Norms, which no linear owns: fp32 where the checkpoint, and the trainer, has bf16."""
    for name in ("blocks.0.norm1.weight", "token_refiner.final_norm.weight", "blocks.1.attn.q_norm.weight"):
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.float()
    match = (
        r"token_refiner\.final_norm\.weight, blocks\.0\.norm1.*: are torch\.float32, expected torch\.bfloat16"
    )
    refuse(model, match, scope="model")
    install_h3_rollout(model, scope="projections").remove()


def test_half_precision_model_lists_every_linear_and_says_the_reason_once(model):
    model.half()
    with pytest.raises(InstallError, match=r"and 12 more: .*float16") as caught:
        install_h3_rollout(model, scope="linears")
    assert str(caught.value).count("weight is torch.float16") == 1
    assert len(caught.value.reasons) == 16


def test_quantised_linear(model):
    """The class of the quant method decides: an fp8 method holds scales the contract does not read."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    class Fp8LinearMethod(UnquantizedLinearMethod):
        pass

    model.blocks[1].attn.qkv_proj.quant_method = Fp8LinearMethod()
    refuse(model, r"blocks\.1\.attn\.qkv_proj: quant method Fp8LinearMethod: .* load the bf16 checkpoint")


def test_quantisation_config(model):
    model.blocks[1].attn.qkv_proj.quant_config = object()
    refuse(model, r"blocks\.1\.attn\.qkv_proj: quant method UnquantizedLinearMethod")


def test_weights_packed_for_the_cpu(load):
    model = load()
    layer = model.blocks[0].attn.out_proj
    layer.quant_method.process_weights_after_loading(layer)
    refuse(model, r"blocks\.0\.attn\.out_proj: weight is empty: vLLM packed it for the CPU")


def test_weights_not_loaded(engine):
    refuse(
        engine.build(device="meta"), r"token_refiner\.blocks\.0\.attn\.qkv_proj: weight is on the meta device"
    )


def test_cuda_provider_on_cpu_weights(model):
    refuse(model, r"no provider is named 'cublaslt' on cpu; known: auto, .*reference", provider="cublaslt")


@pytest.mark.parametrize("tp", [2, 3])
def test_tp_that_is_not_the_engines(model, tp):
    refuse(model, rf"qkv_proj: built for tp=1, but tp={tp} was asked for", tp=tp)


def test_contract_that_does_not_exist(model):
    refuse(model, "'h3-parallel-v1-u3' is not a row-parallel contract", contract="h3-parallel-v1-u3")


@pytest.mark.parametrize("scope", ["linears", "projections", "model"])
@pytest.mark.parametrize(
    "wrong", [{"contract": "h3-parallel-v1-u16"}, {"provider": "fast"}, {"attention": "fast"}]
)
def test_a_wrong_name_is_one_reason_that_lists_the_known_ones(model, scope, wrong):
    with pytest.raises(InstallError, match=r"; known: .*(h3-parallel-v1-u8|reference|fa3)") as caught:
        install_h3_rollout(model, scope=scope, **wrong)
    assert len(caught.value.reasons) == 1
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("mode", ["strict", "audit"])
@pytest.mark.parametrize("nothing", [None, object()])
def test_what_is_no_module_is_refused_naming_the_expected_class(nothing, mode):
    with pytest.raises(InstallError, match="expected a MiniMaxH3DiTModel"):
        install_h3_rollout(nothing, mode=mode, scope="linears")


def test_shape_outside_the_contract(engine):
    """ffn = 100 does not divide into 8 units."""
    odd = engine.build({**engine.TINY, "ffn_dim": 100})
    engine.randomise(odd)
    refuse(odd, r"blocks\.0\.mlp\.fc2: K=100 does not divide into 8 equal units")
    install_h3_rollout(odd, contract="h3-parallel-v1-u4", scope="linears").remove()


def test_patched_forward(model):
    layer = model.blocks[0].mlp.fc1
    layer.forward = lambda x: (x, None)
    refuse(model, r"blocks\.0\.mlp\.fc1: its forward is patched on the instance")


def wrapped(model, name, wrapper):
    from vllm.lora.utils import replace_submodule

    return replace_submodule(model, name, wrapper)


def test_lora_of_another_dtype(model):
    from vllm.config.lora import LoRAConfig
    from vllm_omni.diffusion.lora.utils import from_layer_diffusion

    config = LoRAConfig(max_lora_rank=8, max_loras=1, max_cpu_loras=1, lora_dtype=torch.float16)
    wrapped(model, "blocks.0.mlp.fc2", from_layer_diffusion(model.blocks[0].mlp.fc2, 1, config, []))
    refuse(model, r"blocks\.0\.mlp\.fc2: its LoRA is torch\.float16, expected torch\.bfloat16")


def test_lora_wrapper_of_vllm_itself(model):
    """It sums its term by the layer's own all-reduce, which is off while the layer is bound."""
    from vllm.lora.layers import RowParallelLinearWithLoRA

    wrapped(model, "blocks.0.mlp.fc2", RowParallelLinearWithLoRA(model.blocks[0].mlp.fc2))
    refuse(model, r"its LoRA wrapper is vLLM's RowParallelLinearWithLoRA, expected one of vLLM-Omni's")


def test_one_refusal_lists_all_reasons(model):
    del model.blocks[1].mlp.fc2
    del model.blocks[0].attn.qkv_proj
    with pytest.raises(InstallError) as caught:
        install_h3_rollout(model, scope="linears")
    assert [reason.split(":")[0] for reason in caught.value.reasons] == [
        "blocks.0.attn.qkv_proj",
        "blocks.1.mlp.fc2",
    ]
