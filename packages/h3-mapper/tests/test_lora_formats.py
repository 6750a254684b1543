"""Every adapter format to every other: the product of each atom keeps its bits, and wrong orders are caught."""

import json
from fractions import Fraction

import numpy as np
import pytest
from h3_mapper.lora import FORMATS, Fc1Rows, QkvRows, Raw, Statement, read, write
from h3_mapper.lora.errors import ScaleError, UnsupportedAdapterError
from h3_mapper.lora.floats import narrow, widen
from lora_testkit import SCALE_ONE, assert_same_products, block_modules, diffusers_lora, products, values
from mapper_testkit import TINY


def reread(written, **statement):
    said = Statement.of(written.format.name, **statement)
    return read(
        written.tensors, TINY, metadata=written.metadata, peft_config=written.peft_config, statement=said
    )


@pytest.mark.parametrize("second", FORMATS)
@pytest.mark.parametrize("first", FORMATS)
def test_any_format_to_any_other_keeps_every_product(first, second):
    source = read(diffusers_lora(rank=3), TINY, statement=SCALE_ONE)
    through = reread(write(source, first, TINY))
    assert_same_products(source, through)
    assert_same_products(source, reread(write(through, second, TINY)))


@pytest.mark.parametrize("name", ["kohya", "comfy", "diffsynth"])
def test_fused_file_read_back_gives_the_very_factors(name):
    """Separate factors of unequal rank become block-diagonal and come apart again, bit for bit."""
    source = read(diffusers_lora(rank={"to_q": 4, "to_k": 2, "to_v": 3}), TINY, statement=SCALE_ONE)
    back = reread(write(source, name, TINY))
    assert back.low_rank.keys() == source.low_rank.keys()
    for atom, term in source.low_rank.items():
        other = back.low_rank[atom]
        assert (other.a.shape, other.b.shape, other.scale) == (term.a.shape, term.b.shape, term.scale)
        assert bytes(other.a.data) == bytes(term.a.data)
        assert bytes(other.b.data) == bytes(term.b.data)


def test_fusing_three_adapters_of_rank_four_gives_rank_and_alpha_twelve():
    """L05: alpha left at 4 would divide the effect by three."""
    modules = block_modules(suffixes=("attn.to_q", "attn.to_k", "attn.to_v"))
    source = read(diffusers_lora(modules, rank=4), TINY, statement=Statement(alpha=4.0))
    written = write(source, "kohya", TINY)
    name = "lora_unet_blocks_0_attn_qkv_proj"
    assert written.tensors[f"{name}.lora_down.weight"].shape == (12, TINY.hidden_size)
    assert widen(written.tensors[f"{name}.alpha"]) == 12.0
    wrong = dict(written.tensors)
    wrong[f"{name}.alpha"] = narrow(np.float32(4.0).reshape(()), "F32")
    divided = read(wrong, TINY, statement=Statement.of("kohya"))
    with pytest.raises(AssertionError):
        assert_same_products(source, divided)


def test_fused_lora_of_row_indices_lands_on_the_right_atoms():
    """L01: B's rows hold their own number, so each atom's rows say where they came from."""
    rows = 3 * TINY.inner_size
    a = narrow(np.ones((1, TINY.hidden_size), np.float32), "F32")
    b = narrow(np.arange(rows, dtype=np.float32).reshape(rows, 1), "F32")
    tensors = {"blocks.0.attn.qkv_proj.lora_A.weight": a, "blocks.0.attn.qkv_proj.lora_B.weight": b}
    head, atom = TINY.attention_head_dim, "blocks.0.attn.qkv_proj.weight[{}]".format
    grouped = read(tensors, TINY, statement=Statement(qkv=QkvRows.GROUPED, assume_alpha="rank"))
    k = widen(grouped.low_rank[atom("k")].b).reshape(-1)
    expected = np.concatenate(
        [np.arange(head) + 3 * head * h + head for h in range(TINY.num_attention_heads)]
    )
    np.testing.assert_array_equal(k, expected)
    stacked = read(tensors, TINY, statement=Statement(qkv=QkvRows.STACKED, assume_alpha="rank"))
    k = widen(stacked.low_rank[atom("k")].b).reshape(-1)
    np.testing.assert_array_equal(k, np.arange(TINY.inner_size) + TINY.inner_size)
    with pytest.raises(AssertionError):
        assert_same_products(grouped, stacked)


