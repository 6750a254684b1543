"""What a refusal says, word for word: what is wrong, where, what was expected, what to do; and a twin beside each."""

import json
import shutil
from pathlib import Path

import pytest
from h3_mapper import convert, verify
from h3_mapper.cli import main
from h3_mapper.source import open_source
from h3_mapper.tp_files import convert_shards
from lora_testkit import write_lora
from mapper_testkit import TINY, random_diffusers, write_file

FIRST, SECOND = (f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2))
INDEX = "diffusion_pytorch_model.safetensors.index.json"
FILE = "diffusion_pytorch_model.safetensors"
AGAIN = "copy or download the file again"


def one_file(src, held, **config):
    """Replace the checkpoint by one file of these tensors; config.json as it is, or with these changes."""
    shutil.rmtree(src)
    src.mkdir()
    write_file(src / FILE, held)
    (src / "config.json").write_text(json.dumps(TINY.to_json(native=False) | config))


# --- where ----------------------------------------------------------------------------------------------------------


def test_a_single_file_is_named_and_an_adapter_is_told_apart(said, src, capsys):
    write_lora("l.safetensors")
    name = "transformer.transformer_blocks.0.attn.to_q.lora_{}.weight"
    both = f"{name.format('A')}, {name.format('B')}"
    refusal = (
        f"l.safetensors: 2 names are no H3 tensor's: {both}; this is an adapter: see `h3-mapper lora inspect`"
    )
    assert said("convert", "l.safetensors", "out", "--to", "release") == refusal
    assert main(["inspect", "l.safetensors"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "l.safetensors"
    assert [line for line in lines if "problem" in line] == [f"  problem   UnknownNameError: {refusal}"]
    one_file(src, random_diffusers(TINY) | {"proj_out.wieght": ("BF16", [1], bytes(2))})
    assert said("convert", "src", "out", "--to", "release") == (
        "src: 1 name is no H3 tensor's: proj_out.wieght; nearest known name: proj_out.weight"
    )
    assert str(open_source(src)[""].given) == str(src)
    assert str(open_source(src / FILE)[""].given) == str(src / FILE)


def test_a_file_merged_into_in_its_own_folder_is_not_taken_for_a_folder(src):
    """`lora merge base.safetensors lora.safetensors out` in one folder: out lies beside the base, not inside it."""
    pytest.importorskip("numpy")
    shutil.copytree("src", "base")
    finite = {
        name: (dtype, shape, bytes(len(data)))
        for name, (dtype, shape, data) in random_diffusers(TINY).items()
    }
    one_file(src, finite)
    write_lora(src / "l.safetensors")
    code = main(["lora", "merge", f"src/{FILE}", "src/l.safetensors", "src/merged", "--alpha", "rank"])
    assert code == 0
    assert (src / "merged" / "config.json").is_file()
    assert main(["lora", "merge", "base", "src/l.safetensors", "base/merged", "--alpha", "rank"]) == 2


# --- manifests ------------------------------------------------------------------------------------------------------

MANIFEST = "expected the h3-manifest.json that convert writes, or what `h3-mapper manifest PATH` prints"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": None}, "'format' is absent"),
        ({"format": "h3-manifest-v0"}, "'format' is 'h3-manifest-v0', not one of h3-manifest-v1"),
        ({"layout": []}, "'layout' is [], not one of diffusers, release, module"),
        ({"algorithm": "none"}, "'algorithm' is none, which compares nothing"),
        ({"algorithm": "md5"}, "'algorithm' is 'md5', not one of xxh3, blake3, none"),
        ({"atoms": None}, "'atoms' is absent"),
        ({"atoms": {}}, "'atoms' is no object of atoms"),
        ({"atoms": {"a": 3}}, "atom 'a': shape is None"),
        ({"atoms": {"a": {"shape": [1], "dtype": 1}}}, "atom 'a': dtype is 1"),
        (
            {"atoms": {"a": {"shape": [1], "dtype": "F32", "digest": "0"}}},
            "atom 'a': digest is '0', not 32 hexadecimal digits of xxh3",
        ),
    ],
)
def test_a_manifest_s_wrong_field_is_named(said, src, change, message):
    convert("src", "kept", "release")
    held = json.loads((src.parent / "kept" / "h3-manifest.json").read_text()) | change
    (src.parent / "m.json").write_text(json.dumps({k: v for k, v in held.items() if v is not None}))
    assert said("verify", "src", "m.json") == f"m.json: {message}; {MANIFEST}"
    assert verify("src", "kept/h3-manifest.json").equal


