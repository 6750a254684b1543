"""Adapters on disk: the command line, folders and files, and merges whose every row is exact or within one rounding."""

import json

import pytest
import safetensors.torch
import torch
from h3_mapper.cli import main
from h3_mapper.errors import (
    DuplicateKeyError,
    FileFormatError,
    OutputExistsError,
    SourceError,
    TrailingBytesError,
)
from h3_mapper.lora import FORMATS, Statement, read, write
from h3_mapper.lora.arrays import raw
from h3_mapper.lora.describe import looks_like
from h3_mapper.lora.errors import UnsupportedAdapterError
from h3_mapper.lora.files import open_adapter, save_adapter
from lora_testkit import SCALE_ONE, assert_same_products, diffusers_lora
from mapper_testkit import TINY
from merge_testkit import torch_tensor


@pytest.fixture
def adapter():
    return read(diffusers_lora(), TINY, statement=SCALE_ONE)


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY.to_json(native=False)))
    return path


LOOKS = {
    **{
        name: {name} for name in ("peft", "diffusers", "flashgen", "vllm-omni", "kohya", "comfy", "diffsynth")
    },
    **{"turbo": {"turbo"}, "engine": {"engine"}, "fasth3": {"fasth3"}},
}


@pytest.mark.parametrize("name", FORMATS)
def test_inspect_says_whose_names_these_are(adapter, name):
    assert set(looks_like(write(adapter, name, TINY).tensors, TINY)) == LOOKS[name]
    assert not set(looks_like(["blocks.0.attn.other.lora_A.weight"], TINY))


@pytest.mark.parametrize("name", FORMATS)
def test_saved_files_read_back_and_the_safetensors_library_agrees(tmp_path, adapter, name):
    written = write(adapter, name, TINY)
    destination = tmp_path / ("folder" if written.peft_config else "file.safetensors")
    paths = save_adapter(written, destination, tmp_path / "elsewhere")
    again = open_adapter(destination)
    assert_same_products(adapter, again.read(TINY, Statement.of(name)))
    stored = safetensors.torch.load_file(paths[0])
    assert stored.keys() == written.tensors.keys()
    for key, value in stored.items():
        assert torch.equal(value, torch_tensor(raw(written.tensors[key])))
    with pytest.raises(OutputExistsError):
        save_adapter(written, destination, tmp_path / "elsewhere")
    assert sorted(p.name for p in tmp_path.iterdir()) == [destination.name], "temporary files are left"


def test_files_are_reproducible(tmp_path, adapter):
    for name in ("a", "b"):
        save_adapter(write(adapter, "kohya", TINY), tmp_path / f"{name}.safetensors", tmp_path / "x")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_bad_paths_and_bytes_are_refused(tmp_path, adapter):
    good = tmp_path / "good.safetensors"
    save_adapter(write(adapter, "comfy", TINY), good, tmp_path / "x")
    trailing = tmp_path / "trailing.safetensors"
    trailing.write_bytes(good.read_bytes() + b"x" * 16)
    with pytest.raises(TrailingBytesError):
        open_adapter(trailing)
    twice = tmp_path / "twice.safetensors"
    header = b'{"a.lora_A.weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' * 1
    header += b'"a.lora_A.weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    twice.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(DuplicateKeyError):
        open_adapter(twice)
    (tmp_path / "lora.pt").write_bytes(b"x")
    with pytest.raises(SourceError, match="pickles are not opened"):
        open_adapter(tmp_path / "lora.pt")
    gguf = tmp_path / "lora.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(FileFormatError, match="GGUF"):
        open_adapter(gguf)
    with pytest.raises(SourceError, match="exactly one"):
        open_adapter(tmp_path)
    packed = tmp_path / "packed.safetensors"
    safetensors.torch.save_file(
        {"blocks.0.mlp.fc2.lora_A.weight": torch.zeros(2, 2, dtype=torch.int8)}, packed
    )
    with pytest.raises(UnsupportedAdapterError, match="I8"):
        open_adapter(packed)


def test_command_line_inspects_and_converts(tmp_path, adapter, config_file, capsys):
    source, out, back = tmp_path / "in.safetensors", tmp_path / "out.safetensors", tmp_path / "back"
    save_adapter(write(adapter, "kohya", TINY), source, tmp_path / "x")
    sizes = ["--config", str(config_file)]
    assert main(["lora", "inspect", str(source), "--json", *sizes]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ranks"] == {"3": 7 * 4}  # q, k, v, out, gate, value, fc2 of four blocks
    assert shown["targets"]["blocks.N.attn.qkv_proj.weight[q]"] == TINY.num_layers
    assert main(["lora", "convert", str(source), str(out), "--to", "comfy", *sizes]) == 0
    assert main(["lora", "convert", str(out), str(back), "--to", "peft", *sizes]) == 0
    assert {p.name for p in back.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    assert_same_products(adapter, open_adapter(back).read(TINY))
    capsys.readouterr()
    assert (
        main(["lora", "convert", str(source), str(tmp_path / "no"), "--to", "turbo", "--alpha", "rank"]) == 2
    )
    assert "expected" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_undeclared_rows_are_an_error_until_stated(tmp_path, adapter, config_file, capsys):
    written = write(adapter, "kohya", TINY)
    bare = tmp_path / "bare.safetensors"
    safetensors.torch.save_file({k: torch_tensor(raw(v)) for k, v in written.tensors.items()}, bare)
    assert main(["lora", "inspect", str(bare), "--config", str(config_file)]) == 2
    shown = capsys.readouterr().out
    assert "row order of a fused qkv cannot be seen" in shown
    assert "scale      not stated" in shown
    assert "2 x blocks.N.attn.qkv_proj.weight[q]" in shown
    arguments = [
        "lora",
        "convert",
        str(bare),
        str(tmp_path / "o"),
        "--to",
        "peft",
        "--config",
        str(config_file),
    ]
    assert main(arguments) == 2
    assert "cannot be seen" in capsys.readouterr().err
    assert main([*arguments, "--from", "kohya"]) == 0
    assert_same_products(adapter, open_adapter(tmp_path / "o").read(TINY))
