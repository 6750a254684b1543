"""Faults that people reported about adapters, each with the right behaviour and, where there is one, its twin."""

import copy
import json

import numpy as np
import pytest
import torch
from h3_mapper.errors import MapperError
from h3_mapper.lora import Fc1Rows, QkvRows, Raw, Statement, read, shard, write
from h3_mapper.lora.arrays import concat, is_finite, is_zero, raw, rows
from h3_mapper.lora.errors import (
    FactorShapeError,
    NonFiniteError,
    ScaleError,
    UnmappedModuleError,
    UnpairedFactorError,
    UnstatedError,
    UnsupportedAdapterError,
)
from h3_mapper.lora.floats import narrow, widen
from hypothesis import given
from hypothesis import strategies as st
from lora_testkit import SCALE_ONE, assert_same_products, block_modules, diffusers_lora, products, values
from mapper_testkit import TINY

Q = "transformer.transformer_blocks.0.attn.to_q"


def test_no_alpha_anywhere_must_be_stated_and_is_reported():
    """L03 (sglang #34359): alpha 8 at rank 128 read as alpha = rank is 16 times too strong."""
    tensors = diffusers_lora(rank=16)
    with pytest.raises(UnstatedError, match=r"no alpha is recorded for rank 16.*alpha='rank'.*assumes 8"):
        read(tensors, TINY)
    stated = read(tensors, TINY, statement=Statement(alpha=1.0))
    assumed = read(tensors, TINY, statement=SCALE_ONE)
    assert {float(t.scale) for t in stated.low_rank.values()} == {1 / 16}
    assert "stated by the caller" in stated.notes[0]
    assert "assumed" in assumed.notes[0]
    recorded = read(tensors, TINY, metadata={"alpha": "8"})
    assert {float(t.scale) for t in recorded.low_rank.values()} == {0.5}
    overruled = read(tensors, TINY, metadata={"alpha": "8"}, statement=Statement(alpha=4.0))
    assert {float(t.scale) for t in overruled.low_rank.values()} == {0.25}