# --- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", f"0 bytes is too short for a safetensors file; {AGAIN}"),
        (
            b"\n<!DOCTYPE html><html>",
            f"is a web page (HTML or XML), not the file itself: the server answered with a page; {AGAIN}",
        ),
        (
            b'{"error": "not found"}',
            f"is JSON text, not the file itself: an error message, an index or a config.json; {AGAIN}",
        ),
        (
            b"Entry not found",
            "starts with the text 'Entry no'; not a safetensors file but perhaps a server's message; "
            + AGAIN,
        ),
        (bytes(99), f"is zeros at its start: an unfinished download or copy; {AGAIN}"),
        (
            b"PK\x03\x04" + bytes(9),
            "is a zip archive, as torch.save writes; pickles are not opened: save it as safetensors",
        ),
        (b"\x1f\x8b" + bytes(9), "is gzip-compressed; unpack it first"),
        (b"version https://git", "is a Git LFS pointer, not the file itself; fetch it with git lfs pull"),
        (
            b"\xff" * 8,
            f"header length {2**64 - 1} is over {2**24}; not a safetensors file of H3; {AGAIN}",
        ),
        (b"<\0\0\0\0\0\0\0", f"the header says 60 bytes and the file has 0 left; {AGAIN}"),
    ],
)
def test_a_file_that_is_something_else_is_named(said, src, data, message):
    (src / SECOND).write_bytes(data)
    assert said("convert", "src", "out", "--to", "release") == f"src/{SECOND}: {message}"


def test_bytes_after_the_last_tensor_and_absent_shards_say_what_to_do(said, src):
    whole = (src / SECOND).read_bytes()
    (src / SECOND).write_bytes(whole + bytes(16))
    assert said("convert", "src", "out", "--to", "release") == (
        f"src/{SECOND}: 16 bytes follow the last tensor; {AGAIN} (some tools ignore such bytes, the safetensors "
        "library refuses them)"
    )
    (src / SECOND).unlink()
    absent = f"src/{INDEX}: 1 of 2 shards are absent: {SECOND}; "
    assert said("convert", "src", "out", "--to", "release") == absent + "put them into src"
    (src / SECOND).symlink_to("blobs/none")
    assert said("convert", "src", "out", "--to", "release") == (
        absent + "they are links to files that are not there: download the snapshot again"
    )
    (src / SECOND).unlink()
    (src / SECOND).write_bytes(whole)
    assert main(["convert", "src", "out", "--to", "release"]) == 0


# --- which model, which layout, which dtype -------------------------------------------------------------------------


def test_another_model_is_named_before_its_tensors(said, src):
    """ddalcu/mlx-serve#130 (comment): the unsupported type, not an unrelated tensor."""
    words = {"model.layers.0.self_attn.q_proj.weight": ("BF16", [2, 2], bytes(8))}
    one_file(src, words)
    (src / "config.json").write_text('{"model_type": "qwen2", "hidden_size": 2}')
    assert said("convert", "src", "out", "--to", "release") == (
        "src/config.json: model_type is 'qwen2'; expected a MiniMax-H3 transformer (MiniMaxH3Transformer3DModel): "
        "point at its folder, not at a text encoder's, a VAE's or another model's"
    )
    (src / "config.json").unlink()
    assert said("convert", "src", "out", "--to", "release") == (
        "src: 1 name is no H3 tensor's: model.layers.0.self_attn.q_proj.weight; this is a language model; expected a "
        "MiniMax-H3 transformer"
    )
    write_lora(src / FILE)  # an adapter beside another model's config.json is an adapter
    (src / "config.json").write_text('{"model_type": "qwen2"}')
    assert "this is an adapter" in said("convert", "src", "out", "--to", "release")


def test_a_statement_against_the_metadata_says_what_to_do(said, src):
    convert("src", "native", "release")
    assert said("convert", "native", "out", "--to", "diffusers", "--from", "module") == (
        "native: its metadata says release but --from (stated) says module; leave the statement out, or, if the "
        "metadata is wrong, save the file without its h3.layout entry and state the layout"
    )
    assert said("convert", "native", "out", "--to", "module", "--from", "diffusers") == (
        "native: the names are native but --from (stated) says diffusers; expected release or module: state that or "
        "leave it out"
    )
    assert main(["convert", "native", "out", "--to", "diffusers", "--from", "release"]) == 0


