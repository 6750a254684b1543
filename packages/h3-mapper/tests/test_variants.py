"""Pruned and quantised files: named exactly, mapped with everything that belongs to their rows, or refused by layer."""

import json

import numpy as np
import pytest
from h3_mapper.cli import main
from h3_mapper.errors import (
    AlreadyConvertedError,
    AmbiguousLayoutError,
    PrunedVariantError,
    QuantisedVariantError,
    ShapeError,
)
from h3_mapper.plan import atoms, plan
from h3_mapper.safetensors_io import read_header
from h3_mapper.source import LAYOUT_KEY
from h3_mapper.spec import Layout
from h3_mapper.tp import cut_axis, cut_range, shard_spans
from h3_mapper.variant_files import convert_variant
from h3_mapper.variants import VARIANTS
from mapper_testkit import TINY
from variants_testkit import (
    CONVROT,
    Value,
    assert_same_layers,
    blob,
    dequantised,
    floats,
    full,
    load,
    one_file,
    problems_of,
    pruned,
    quantised,
    random,
    refused,
    save,
    through,
)

# --- moving ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["row", "tensor", "part", "block"])
@pytest.mark.parametrize("target", [Layout.RELEASE, Layout.DIFFUSERS])
def test_int8_rows_keep_their_scales_in_every_layout_and_come_back(tmp_path, scale, target):
    values = quantised(scale=scale)
    if scale == "tensor":  # splitting repeats the one value; joining then finds it equal
        assert values["blocks.0.mlp.fc2.weight_scale"].shape == ()
    moved = through(tmp_path, values, Layout.MODULE, target)
    assert_same_layers(dequantised(values, Layout.MODULE), dequantised(moved, target))
    if scale != "part" or target.native:  # three tensors with a scale each are not one tensor with one scale
        back = through(tmp_path, moved, target, Layout.MODULE, "back")
        assert_same_layers(dequantised(values, Layout.MODULE), dequantised(back, Layout.MODULE))
    if scale in ("row", "block"):
        assert {n: v for n, v in back.items() if n in values} == values
    stale = moved | {n: values[n] for n in moved.keys() & values.keys() if n.endswith("weight_scale")}
    if target is Layout.RELEASE and scale == "row":  # the twin: scales left in the old order
        with pytest.raises(AssertionError):
            assert_same_layers(dequantised(values, Layout.MODULE), dequantised(stale, target))


def test_two_values_of_fc1_swap_with_its_halves(tmp_path):
    """H22 (vllm-omni #5848): Diffusers' [1, 2] is native [2, 1]."""
    values = quantised(Layout.DIFFUSERS, scale="row")
    name = "transformer_blocks.0.ff.net.0.proj.weight_scale"
    values[name] = floats([1, 2], (1, 2))
    moved = through(tmp_path, values, Layout.DIFFUSERS, Layout.MODULE)
    assert moved["blocks.0.mlp.fc1.weight_scale"] == floats([2, 1], (1, 2))


