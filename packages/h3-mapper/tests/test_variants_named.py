"""Every published form is named from its tensors alone: full, pruned, quantised, GGUF, or what it is instead."""

import json
import struct

import numpy as np
import pytest
from h3_mapper.classify import classify
from h3_mapper.cli import main
from h3_mapper.errors import (
    FileFormatError,
)
from h3_mapper.gguf import read_gguf
from h3_mapper.judge import judge
from h3_mapper.plan import tensors
from h3_mapper.source import open_source
from h3_mapper.spec import Layout
from h3_mapper.variants import ATTACHED
from mapper_testkit import TINY
from variants_testkit import Value, floats, full, problems_of, pruned, quantised, random, save


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