def test_rank_of_a_stacked_adapter_is_the_rank_axis():
    """L06 (sglang #34365): shape[0] of a stacked A [3, r, in] is 3."""
    rng = np.random.default_rng(0)
    rank, name = 5, "blocks.0.attn.qkv_proj"
    a, b = values(rng, (3, rank, TINY.hidden_size)), values(rng, (3, TINY.inner_size, rank))
    said = Statement(alpha=10.0, qkv=QkvRows.STACKED)
    stacked = read({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, TINY, statement=said)
    assert {term.rank for term in stacked.low_rank.values()} == {rank}
    assert {float(term.scale) for term in stacked.low_rank.values()} == {2.0}
    flat = Raw("BF16", (3 * TINY.inner_size, rank), b.data)
    assert_same_products(
        stacked, read({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": flat}, TINY, statement=said)
    )
    assert_same_products(
        stacked, read(write(stacked, "comfy", TINY).tensors, TINY, statement=Statement.of("comfy"))
    )


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_shards_of_an_adapter_add_up_to_the_shards_of_its_product(tp):
    """L07 (sglang #33875): fc1's B is cut in each half, not as one matrix."""
    config = copy.copy(TINY)
    object.__setattr__(config, "num_attention_heads", 8)
    object.__setattr__(config, "audio_in_channels", 8)
    source = read(diffusers_lora(config=config), config, statement=SCALE_ONE)
    whole = products(source)
    for rank in range(tp):
        for name, part in products(shard(source, config, tp, rank)).items():
            full = whole[name]
            if name.endswith(("out_proj.weight", "fc2.weight")):
                np.testing.assert_array_equal(part, np.split(full, tp, 1)[rank])
            else:
                np.testing.assert_array_equal(part, np.split(full, tp, 0)[rank])
    gate, value = (f"blocks.0.mlp.fc1.weight[{part}]" for part in ("gate", "value"))
    fused = concat([source.low_rank[gate].b, source.low_rank[value].b])
    naive = rows(fused, 0, TINY.ffn_dim * 2 // tp)
    ours = [shard(source, config, tp, 0).low_rank[part].b for part in (gate, value)]
    assert bytes(naive.data) != bytes(concat(ours).data)


@pytest.mark.parametrize("prefix", ["", "diffusion_model.", "transformer.", "model.diffusion_model."])
@pytest.mark.parametrize("infix", ["", ".default"])
def test_prefixes_and_the_default_infix_are_accepted(prefix, infix):
    """L09 (DiffSynth #1587, diffusers #14484): every key skipped with warnings only."""
    source = read(diffusers_lora(), TINY, statement=SCALE_ONE)
    native = write(source, "diffsynth", TINY).tensors
    renamed = {prefix + name.replace(".default", infix): value for name, value in native.items()}
    assert_same_products(source, read(renamed, TINY, statement=Statement.of("diffsynth")))


def test_zero_matched_modules_is_an_error():
    tensors = {"unet.down_blocks.0.attn1.to_q.lora_A.weight": narrow(np.ones((2, 4), np.float32), "F32")}
    with pytest.raises(UnmappedModuleError, match="none of 1 modules is one of MiniMax-H3's"):
        read(tensors, TINY, statement=SCALE_ONE)


def test_a_doubled_prefix_is_an_error_and_alpha_is_a_scalar_not_a_module():
    """L11 (ComfyUI-MiniMax-H3-Turbo #28)."""
    source = read(diffusers_lora(), TINY, statement=Statement(alpha=6.0))
    comfy = write(source, "comfy", TINY).tensors
    assert any(name.endswith(".alpha") for name in comfy)
    assert all(name.startswith("diffusion_model.") for name in comfy)
    assert_same_products(source, read(comfy, TINY, statement=Statement.of("comfy")))
    doubled = {f"diffusion_model.{name}": value for name, value in comfy.items()}
    with pytest.raises(MapperError, match="stands twice"):
        read(doubled, TINY, statement=Statement.of("comfy"))


@pytest.mark.parametrize(
    "stray",
    [
        "token_refiner.refiner_blocks.0.attn.k_proj",
        "transformer_blocks.007.attn.to_q",
        "transformer_blocks.٣.attn.to_q",
        "transformer_blocks.2.attn.to_q",
        "token_refiner.refiner_blocks.0.adaln_proj.linear",
        "blocks.0.attn.out_proj",
    ],
)
def test_every_name_that_does_not_map_is_listed(stray):
    """L12 (Wan2GP #2101, musubi-tuner #1112), and names that loose rules would take for something else."""
    tensors = diffusers_lora(prefix="")
    tensors[f"{stray}.lora_A.weight"] = tensors["transformer_blocks.0.attn.to_q.lora_A.weight"]
    tensors[f"{stray}.lora_B.weight"] = tensors["transformer_blocks.0.attn.to_q.lora_B.weight"]
    with pytest.raises(UnmappedModuleError, match="nothing is dropped in silence") as caught:
        read(tensors, TINY, statement=SCALE_ONE)
    assert stray in str(caught.value)


def test_refiner_modules_are_mapped():
    refiner = [name for name in block_modules() if name.startswith("token_refiner")]
    source = read(diffusers_lora(refiner), TINY, statement=SCALE_ONE)
    assert {name.partition(".attn")[0].partition(".mlp")[0] for name in source.low_rank} == {
        "token_refiner.blocks.0", "token_refiner.blocks.1"
    }  # fmt: skip


def test_gate_order_is_an_explicit_field():
    """L14 (SimpleTuner #3058): files in the wild have both orders under one name."""
    source = read(diffusers_lora(), TINY, statement=SCALE_ONE)
    written = write(source, "comfy", TINY)
    assert written.metadata["h3.fc1_rows"] == "gate-first"
    assert written.metadata["h3.qkv_rows"] == "stacked"
    assert_same_products(source, read(written.tensors, TINY, metadata=written.metadata))
    with pytest.raises(UnstatedError, match="row order of a fused qkv"):
        read(written.tensors, TINY)
    with pytest.raises(UnstatedError, match="row order of a fused fc1"):
        read(written.tensors, TINY, statement=Statement(qkv=QkvRows.STACKED))
    wrong = read(written.tensors, TINY, statement=Statement(qkv=QkvRows.STACKED, fc1=Fc1Rows.VALUE_FIRST))
    with pytest.raises(AssertionError):
        assert_same_products(source, wrong)
    with pytest.raises(UnstatedError, match="unknown row order"):
        read(written.tensors, TINY, metadata={"h3.qkv_rows": "sideways"})


def test_an_all_zero_b_is_a_warning_and_a_nan_an_error():
    """L17 (ai-toolkit #1046): fp16 overflow made every B exactly zero while the loss looked normal."""
    tensors = diffusers_lora()
    zeroed = {
        name: Raw(v.dtype, v.shape, bytes(len(v.data))) if "lora_B" in name else v
        for name, v in tensors.items()
    }
    notes = read(zeroed, TINY, statement=SCALE_ONE).notes
    assert any(note.startswith("no-op adapter: B is exactly zero in every module") for note in notes)
    assert not any("no-op" in note for note in read(tensors, TINY, statement=SCALE_ONE).notes)
    one = f"{Q}.lora_B.weight"
    some = read(tensors | {one: zeroed[one]}, TINY, statement=SCALE_ONE).notes
    assert any("in 1 atoms (blocks.0.attn.qkv_proj.weight[q])" in note for note in some)
    for bad in (np.nan, np.inf, -np.inf):
        broken = widen(tensors[one]).copy()
        broken[1, 1] = bad
        with pytest.raises(NonFiniteError, match=r"qkv_proj\.weight\[q\]"):
            read(tensors | {one: narrow(broken, "BF16")}, TINY, statement=SCALE_ONE)


@given(st.lists(st.floats(width=32), min_size=1, max_size=6), st.sampled_from(["BF16", "F16", "F32"]))
def test_value_checks_agree_with_torch(numbers, dtype):
    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    tensor = torch.tensor(numbers, dtype=torch.float32).to(kinds[dtype])
    for value in (raw(tensor), tensor):
        assert is_finite(value) == bool(tensor.isfinite().all())
        assert is_zero(value) == bool((tensor == 0).all())


@pytest.mark.parametrize("role", ["A", "B"])
def test_a_factor_alone_is_an_error(role):
    tensors = diffusers_lora()
    del tensors[f"{Q}.lora_{role}.weight"]
    with pytest.raises(UnpairedFactorError, match=f"factor {role} is missing"):
        read(tensors, TINY, statement=SCALE_ONE)


def test_alpha_without_factors_and_a_second_factor_are_errors():
    tensors = diffusers_lora()
    alone = {f"{Q}.alpha": narrow(np.float32(4).reshape(()), "F32")}
    alone |= {k: v for k, v in tensors.items() if Q not in k}
    with pytest.raises(UnpairedFactorError, match="alpha without A and B"):
        read(alone, TINY, statement=SCALE_ONE)
    twice = tensors | {f"{Q}.lora_down.weight": tensors[f"{Q}.lora_A.weight"]}
    with pytest.raises(UnpairedFactorError, match="a second A"):
        read(twice, TINY, statement=SCALE_ONE)


def test_uneven_coverage_is_noted_with_the_block():
    modules = [m for m in block_modules() if m != "transformer_blocks.1.attn.to_k"]
    notes = read(diffusers_lora(modules), TINY, statement=SCALE_ONE).notes
    assert any(
        note.startswith("blocks.N.attn.qkv_proj.weight[k]: 1 of 2") and note.endswith("block 1")
        for note in notes
    )


@pytest.mark.parametrize(
    ("suffix", "reason"),
    [(".lora_B.bias", "bias"), (".lokr_w1", "LoKr"), (".hada_w1_a", "LoHa"), (".oft_blocks", "OFT")],
)
def test_other_kinds_of_adapter_are_refused_by_name(suffix, reason):
    with pytest.raises(UnsupportedAdapterError, match=reason):
        read(
            diffusers_lora() | {Q + suffix: values(np.random.default_rng(0), (2, 2))},
            TINY,
            statement=SCALE_ONE,
        )
    with pytest.raises(UnsupportedAdapterError, match="lora_bias"):
        read(diffusers_lora(), TINY, peft_config={"r": 3, "lora_alpha": 3, "lora_bias": True})


def test_shapes_that_do_not_fit_are_refused_and_pruned_width_is_named():
    """H09: an adapter trained on a pruned checkpoint has AdaLN width 8."""
    rng = np.random.default_rng(0)
    module = "blocks.0.adaln_proj.linear"
    pruned = {
        f"{module}.lora_A.weight": values(rng, (2, 8)),
        f"{module}.lora_B.weight": values(rng, (TINY.adaln_dim, 2)),
    }
    with pytest.raises(FactorShapeError, match="pruned AdaLN"):
        read(pruned, TINY, statement=SCALE_ONE)
    tensors = diffusers_lora()
    for name, shape in ((f"{Q}.lora_B.weight", (TINY.inner_size, 4)), (f"{Q}.lora_A.weight", (3, 7))):
        with pytest.raises(FactorShapeError):
            read(tensors | {name: values(rng, shape)}, TINY, statement=SCALE_ONE)


def test_recorded_rank_that_contradicts_the_tensors_is_an_error():
    with pytest.raises(ScaleError, match="says rank 8, its A has 3 rows"):
        read(diffusers_lora(), TINY, peft_config={"r": 8, "lora_alpha": 8})
    for alpha in (0.0, float("nan"), float("inf")):
        with pytest.raises(ScaleError):
            read(diffusers_lora(), TINY, statement=Statement(alpha=alpha))
    with pytest.raises(ScaleError, match="expected a number"):
        read(diffusers_lora(), TINY, metadata={"alpha": "a lot"})


@pytest.mark.parametrize("name", ["turbo", "kohya", "peft", "engine", "diffusers"])
def test_an_awkward_alpha_keeps_every_digit(name):
    """10 / 3 has no short decimal: a rounded alpha would change every product."""
    source = read(diffusers_lora(rank=3), TINY, statement=Statement(alpha=10.000000001))
    written = write(source, name, TINY)
    again = read(written.tensors, TINY, metadata=written.metadata, peft_config=written.peft_config)
    assert_same_products(source, again)


def test_two_partitions_or_two_adapters_in_one_file_need_a_choice():
    both = diffusers_lora() | diffusers_lora(prefix="transformer_ref.", seed=1)
    with pytest.raises(UnstatedError, match="transformer, transformer_ref; choose one"):
        read(both, TINY, statement=SCALE_ONE)
    second = read(both, TINY, statement=Statement(assume_alpha="rank", component="transformer_ref"))
    assert second.component == "transformer_ref"
    assert_same_products(second, read(diffusers_lora(seed=1), TINY, statement=SCALE_ONE))
    assert all(n.startswith("transformer_ref.") for n in write(second, "diffusers", TINY).tensors)
    assert all(n.startswith("transformers_ref.") for n in write(second, "engine", TINY).tensors)
    kohya = write(
        second, "kohya", TINY
    )  # whose names have no partition; a Ref2VA adapter must not turn into FL2VA's
    again = read(kohya.tensors, TINY, metadata=kohya.metadata, statement=Statement.of("kohya"))
    assert all(n.startswith("transformer_ref.") for n in write(again, "diffusers", TINY).tensors)
    entries = {
        "transformer.r": 3,
        "transformer.lora_alpha": 3,
        "transformer_ref.r": 3,
        "transformer_ref.lora_alpha": 6,
    }
    own = read(
        both,
        TINY,
        metadata={"lora_adapter_metadata": json.dumps(entries)},
        statement=Statement(component="transformer_ref"),
    )
    assert {float(term.scale) for term in own.low_rank.values()} == {2.0}
    named = diffusers_lora(infix=".default") | diffusers_lora(infix=".critic", seed=2)
    with pytest.raises(UnstatedError, match="critic, default"):
        read(named, TINY, statement=SCALE_ONE)
    chosen = read(named, TINY, statement=Statement(assume_alpha="rank", adapter="critic"))
    assert_same_products(chosen, read(diffusers_lora(seed=2), TINY, statement=SCALE_ONE))
