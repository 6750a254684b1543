"""Pruned and quantised files: named exactly, mapped with everything that belongs to their rows, or refused by layer."""

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
from h3_mapper.classify import classify
from h3_mapper.cli import main
from h3_mapper.errors import (
    AlreadyConvertedError,
    AmbiguousLayoutError,
    FileFormatError,
    PrunedVariantError,
    QuantisedVariantError,
    ShapeError,
)
from h3_mapper.gguf import read_gguf
from h3_mapper.judge import judge
from h3_mapper.plan import atoms, plan, spans, tensors
from h3_mapper.safetensors_io import DTYPE_BITS, Entry, encode_header, read_header
from h3_mapper.source import LAYOUT_KEY, open_source
from h3_mapper.spec import Layout
from h3_mapper.tp import cut_axis, cut_range, shard_spans
from h3_mapper.variant_files import convert_variant
from h3_mapper.variants import ATTACHED, VARIANTS
from mapper_testkit import TINY

PRUNED = replace(TINY, time_embed_dim=8)
CONVROT = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16}
LINEARS = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")


class Value:
    """Bytes with a dtype and a shape: what a file holds."""

    def __init__(self, dtype, shape, data):
        self.dtype, self.shape, self.data = dtype, tuple(shape), bytes(data)
        assert len(self.data) * 8 == int(np.prod(self.shape)) * DTYPE_BITS[dtype]

    def __eq__(self, other):
        return (self.dtype, self.shape, self.data) == (other.dtype, other.shape, other.data)

    def __hash__(self):
        return hash(self.data)


