"""What a refusal says, word for word: what is wrong, where, what was expected, what to do; and a twin beside each."""

import json
import shutil
from pathlib import Path

import pytest
from h3_mapper import H3Config, Layout, MapperError, convert, diffusers_to_native, verify
from h3_mapper.cli import main
from h3_mapper.errors import AlreadyConvertedError, ConfigError, UnsupportedTensorError
from h3_mapper.source import open_source
from h3_mapper.tp import check_degree
from h3_mapper.tp_files import convert_shards
from mapper_testkit import TINY, random_diffusers, read_files, reference_native, write_diffusers, write_file

FIRST, SECOND = (f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2))
INDEX = "diffusion_pytorch_model.safetensors.index.json"
FILE = "diffusion_pytorch_model.safetensors"
AGAIN = "copy or download the file again"


@pytest.fixture
def src(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_diffusers(tmp_path / "src", TINY, shards=2)
    return tmp_path / "src"


@pytest.fixture
def said(src, capsys):
    """Run a command that is refused; its one line without the program's name."""

    def run(*args):
        code = main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert not (src.parent / "out").exists()
        return err.removeprefix("h3-mapper: ").rstrip("\n")

    return run


def lora(path, rows=TINY.inner_size, columns=TINY.hidden_size):
    name = "transformer.transformer_blocks.0.attn.to_q.lora_{}.weight"
    factors = {"A": ("BF16", [2, columns], bytes(4 * columns)), "B": ("BF16", [rows, 2], bytes(4 * rows))}
    write_file(Path(path), {name.format(side): factor for side, factor in factors.items()})


def one_file(src, held, **config):
    """Replace the checkpoint by one file of these tensors; config.json as it is, or with these changes."""
    shutil.rmtree(src)
    src.mkdir()
    write_file(src / FILE, held)
    (src / "config.json").write_text(json.dumps(TINY.to_json(native=False) | config))


# --- where ----------------------------------------------------------------------------------------------------------


def test_a_single_file_is_named_and_an_adapter_is_told_apart(said, src, capsys):
    lora("l.safetensors")
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
    lora(src / "l.safetensors")
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
    lora(src / FILE)  # an adapter beside another model's config.json is an adapter
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


# --- adapters of other sizes ----------------------------------------------------------------------------------------


def test_an_adapter_for_other_sizes_asks_for_the_config(said, src, capsys):
    lora("l.safetensors")
    assert said("lora", "inspect", "l.safetensors", "--alpha", "rank") == (
        "l.safetensors: transformer_blocks.0.attn.to_q: A is [2, 48]; expected [rank, 5376]; the released model's "
        "sizes are assumed; for a model of other sizes pass its config.json (--config, config=)"
    )
    assert main(["lora", "inspect", "l.safetensors", "--alpha", "rank", "--config", "src/config.json"]) == 0
    capsys.readouterr()
    lora("other.safetensors", columns=47)
    assert said("lora", "inspect", "other.safetensors", "--config", "src/config.json") == (
        "other.safetensors: transformer_blocks.0.attn.to_q: A is [2, 47]; expected [rank, 48]; the adapter was made "
        "for a model of other sizes"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_alpha": "x"}, "lora_alpha is 'x'; expected a number"),
        ({"r": [2]}, "r is [2]; expected a number"),
        ({"rank_pattern": [1]}, "rank_pattern is [1]; expected an object of pattern -> number"),
        ({"alpha_pattern": {"to_q": "x"}}, "alpha_pattern['to_q'] is 'x'; expected a number"),
        (
            {"alpha_pattern": {"(": 3}},
            "alpha_pattern has '(', no regular expression (missing ), unterminated subpattern at position 0)",
        ),
    ],
)
def test_a_broken_adapter_config_is_named_by_its_field(said, src, change, message):
    Path("peft").mkdir()
    lora("peft/adapter_model.safetensors")
    settings = {"r": 2, "lora_alpha": 4, "rank_pattern": {}, "alpha_pattern": {"to_k": 8}}
    config = Path("peft/adapter_config.json")
    config.write_text(json.dumps(settings | change))
    inspect = ("lora", "inspect", "peft", "--config", "src/config.json")
    assert said(*inspect) == f"peft/adapter_model.safetensors: adapter_config.json: {message}"
    config.write_text(json.dumps(settings))
    assert main(list(inspect)) == 0


def test_a_component_that_the_adapter_does_not_have_is_named(said, src):
    lora("l.safetensors")
    inspect = [
        "lora",
        "inspect",
        "l.safetensors",
        "--config",
        "src/config.json",
        "--alpha",
        "rank",
        "--component",
    ]
    assert said(*inspect, "transformer_ref") == (
        "l.safetensors: no tensor is of component 'transformer_ref'; the file holds transformer"
    )
    assert main([*inspect, "transformer"]) == 0