def test_blobs_convrot_and_file_metadata_follow_their_layers(tmp_path):
    values = {f"model.diffusion_model.{n}": v for n, v in quantised().items()}
    record = {
        "format_version": "1.0",
        "layers": {"blocks.0.mlp.fc1": CONVROT, "blocks.1.attn.qkv_proj": CONVROT},
    }
    metadata = {"_quantization_metadata": json.dumps(record)}
    file = save(tmp_path / "comfy.safetensors", values, metadata)
    with pytest.raises(AmbiguousLayoutError, match="Comfy"):
        convert_variant(file, tmp_path / "out", Layout.DIFFUSERS)
    found, _ = convert_variant(file, tmp_path / "out", Layout.DIFFUSERS, stated=Layout.MODULE)
    assert found.variant.name == "full+int8_tensorwise convrot 16"
    moved = load(one_file(tmp_path / "out"))
    for part in "qkv":
        assert moved[f"transformer_blocks.0.attn.to_{part}.comfy_quant"] == blob(CONVROT)
    stored = json.loads(read_header(one_file(tmp_path / "out")).metadata["_quantization_metadata"])
    assert stored["format_version"] == "1.0"
    assert stored["layers"].keys() == {
        "transformer_blocks.0.ff.net.0.proj", *(f"transformer_blocks.1.attn.to_{part}" for part in "qkv")
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_fp8_scaled_files_move(tmp_path, dtype):
    rng = np.random.default_rng(0)
    values = quantised(dtype=dtype, scale="tensor", content=None)
    values["scaled_fp8"] = Value(dtype, (0,), b"")
    for name in [n for n in values if n.endswith("weight_scale")]:
        values[name.replace("weight_scale", "input_scale")] = floats(rng.random(1), ())
    moved = through(tmp_path, values, Layout.MODULE, Layout.RELEASE)
    assert moved.keys() == values.keys()
    name = "blocks.1.attn.qkv_proj"
    assert moved[f"{name}.input_scale"] == values[f"{name}.input_scale"]
    assert moved[f"{name}.weight"] != values[f"{name}.weight"]
    by_rows = plan(TINY, Layout.MODULE, Layout.RELEASE)
    target = next(t for t in by_rows.targets if t.name == f"{name}.weight")
    width = TINY.hidden_size
    wanted = b"".join(values[r.name].data[r.start * width : r.stop * width] for r in target.rows)
    assert moved[f"{name}.weight"].data == wanted


def test_pruned_files_move_between_native_layouts_with_their_fp32(tmp_path):
    """H20: casting the pruned AdaLN to bf16 costs 20 dB."""
    values = pruned()
    moved = through(tmp_path, values, Layout.MODULE, Layout.RELEASE)
    assert moved.keys() == values.keys()
    assert moved["adaln_t_table"] == values["adaln_t_table"]
    assert moved["blocks.0.adaln_proj.linear.weight"].dtype == "F32"
    back = through(tmp_path, moved, Layout.RELEASE, Layout.MODULE, "back")
    assert back == values
    with pytest.raises(PrunedVariantError, match="has no diffusers form"):
        through(tmp_path, values, Layout.MODULE, Layout.DIFFUSERS, "no")
    assert not (tmp_path / "no").exists()


def test_gates_move_with_a_quantised_model(tmp_path):
    config = TINY.with_gates(True)
    rng = np.random.default_rng(0)
    values = quantised() | {
        f"blocks.{n}.attn.to_gate_compress.weight": random(
            rng, "BF16", (config.inner_size, config.hidden_size)
        )
        for n in range(config.num_layers)
    }
    file = save(tmp_path / "x.safetensors", values, {LAYOUT_KEY: "module"})
    found, _ = convert_variant(file, tmp_path / "out", Layout.DIFFUSERS)
    assert found.variant.name == "full+vsa+int8_tensorwise convrot 16"
    gate = load(one_file(tmp_path / "out"))["transformer_blocks.1.attn.to_gate_compress.weight"]
    assert gate == values["blocks.1.attn.to_gate_compress.weight"]


@pytest.mark.parametrize("scale", ["row", "tensor", "part", "block"])
def test_shards_of_a_quantised_file_are_cut_with_their_scales(tmp_path, scale):
    """H25 (LightX2V #1453): per part by rows, out_proj and fc2 by columns; single values are on every rank."""
    content = CONVROT | {"convrot_groupsize": 8}
    values = quantised(Layout.RELEASE, scale=scale, content=content)
    folder = tmp_path / "source"
    folder.mkdir()
    save(folder / "model.safetensors", values, {LAYOUT_KEY: "release"})
    convert_variant(folder, tmp_path / "ranks", Layout.MODULE, tp=2)
    whole = dequantised(values, Layout.RELEASE)
    for rank in range(2):
        shards = load(one_file(tmp_path / "ranks" / f"rank-{rank}-of-2"))
        known = {atom.name: atom for atom in atoms(TINY)}
        for name, held in shard_spans(TINY, Layout.MODULE, 2, rank).items():
            module = name.removesuffix(".weight")
            if f"{module}.weight_scale" not in shards:
                continue
            q = np.frombuffer(shards[name].data, np.int8).reshape(shards[name].shape).astype("f8")
            factor = np.frombuffer(shards[f"{module}.weight_scale"].data, np.float32).astype("f8")
            if len(factor) == len({span.atom for span in held}) and len(factor) > 1 and scale == "part":
                factor = np.repeat(factor, len(q) // len(factor))
            each = np.repeat(factor, len(q) // len(factor))[:, None] if len(factor) > 1 else factor
            assert shards[f"{module}.comfy_quant"] == blob(content)
            for span in held:
                full = whole[span.atom][span.start : span.stop]
                low, high = (
                    cut_range(known[span.atom], 2, rank) if cut_axis(known[span.atom]) == 1 else (None, None)
                )
                rows = slice(span.row, span.row + span.stop - span.start)
                np.testing.assert_array_equal((q * each)[rows], full[:, low:high], err_msg=span.atom)
        bias = "blocks.0.adaln_proj.linear.bias"
        assert shards[bias].data == values[bias].data[rank * TINY.adaln_dim : (rank + 1) * TINY.adaln_dim]


def test_shards_through_convrot_groups_are_refused(tmp_path):
    values = quantised()  # groups of 16; fc2 has 40 columns a rank
    folder = tmp_path / "source"
    folder.mkdir()
    save(folder / "model.safetensors", values, {LAYOUT_KEY: "module"})
    arguments = ["convert", str(folder), str(tmp_path / "out"), "--to", "module", "--variant", "--tp", "2"]
    assert main(arguments) == 2
    with pytest.raises(QuantisedVariantError, match=r"fc2\.weight: columns 0:40 .*ConvRot groups of 16"):
        convert_variant(folder, tmp_path / "out", Layout.MODULE, tp=2)
    for tp in (0, 3):
        with pytest.raises(ShapeError, match=f"tp {tp}"):
            convert_variant(folder, tmp_path / "out", Layout.MODULE, tp=tp)
    assert not (tmp_path / "out").exists()


# --- refusing --------------------------------------------------------------------------------------------


def test_a_blob_without_format_names_layer_and_field(tmp_path):
    """H24 (ComfyUI-INT8-Fast #99)."""
    values = quantised()
    values["blocks.1.mlp.fc2.comfy_quant"] = blob({"convrot": True})
    refused(tmp_path, values, r"blocks\.1\.mlp\.fc2: comfy_quant lacks its field 'format'")
    values["blocks.1.mlp.fc2.comfy_quant"] = blob(b"not json")
    refused(tmp_path, values, r"blocks\.1\.mlp\.fc2: comfy_quant is not JSON")
    values["blocks.1.mlp.fc2.comfy_quant"] = blob({"format": "nvfp4"})
    refused(tmp_path, values, r"blocks\.1\.mlp\.fc2: comfy_quant format 'nvfp4'")
    values["blocks.1.mlp.fc2.comfy_quant"] = blob(CONVROT | {"convrot_groupsize": 7})
    refused(tmp_path, values, r"blocks\.1\.mlp\.fc2: 80 columns are no whole ConvRot groups of 7")


def test_parts_that_disagree_are_refused_not_averaged(tmp_path):
    values = quantised(Layout.DIFFUSERS, scale="tensor")
    refused(tmp_path, values, "differ; one tensor has one", Layout.MODULE, Layout.DIFFUSERS)
    mixed = quantised(Layout.DIFFUSERS)
    name = "transformer_blocks.0.attn.to_k"
    mixed[f"{name}.weight"] = random(np.random.default_rng(0), "BF16", (TINY.inner_size, TINY.hidden_size))
    del mixed[f"{name}.weight_scale"], mixed[f"{name}.comfy_quant"]
    refused(
        tmp_path, mixed, r"qkv_proj\.weight: made of .*stored as BF16, I8", Layout.MODULE, Layout.DIFFUSERS
    )


def test_scale_blocks_that_straddle_heads_are_refused(tmp_path):
    values = quantised()
    name = "blocks.0.attn.qkv_proj.weight_scale"
    values[name] = floats(np.ones(4), (4, 1))  # 48 rows each, heads have 32
    refused(tmp_path, values, "one value for 48 rows")
    values[name] = floats(np.ones(5), (5, 1))
    refused(tmp_path, values, "not one value, nor one for each part, row or block")


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("absmax", "packs values across rows"),
        ("qweight", "GPTQ"),
        ("weight_scale_2", "swizzled"),
        ("SCB", "bitsandbytes"),
    ],
)
def test_packed_formats_are_refused_with_the_reason(tmp_path, ending, reason):
    values = quantised() | {f"blocks.0.mlp.fc2.{ending}": floats([1], (1,))}
    refused(tmp_path, values, reason)


def test_quantised_without_scale_and_scale_without_weight_are_problems():
    values = quantised()
    del values["blocks.0.mlp.fc2.weight_scale"]
    values["blocks.9.mlp.fc2.weight_scale"] = floats([1], (1,))
    found, text = problems_of(values)
    assert "quantised without a weight scale: blocks.0.mlp.fc2" in text
    assert "no blocks.9.mlp.fc2.weight beside it" in text
    assert found.rule is VARIANTS["full"]


def test_fp32_tensors_may_not_be_quantised_or_cast():
    values = full()
    values["final_layer.video_out.weight"] = random(np.random.default_rng(0), "BF16", (16, TINY.hidden_size))
    _, text = problems_of(values)
    assert "final_layer.video_out.weight is BF16; full H3 keeps it in F32" in text
    cast = pruned()
    name = "blocks.0.adaln_proj.linear.weight"
    cast[name] = random(np.random.default_rng(0), "BF16", cast[name].shape)
    _, text = problems_of(cast)
    assert f"{name} is BF16; pruned H3 keeps it in F32" in text


def test_already_converted_and_unsound_sources_are_refused(tmp_path):
    with pytest.raises(AlreadyConvertedError):
        through(tmp_path, quantised(), Layout.MODULE, Layout.MODULE)
    values = quantised()
    del values["blocks.1.norm1.weight"]
    refused(tmp_path, values, "1 tensor is absent")