def random(rng, dtype, shape):
    return Value(dtype, shape, rng.bytes(int(np.prod(shape)) * DTYPE_BITS[dtype] // 8))


def floats(values, shape):
    return Value("F32", shape, np.asarray(values, np.float32).tobytes())


def blob(content):
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return Value("U8", (len(data),), data)


def save(path, values, metadata=None):
    entries, offset = [], 0
    for name, value in values.items():
        entries.append(Entry(name, value.dtype, value.shape, offset, offset + len(value.data)))
        offset += len(value.data)
    path.write_bytes(encode_header(entries, metadata or {}) + b"".join(v.data for v in values.values()))
    return path


def load(path):
    header = read_header(path)
    data = path.read_bytes()[header.data_start :]
    return {e.name: Value(e.dtype, e.shape, data[e.begin : e.end]) for e in header.entries.values()}


def one_file(folder):
    (file,) = folder.glob("*.safetensors")
    return file


def full(layout=Layout.MODULE, config=TINY, seed=0):
    rng = np.random.default_rng(seed)
    values = {spec.name: random(rng, spec.dtype, spec.shape) for spec in tensors(config, layout)}
    if "rope.inv_freq" in values:
        values["rope.inv_freq"] = Value("F32", (config.rope_freq_dim,), config.inv_freq())
    return values


def pruned(seed=0):
    rng = np.random.default_rng(seed)
    values = {name: v for name, v in full(config=PRUNED).items() if not name.startswith("time_embedder.")}
    for name, value in values.items():
        if "adaln_proj" in name:
            values[name] = random(rng, "F32", value.shape)
    return values | {"adaln_t_table": random(rng, "F32", (1025, 8))}


def quantised(layout=Layout.MODULE, dtype="I8", scale="row", content=CONVROT, seed=0):
    """Block linears quantised as published: a scale for each row (or one, or one for each part), a blob each."""
    rng = np.random.default_rng(seed)
    values = full(layout, seed=seed)
    held = spans(TINY, layout)
    for name in list(values):
        module = name.removesuffix(".weight")
        native = held[name][0].atom if name in held else ""
        if not name.endswith(".weight") or not any(f"{leaf}.weight" in native for leaf in LINEARS):
            continue
        rows, columns = values[name].shape
        values[name] = random(rng, dtype, (rows, columns))
        parts = len({span.atom for span in held[name]})
        shape = {"row": (rows, 1), "tensor": (), "part": (1, parts), "block": (rows // 8, 1)}[scale]
        values[f"{module}.weight_scale"] = floats(rng.random(int(np.prod(shape))), shape)
        if content is not None:
            values[f"{module}.comfy_quant"] = blob(content)
    return values


def dequantised(values, layout):
    """q * scale by atom in fp64: what a layer multiplies with, wherever its rows lie."""
    made = {}
    for name, held in spans(TINY, layout).items():
        module = name.removesuffix(".weight")
        if f"{module}.weight_scale" not in values:
            continue
        q = np.frombuffer(values[name].data, np.int8).reshape(values[name].shape).astype("f8")
        scale = np.frombuffer(values[f"{module}.weight_scale"].data, np.float32).astype("f8").reshape(-1)
        parts = list(dict.fromkeys(span.atom for span in held))
        for span in held:
            rows = q[span.row : span.row + span.stop - span.start]
            if len(scale) == len(q):
                each = scale[span.row : span.row + span.stop - span.start, None]
            elif len(scale) == len(parts):
                each = scale[parts.index(span.atom)]
            elif len(scale) == 1:
                each = scale[0]
            else:
                block = len(q) // len(scale)
                each = np.repeat(scale, block)[span.row : span.row + span.stop - span.start, None]
            made.setdefault(span.atom, []).append(rows * each)
    return {atom: np.concatenate(rows) for atom, rows in made.items()}


def assert_same_layers(one, two):
    assert one.keys() == two.keys()
    for atom, rows in one.items():
        np.testing.assert_array_equal(rows, two[atom], err_msg=atom)


def through(tmp_path, values, source, target, name="x"):
    folder = tmp_path / f"{name}-source"
    folder.mkdir(exist_ok=True)
    save(folder / "model.safetensors", values, {LAYOUT_KEY: str(source)} if source.native else {})
    (folder / "config.json").write_text(json.dumps(TINY.to_json(native=source.native)))
    convert_variant(folder, tmp_path / name, target)
    return load(one_file(tmp_path / name))


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


def problems_of(values):
    seen = {name: (value.shape, value.dtype) for name, value in values.items()}
    found = classify(
        seen, {name: value.data for name, value in values.items() if name.endswith("comfy_quant")}
    )
    return found, " | ".join(found.problems)


def refused(tmp_path, values, match, target=Layout.RELEASE, source=Layout.MODULE):
    with pytest.raises(QuantisedVariantError, match=match):
        through(tmp_path, values, source, target)
    assert not (tmp_path / "x").exists()


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


# --- naming ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "name", "problem"),
    [
        (full(), "full", ""),
        (full(Layout.DIFFUSERS), "full", ""),
        (full(config=TINY.with_gates(True)), "full+vsa", ""),
        (pruned(), "pruned", ""),
        (quantised(), "full+int8_tensorwise convrot 16", ""),
        (quantised(dtype="F8_E4M3", scale="tensor", content=None), "full+f8_e4m3", ""),
        (full() | {"adaln_t_table": floats(np.zeros(8), (1, 8))}, "unknown", "a hybrid: adaln_t_table"),
        (
            full() | {"blocks.1.adaln_proj.linear.weight": floats(np.zeros(864 * 8), (864, 8))},
            "unknown",
            "a hybrid: AdaLN widths [8, 24]",
        ),
        ({n: v for n, v in pruned().items() if n != "adaln_t_table"}, "unknown", "half of a pruned model"),
        (
            {n: v for n, v in pruned().items() if n != "adaln_t_table"}
            | {n: v for n, v in full().items() if "time" in n},
            "unknown",
            "AdaLN of width 8 (pruned) beside the full model's time_embedder",
        ),
        (full() | {"time_embedder.table": floats([1], (1,))}, "unknown", "vLLM fork"),
        ({n.replace("mlp.fc1", "ff.fc_in"): v for n, v in full().items()}, "unknown", "FastVideo"),
        ({"model.norm.weight": floats([1], (1,))}, "unknown", "a language model"),
        ({"blocks.0.attn.qkv_proj.lora_A.weight": floats([1], (1,))}, "unknown", "an adapter"),
        (
            full() | {n: v for n, v in full(Layout.DIFFUSERS).items() if "ff.net" in n},
            "unknown",
            "native names",
        ),
    ],
)
def test_every_published_form_is_named_and_hybrids_are_unknown(values, name, problem):
    found, text = problems_of(values)
    assert found.name == name
    assert problem in text
    assert bool(problem) == bool(found.problems)


def test_stacked_output_heads_are_a_problem_of_shape():
    values = full()
    values["final_layer.video_out.weight"] = random(np.random.default_rng(0), "F32", (64, TINY.hidden_size))
    _, text = problems_of(values)
    assert "final_layer.video_out.weight has shape [64, 48]; expected [16, 48]" in text


def test_partition_comes_from_a_name_or_is_not_stated(tmp_path):
    for word, wanted in (
        ("minimax_h3_ref2va_int8", "Ref2VA"),
        ("minimax_h3_fl2va_bf16", "FL2VA"),
        ("model", "not stated"),
    ):
        file = save(tmp_path / f"{word}.safetensors", full())
        (component,) = open_source(file).values()
        assert judge(component).partition.startswith(wanted)
    (tmp_path / "root" / "transformer_ref").mkdir(parents=True)
    save(tmp_path / "root" / "transformer_ref" / "model.safetensors", full())
    ((folder, component),) = open_source(tmp_path / "root").items()
    assert judge(component, folder).partition == "Ref2VA (named transformer_ref)"


def test_inspect_names_variant_partition_and_precision(tmp_path, capsys):
    file = save(tmp_path / "minimax_h3_fl2va_pruned.safetensors", pruned())
    assert main(["inspect", str(file), "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["components"]
    assert (shown["variant"], shown["partition"]) == ("pruned", "FL2VA (named minimax_h3_fl2va_pruned)")
    assert shown["precision"]["F32"] > 12
    assert main(["inspect", str(file)]) == 0
    text = capsys.readouterr().out
    assert "variant   pruned: AdaLN of width 8" in text
    hybrid = save(tmp_path / "hybrid.safetensors", full() | {"adaln_t_table": floats([1], (1,))})
    assert main(["inspect", str(hybrid)]) == 2
    assert "variant   unknown" in capsys.readouterr().out


def test_convert_variant_from_the_command_line(tmp_path, capsys):
    file = save(tmp_path / "int8.safetensors", quantised())
    arguments = ["convert", str(file), str(tmp_path / "out"), "--to", "release", "--from", "module"]
    assert main(arguments) == 2
    assert "quantised" in capsys.readouterr().err
    assert main([*arguments, "--variant"]) == 0
    assert "full+int8_tensorwise convrot 16, module -> release" in capsys.readouterr().out


# --- GGUF ------------------------------------------------------------------------------------------------


def gguf(path, names, architecture=b"", kind=12):
    """A header as llama.cpp writes it: one string pair, one array pair, tensors without data."""

    def text(data):
        return struct.pack("<Q", len(data)) + data

    pairs = text(b"general.architecture") + struct.pack("<I", 8) + text(architecture)
    pairs += text(b"sizes") + struct.pack("<IIQ", 9, 4, 2) + struct.pack("<II", 1, 2)
    infos = b"".join(text(n.encode()) + struct.pack("<IQQIQ", 2, 4, 4, kind, 0) for n in names)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, len(names), 2) + pairs + infos)
    return path


@pytest.mark.parametrize("architecture", [b"", b"wan", b"minimax_h3"])
def test_gguf_is_named_by_its_tensors_whatever_it_calls_itself(tmp_path, capsys, architecture):
    """H27 (ComfyUI-GGUF #476, llama.cpp #28050)."""
    names = [spec.name for spec in tensors(TINY, Layout.MODULE)]
    path = gguf(tmp_path / "h3.gguf", names, architecture)
    assert main(["inspect", str(path)]) == 2
    shown = capsys.readouterr().out
    assert "GGUF: MiniMax-H3 by its tensor names" in shown
    assert f"{len(names)} Q4_K" in shown
    assert main(["convert", str(path), str(tmp_path / "o"), "--to", "module", "--from", "release"]) == 2
    assert "GGUF" in capsys.readouterr().err


def test_gguf_of_another_model_and_broken_headers(tmp_path, capsys):
    path = gguf(tmp_path / "wan.gguf", ["patch_embedding.weight", "head.head.weight"], b"wan")
    assert main(["inspect", str(path)]) == 2
    assert "GGUF: unknown" in capsys.readouterr().out
    good = path.read_bytes()
    for broken in (
        good[:30],
        b"GGUF" + struct.pack("<IQQ", 3, 2**60, 1),
        b"GGUF" + struct.pack("<I", 1) + good[8:],
    ):
        path.write_bytes(broken)
        with pytest.raises(FileFormatError):
            read_gguf(path)
    path.write_bytes(b"GGML")
    with pytest.raises(FileFormatError, match="not a GGUF"):
        read_gguf(path)


def test_conv_folded_to_two_dimensions_is_a_shape_problem_not_reshaped():
    """H28 (sglang #38904): the right number of elements under the wrong rank."""
    values = full()
    name = "video_patch_proj.weight"
    rows, columns = values[name].shape
    values[name] = Value("F32", (rows, columns // 4, 2, 2), values[name].data)
    _, text = problems_of(values)
    assert f"{name} has shape [{rows}, {columns // 4}, 2, 2]; expected 2 dimensions, never reshaped" in text
    seen = {n: (v.shape, v.dtype) for n, v in values.items()}
    (problem,) = classify(seen, {}, TINY.to_json(native=True)).problems
    assert problem == f"{name} has shape [{rows}, {columns // 4}, 2, 2]; expected [{rows}, {columns}]"


def test_every_attached_ending_is_known_to_the_refusal_of_plain_conversion():
    """What `--variant` moves, a plain conversion refuses by name."""
    from h3_mapper.check import QUANTISED_MARKS

    assert set(ATTACHED) - {"scale_input"} <= set(QUANTISED_MARKS)