@pytest.mark.parametrize(("order", "swap"), [(Fc1Rows.GATE_FIRST, True), (Fc1Rows.VALUE_FIRST, False)])
def test_gate_order_of_fc1_decides_whether_halves_swap(order, swap):
    rng = np.random.default_rng(1)
    b = values(rng, (2 * TINY.ffn_dim, 2))
    tensors = {
        "blocks.1.mlp.fc1.lora_A.weight": values(rng, (2, TINY.hidden_size)),
        "blocks.1.mlp.fc1.lora_B.weight": b,
    }
    source = read(tensors, TINY, statement=Statement(fc1=order, assume_alpha="rank"))
    out = write(source, "diffusers", TINY).tensors[
        "transformer.transformer_blocks.1.ff.net.0.proj.lora_B.weight"
    ]
    wide = widen(b)
    halves = (
        (wide[TINY.ffn_dim :], wide[: TINY.ffn_dim]) if swap else (wide[: TINY.ffn_dim], wide[TINY.ffn_dim :])
    )
    np.testing.assert_array_equal(widen(out), np.concatenate(halves))


@pytest.mark.parametrize("name", ["engine", "vllm-omni", "turbo", "fasth3"])
def test_one_scale_formats_take_power_of_two_ratios_exactly_and_refuse_others(name):
    modules = block_modules(suffixes=("attn.to_q", "attn.to_out.0"))
    tensors = diffusers_lora(modules, rank=2)
    config = {"r": 2, "lora_alpha": 4, "alpha_pattern": {"to_q": 1}}
    source = read(tensors, TINY, peft_config=config)
    assert {term.scale for term in source.low_rank.values()} == {Fraction(2), Fraction(1, 2)}
    assert_same_products(source, reread(write(source, name, TINY)))
    odd = read(tensors, TINY, peft_config=config | {"alpha_pattern": {"to_q": 3}})
    with pytest.raises(ScaleError, match="rounds"):
        write(odd, name, TINY)
    rounded = products(reread(write(odd, name, TINY, round_scales=True)))
    for atom, exact in products(odd).items():
        np.testing.assert_allclose(rounded[atom], exact, rtol=0, atol=2**-8 * np.abs(exact).max() * 2)


def test_scaling_that_overflows_is_not_called_exact():
    """A power of two is exact only while it stays in range."""
    modules = block_modules(suffixes=("attn.to_out.0",))
    tensors = diffusers_lora(modules, rank=1, dtype="F16")
    name = f"transformer.{modules[0]}.lora_B.weight"
    tensors[name] = Raw("F16", tensors[name].shape, b"\xff\x7b" * tensors[name].shape[0])
    source = read(tensors, TINY, statement=Statement(alpha=2.0))
    with pytest.raises(ScaleError, match="rounds"):
        write(source, "fasth3", TINY)


def test_rslora_divides_by_the_square_root_of_the_rank():
    tensors = diffusers_lora(rank=16)
    source = read(tensors, TINY, peft_config={"r": 16, "lora_alpha": 8, "use_rslora": True})
    assert {term.scale for term in source.low_rank.values()} == {Fraction(2)}
    plain = read(tensors, TINY, peft_config={"r": 16, "lora_alpha": 8})
    assert {term.scale for term in plain.low_rank.values()} == {Fraction(1, 2)}
    assert_same_products(source, reread(write(source, "kohya", TINY)))