@pytest.mark.parametrize(
    ("dtype", "size", "message"),
    [
        (
            "F16",
            2,
            "context_embedder.bias is F16, and {most} more like it; H3 keeps them in BF16 and nothing is ever cast: "
            "use or export the BF16 checkpoint",
        ),
        (
            "BF16",
            2,
            "audio_proj_in.bias is BF16, and {few} more like it; H3 keeps them in F32 and nothing is ever cast: save "
            "the model as it is, without a cast of the whole of it",
        ),
    ],
)
def test_a_checkpoint_cast_as_a_whole_counts_its_tensors(said, src, capsys, dtype, size, message):
    held = random_diffusers(TINY)
    cast = {
        n: (dtype, shape, bytes(len(data) // (2 if d == "BF16" else 4) * size))
        for n, (d, shape, data) in held.items()
    }
    one_file(src, cast)
    few = sum(kind == "F32" for kind, _, _ in held.values()) - 1
    wanted = "src: " + message.format(few=few, most=len(held) - few - 2)
    assert said("convert", "src", "out", "--to", "release") == wanted
    assert main(["inspect", "src"]) == 2
    problems = [line for line in capsys.readouterr().out.splitlines() if "problem" in line]
    assert problems[0] == f"  problem   DtypeError: {wanted}"
    assert len(problems) == (2 if dtype == "F16" else 1)  # the fp32 tensors are F16 too
    one_file(src, held | {"proj_in.bias": ("BF16", [48], bytes(96))})
    assert said("convert", "src", "out", "--to", "release").startswith(
        "src: proj_in.bias is BF16; H3 keeps it in F32 and"
    )


def test_sizes_that_contradict_name_where_they_came_from(said, src):
    held = random_diffusers(TINY)
    one_file(src, held, num_layers=1)
    one = "src: config.json (1 blocks, 2 refiner blocks) has no place for transformer_blocks.1."
    message = said("convert", "src", "out", "--to", "release")
    assert message.startswith(one)
    assert message.endswith("more; put the config.json of these weights beside them")
    one_file(src, held, text_dim=41)
    assert said("convert", "src", "out", "--to", "release") == (
        "src: context_embedder.weight has shape [48, 40]; config.json gives [48, 41]: put the config.json of these "
        "weights beside them, or save or download that tensor's file again"
    )
    wrong = held | {"norm_out.norm.weight": ("BF16", [47], bytes(94))}
    one_file(src, wrong)
    (src / "config.json").unlink()
    assert "has shape [47]; the other tensors give [48]: " in said("convert", "src", "out", "--to", "release")


def test_inspect_says_each_problem_once(src, capsys):
    held = random_diffusers(TINY)
    del held["proj_in.bias"]
    one_file(src, held)
    assert main(["inspect", "src"]) == 2
    problems = [line for line in capsys.readouterr().out.splitlines() if "problem" in line]
    assert problems == [
        "  problem   MissingTensorError: src: 1 tensor is absent: proj_in.bias; save or copy the whole checkpoint again"
    ]
    one_file(src, held | {"norm_out.norm.weight": ("BF16", [47], bytes(94))})
    main(["inspect", "src"])
    problems = [line for line in capsys.readouterr().out.splitlines() if "problem" in line]
    assert len(problems) == 2
    assert problems[1] == "  problem   norm_out.norm.weight has shape [47]; expected [48]"


# --- paths ----------------------------------------------------------------------------------------------------------


def test_a_folder_of_checkpoints_or_of_ranks_says_which(said, src):
    root = src.parent
    nothing = "no safetensors file, index or transformer/ folder here; "
    assert said("inspect", ".") == f".: {nothing}point at one of src"
    convert_shards(Path("src"), Path("ranks"), 2)
    assert said("convert", "ranks", "out", "--to", "release").endswith(
        f"ranks: {nothing}one rank's part each in rank-0-of-2, rank-1-of-2: use the whole checkpoint that they were "
        "cut from"
    )
    assert said("inspect", "src/config.json") == (
        "src/config.json: not a .safetensors file, an index or a folder; point at the folder or file that holds "
        "the weights"
    )
    assert root.joinpath("ranks/rank-1-of-2").is_dir()


def test_names_of_any_length_and_letter_that_the_disk_takes_are_taken(said, src):
    longest = "模" * 85  # 255 bytes
    convert("src", longest, "release")
    assert verify("src", longest).equal
    assert said("convert", "src", longest + "b", "--to", "release").endswith("File name too long")
    assert said("convert", "no\nwhere", "out", "--to", "release") == "no\\nwhere: no such file or folder"


def test_a_quantised_file_names_each_tensor_once(said, src):
    """A blob is told by its name and by its dtype. Twin: the weight beside it, by its dtype alone."""
    held = dict(random_diffusers(TINY))
    weight = "transformer_blocks.0.attn.to_q.weight"
    held[weight] = ("I8", held[weight][1], held[weight][2][::2])
    held["transformer_blocks.0.attn.to_q.comfy_quant"] = ("U8", [2], b"{}")
    one_file(src, held)
    assert said("convert", "src", "out", "--to", "release") == (
        "src: quantised weights (transformer_blocks.0.attn.to_q.comfy_quant, transformer_blocks.0.attn.to_q.weight); "
        "use the BF16 checkpoint (`convert --variant` moves this one if its scales follow rows)"
    )
