"""A trainer's adapter handed to vLLM-Omni while it serves: verl-omni's contract for names, targets and completeness."""

from types import SimpleNamespace

import pytest
import torch
from h3_mapper.lora.engine import STACKED, complete_stacked_mapping, map_lora_update_to_engine
from h3_mapper.lora.errors import (
    AdapterError,
    UnmappedModuleError,
    UnpairedFactorError,
    UnsupportedAdapterError,
)
from lora_testkit import diffusers_lora
from mapper_testkit import TINY

PEFT = {
    "r": 3,
    "lora_alpha": 6,
    "target_modules": ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"],
}


def live_lora(seed=0):
    """A trainer's adapter on torch, wrapped as FSDP and PEFT name it."""
    prefix = "_fsdp_wrapped_module.base_model.model."
    kinds = {"BF16": torch.bfloat16}
    return {
        name: torch.frombuffer(bytearray(v.data), dtype=kinds[v.dtype]).reshape(v.shape)
        for name, v in diffusers_lora(seed=seed, prefix=prefix).items()
    }


def test_update_is_renamed_split_and_complete():
    tensors = live_lora()
    mapped, config = map_lora_update_to_engine(tensors, PEFT, TINY)
    blocks = TINY.num_layers + TINY.num_refiner_layers
    assert len(mapped) == 2 * 7 * blocks
    assert config == PEFT | {"target_modules": ["to_q", "to_k", "to_v", "out_proj", "fc1_0", "fc1_1", "fc2"]}
    source = tensors["_fsdp_wrapped_module.base_model.model.transformer_blocks.1.ff.net.0.proj.lora_B.weight"]
    value, gate = source.chunk(2)
    assert torch.equal(mapped["transformer.blocks.1.mlp.fc1_0.lora_B.weight"], gate)
    assert torch.equal(mapped["transformer.blocks.1.mlp.fc1_1.lora_B.weight"], value)
    a = [mapped[f"transformer.blocks.1.mlp.fc1_{i}.lora_A.weight"] for i in range(2)]
    assert a[0].data_ptr() == a[1].data_ptr(), "A is shared, not copied"
    assert gate.data_ptr() == mapped["transformer.blocks.1.mlp.fc1_0.lora_B.weight"].data_ptr()
    assert "transformer.token_refiner.blocks.0.attn.to_k.lora_B.weight" in mapped
    reference, _ = map_lora_update_to_engine(tensors, PEFT, TINY, component="transformers_ref")
    assert {name.partition(".")[0] for name in reference} == {"transformers_ref"}


def test_requested_subset_lists_only_itself():
    names = ("to_q", "to_out.0")
    tensors = {n: v for n, v in live_lora().items() if ".to_q." in n or ".to_out.0." in n}
    _, config = map_lora_update_to_engine(
        tensors, PEFT | {"target_modules": list(names)}, TINY, requested_only=True
    )
    assert config["target_modules"] == ["to_q", "out_proj"]
    _, everything = map_lora_update_to_engine(tensors, PEFT | {"target_modules": list(names)}, TINY)
    assert len(everything["target_modules"]) == 7


@pytest.mark.parametrize("targets", ["all-linear", None, [], ["to_q", "adaln_proj.linear"], ["proj_in"]])
def test_targets_that_never_reach_the_rollout_are_refused(targets):
    with pytest.raises(UnsupportedAdapterError, match="never synced"):
        map_lora_update_to_engine(live_lora(), PEFT | {"target_modules": targets}, TINY)


def test_a_missing_factor_of_any_block_fails_instead_of_serving_base_weights():
    """R01 (UniRL #378)."""
    for role in ("A", "B"):
        tensors = live_lora()
        name = f"transformer_blocks.1.attn.to_v.lora_{role}.weight"
        del tensors[f"_fsdp_wrapped_module.base_model.model.{name}"]
        with pytest.raises(UnpairedFactorError, match=rf"1 of 48 expected factors.*to_v\.lora_{role}"):
            map_lora_update_to_engine(tensors, PEFT, TINY)
    absent = {name.replace("transformer_blocks", "blocks"): v for name, v in live_lora().items()}
    with pytest.raises(AdapterError, match="serve base weights"):
        map_lora_update_to_engine(absent, PEFT, TINY)
    outside = live_lora() | {"base_model.model.proj_in.lora_A.weight": torch.zeros(2, TINY.video_patch_dim)}
    with pytest.raises(UnmappedModuleError, match="outside the targets"):
        map_lora_update_to_engine(outside, PEFT, TINY)
    with pytest.raises(UnsupportedAdapterError, match="one rank and one alpha"):
        map_lora_update_to_engine(live_lora(), PEFT | {"alpha_pattern": {"to_q": 2}}, TINY)


def test_stacked_mapping_is_extended_once_and_only_on_the_chosen_transformer():
    """R03: an upstream q/k/v entry made the adapter skip the fc1 slices."""

    def made(*names):
        return [SimpleNamespace(attn=SimpleNamespace(**{names[0]: 0}), mlp=SimpleNamespace(**{names[1]: 0}))]

    class Transformer:
        blocks = made("qkv_proj", "fc1")
        stacked_params_mapping = (
            (".attn.qkv_proj", ".attn.to_q", "q"),
            (".attn.qkv_proj", ".attn.to_k", "k"),
            (".attn.qkv_proj", ".attn.to_v", "v"),
        )

    chosen, other = Transformer(), Transformer()
    assert complete_stacked_mapping(chosen)
    assert chosen.stacked_params_mapping == (*Transformer.stacked_params_mapping, *STACKED[3:])
    assert len(other.stacked_params_mapping) == len(Transformer.stacked_params_mapping) == 3
    assert not complete_stacked_mapping(chosen)
    for other in (
        torch.nn.Linear(2, 2),
        SimpleNamespace(transformer=chosen),
        SimpleNamespace(blocks=made("qkv", "fc1")),
    ):
        with pytest.raises(
            UnsupportedAdapterError,
            match=r"no blocks with attn\.qkv_proj and mlp\.fc1; .*pipeline\.transformer",
        ):
            complete_stacked_mapping(other)
        assert not hasattr(other, "stacked_params_mapping")
    bare = SimpleNamespace(blocks=made("qkv_proj", "fc1"))
    assert complete_stacked_mapping(bare)
    assert bare.stacked_params_mapping == STACKED