def test_what_is_no_adapter_says_what_it_is(said, src):
    write_file(Path("none.safetensors"), {})
    assert said("lora", "inspect", "none.safetensors") == (
        "none.safetensors: holds no tensor; expected an adapter's factors: export it again"
    )
    Path("peft").mkdir()
    Path("peft/adapter_model.bin").write_bytes(b"PK")
    assert said("lora", "inspect", "peft") == (
        "peft: expected adapter_model.safetensors or exactly one .safetensors file, found none; pickled weights are "
        "never opened (adapter_model.bin): save them as safetensors"
    )
    assert said("lora", "inspect", "src").endswith(
        f"found {FIRST}, {SECOND}; point at the adapter, not at a model"
    )
    name = "transformer_blocks.9.attn.to_q.lora_{}.weight".format
    write_file(Path("deep.safetensors"), {name(side): ("BF16", [1, 1], bytes(2)) for side in "AB"})
    assert said("lora", "inspect", "deep.safetensors", "--config", "src/config.json") == (
        "deep.safetensors: none of 1 modules is one of MiniMax-H3's: transformer_blocks.9.attn.to_q; expected names "
        "such as transformer_blocks.0.attn.to_q or blocks.0.attn.qkv_proj, and blocks below 2; the adapter was made "
        "for a model of other sizes"
    )


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


# --- tensor parallelism on the demo ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_demo_can_be_cut_as_the_release_can(tp):
    from h3_mapper.demo import DEMO

    check_degree(DEMO, tp)
    check_degree(H3Config(), tp)
    with pytest.raises(
        MapperError, match=r"tp 3 does not divide 8 attention heads; this model allows \[1, 2, 4, 8\]"
    ):
        check_degree(DEMO, 3)


# --- Python ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1], "state dict: a list; expected a mapping of names to tensors: pass a state dict"),
        ({1: 2}, "state dict: key 1 is no name; expected names of tensors"),
    ],
)
def test_what_is_no_state_dict_is_refused(given, message):
    with pytest.raises(UnsupportedTensorError) as caught:
        diffusers_to_native(given, layout="release", config=TINY)
    assert str(caught.value) == message


def test_a_module_is_asked_for_its_state_dict():
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(1, 1)
    with pytest.raises(UnsupportedTensorError) as caught:
        diffusers_to_native(module, layout="release", config=TINY)
    assert str(caught.value) == (
        "state dict: a Linear; expected a mapping of names to tensors: pass its state_dict()"
    )
    with pytest.raises(MapperError, match="2 names are no H3 tensor's: bias, weight"):
        diffusers_to_native(module.state_dict(), layout="release", config=TINY)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0; expected a positive integer up to 4,096"),
        ({"num_layers": 2.5}, "num_layers is 2.5; expected a positive integer up to 4,096"),
        ({"hidden_size": "48"}, "hidden_size is '48'; expected a positive integer up to 2,147,483,647"),
        ({"ffn_dim": True}, "ffn_dim is True; expected a positive integer up to 2,147,483,647"),
        ({"patch_size": [1, 2]}, "patch_size is [1, 2]; expected three positive integers"),
        ({"rope_theta": 1}, "rope_theta is 1; expected a number above 1"),
        ({"vsa_gates": 1}, "vsa_gates is 1; expected True or False"),
    ],
)
def test_a_size_no_model_has_is_refused_wherever_it_is_stated(sizes, message):
    with pytest.raises(ConfigError) as caught:
        H3Config(**sizes)
    assert str(caught.value) == f"H3Config: {message}"
    if "vsa_gates" not in sizes:
        with pytest.raises(ConfigError) as caught:
            H3Config.from_mapping({"num_layers": 2, **sizes})
        assert str(caught.value) == f"config.json: {message}"
    assert H3Config(patch_size=[1, 2, 2]) == H3Config(rope_theta=10000) == H3Config()


def test_words_and_numbers_that_are_none_are_refused_alike_in_python(src):
    for call, message in {
        lambda: convert(
            "src", "out", "grouped"
        ): "'grouped' is not a layout; expected diffusers, release, module",
        lambda: convert(
            "src", "out", "release", digest="md5"
        ): "'md5' is not a digest; expected xxh3, blake3, none",
        lambda: convert("src", "out", "release", threads=0): "threads is 0; expected a positive integer",
        lambda: verify(
            "src", "src", stated="release"
        ): "stated is 'release'; expected a pair, the layouts of the two sides (None where they say it)",
        lambda: H3Config.from_mapping(
            None
        ): "the configuration is a NoneType; expected an H3Config or config.json's object (a mapping)",
    }.items():
        with pytest.raises(MapperError) as caught:
            call()
        assert str(caught.value) == message
        assert not (src.parent / "out").exists()
    native = reference_native(read_files(src), TINY, Layout.RELEASE)
    with pytest.raises(AlreadyConvertedError):
        diffusers_to_native(native, layout="release", config=TINY)
    assert verify("src", "src", stated=("diffusers", None)).equal