def test_diffusers_metadata_carries_unequal_ranks_and_alphas():
    source = read(
        diffusers_lora(rank={"to_q": 4}), TINY, peft_config={
            "r": 3, "lora_alpha": 6, "rank_pattern": {"to_q": 4}, "alpha_pattern": {"to_q": 16}}
    )  # fmt: skip
    written = write(source, "diffusers", TINY)
    entries = json.loads(written.metadata["lora_adapter_metadata"])
    assert all(key.startswith("transformer.") for key in entries)
    again = read(written.tensors, TINY, metadata=written.metadata)
    assert {name: term.scale for name, term in again.low_rank.items()} == {
        name: term.scale for name, term in source.low_rank.items()
    }


def test_dora_magnitudes_move_with_their_rows():
    rng = np.random.default_rng(5)
    tensors = diffusers_lora(prefix="base_model.model.")
    for module in block_modules():
        size = tensors[f"base_model.model.{module}.lora_B.weight"].shape[0]
        tensors[f"base_model.model.{module}.lora_magnitude_vector"] = values(rng, (size,), "F32")
    source = read(tensors, TINY, peft_config={"r": 3, "lora_alpha": 3, "use_dora": True})
    kohya = write(source, "kohya", TINY)
    fused = kohya.tensors["lora_unet_blocks_0_attn_qkv_proj.dora_scale"]
    assert fused.shape == (3 * TINY.inner_size, 1)
    back = reread(kohya)
    for atom, term in source.low_rank.items():
        assert bytes(back.low_rank[atom].magnitude.data) == bytes(term.magnitude.data)
    for name in ("turbo", "engine", "diffusers", "vllm-omni", "fasth3"):
        with pytest.raises(UnsupportedAdapterError, match="DoRA"):
            write(source, name, TINY)


def test_column_norm_dora_is_refused_with_the_reason():
    tensors = diffusers_lora(["transformer_blocks.0.attn.to_q"])
    tensors["transformer.transformer_blocks.0.attn.to_q.dora_scale"] = values(
        np.random.default_rng(0), (1, TINY.hidden_size), "F32"
    )
    with pytest.raises(UnsupportedAdapterError, match="couples the rows"):
        read(tensors, TINY, statement=SCALE_ONE)


def test_fasth3_deltas_and_gates_survive_and_other_formats_refuse_them():
    rng = np.random.default_rng(3)
    tensors = diffusers_lora(prefix="")
    tensors["transformer_blocks.0.norm1.diff"] = values(rng, (TINY.hidden_size,))
    tensors["proj_in.diff"] = values(rng, (TINY.hidden_size, TINY.video_patch_dim), "F32")
    tensors["proj_in.diff_b"] = values(rng, (TINY.hidden_size,), "F32")
    tensors["transformer_blocks.1.attn.to_gate_compress.set_weight"] = values(
        rng, (TINY.inner_size, TINY.hidden_size)
    )
    metadata = {"format": "fastvideo-lora-v2", "finetuned_model": "FastVideo/FastH3-x"}
    source = read(tensors, TINY, metadata=metadata)
    assert set(source.deltas) == {"blocks.0.norm1.weight", "video_patch_proj.weight", "video_patch_proj.bias"}
    assert set(source.assigned) == {"blocks.1.attn.to_gate_compress.weight"}
    written = write(source, "fasth3", TINY)
    assert written.tensors.keys() == tensors.keys()
    assert all(bytes(written.tensors[n].data) == bytes(tensors[n].data) for n in tensors)
    counts = {k: int(written.metadata[k]) for k in ("low_rank_tensors", "diff_tensors", "set_weight_tensors")}
    assert counts == {"low_rank_tensors": len(tensors) - 4, "diff_tensors": 3, "set_weight_tensors": 1}
    assert written.metadata["finetuned_model"] == "FastVideo/FastH3-x"
    for name in ("peft", "turbo", "engine", "kohya"):
        with pytest.raises(UnsupportedAdapterError, match="merge"):
            write(source, name, TINY)
