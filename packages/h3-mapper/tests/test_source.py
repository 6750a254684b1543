"""What a path is: index, shards, single file, snapshot, partitions; and every way these can be wrong."""

import json
import os
import shutil

import pytest
from h3_mapper import Layout, MapperError, convert, verify
from h3_mapper.errors import (
    DuplicateKeyError,
    DuplicateTensorError,
    FileFormatError,
    IndexFileError,
    MissingShardError,
    SourceError,
    StrayTensorError,
    UnsafePathError,
)
from h3_mapper.source import open_source
from hypothesis import given, settings
from hypothesis import strategies as st
from mapper_testkit import TINY, read_files, reference_native, refused, write_diffusers, write_file

INDEX = "diffusion_pytorch_model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path):
    write_diffusers(tmp_path / "src", TINY, shards=3)
    return tmp_path / "src"


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def first(folder):
    return next(iter(json.loads((folder / INDEX).read_text())["weight_map"]))


def point_at(shard):
    def change(index):
        index["weight_map"][next(iter(index["weight_map"]))] = shard

    return change


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/abs/x.safetensors", "sub/x.safetensors", "..", ".", "a\\b", "a\0b"]
)
def test_a_shard_name_that_leaves_the_folder_is_refused_before_it_is_opened(sharded, shard):
    """huggingface/diffusers#14175"""
    edit_index(sharded, point_at(shard))
    refused(UnsafePathError, "must lie in the folder", sharded)


def test_an_absent_shard_is_named(sharded):
    (sharded / "diffusion_pytorch_model-00002-of-00003.safetensors").unlink()
    refused(MissingShardError, "00002-of-00003", sharded)


def test_a_tensor_the_index_does_not_name_is_refused(sharded):
    edit_index(sharded, lambda index: index["weight_map"].pop("proj_in.bias"))
    refused(StrayTensorError, r"proj_in\.bias", sharded)


def test_a_tensor_the_shards_do_not_hold_is_refused(sharded):
    edit_index(
        sharded, lambda i: i["weight_map"].update(extra="diffusion_pytorch_model-00001-of-00003.safetensors")
    )
    refused(StrayTensorError, "extra", sharded)


def test_a_tensor_in_another_shard_than_the_index_says_is_refused(sharded):
    edit_index(sharded, point_at("diffusion_pytorch_model-00003-of-00003.safetensors"))
    refused(StrayTensorError, "not in the shard", sharded)


def test_a_tensor_in_two_shards_is_refused(sharded):
    held = read_files(sharded)
    path = sharded / "diffusion_pytorch_model-00003-of-00003.safetensors"
    third = {
        n: held[n]
        for n, f in json.loads((sharded / INDEX).read_text())["weight_map"].items()
        if f == path.name
    }
    write_file(path, third | {"proj_in.weight": held["proj_in.weight"]})
    refused(DuplicateTensorError, r"proj_in\.weight.*00001.*00003", sharded)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ('{"weight_map": {"a": "x", "a": "y"}}', DuplicateKeyError),
        ('{"weight_map": []}', IndexFileError),
        ('{"weight_map": {}}', IndexFileError),
        ('{"weight_map": {"a": 3}}', IndexFileError),
        ('{"weight_map": {"a": ""}}', IndexFileError),
        ("[]", IndexFileError),
        ("{", FileFormatError),
    ],
)
def test_a_malformed_index_is_refused(sharded, content, error):
    (sharded / INDEX).write_text(content)
    refused(error, "index", sharded)


def test_two_indexes_are_ambiguous_and_one_can_be_named(sharded):
    shutil.copy(sharded / INDEX, sharded / "model.safetensors.index.json")
    refused(IndexFileError, "two indexes", sharded)
    assert len(open_source(sharded / INDEX)[""].tensors) == 62


def test_shards_without_an_index_are_read_if_they_are_one_whole_family(sharded):
    (sharded / INDEX).unlink()
    assert len(open_source(sharded)[""].tensors) == 62
    (sharded / "diffusion_pytorch_model-00001-of-00003.safetensors").unlink()
    refused(MissingShardError, "00001-of-00003", sharded)


def test_two_families_without_an_index_are_refused_and_with_one_the_index_decides(sharded):
    """sgl-project/sglang#35107: globbing loaded two splits side by side."""
    held = read_files(sharded)
    for n in (1, 2):
        half = dict(list(held.items())[n - 1 :: 2])
        write_file(sharded / f"diffusion_pytorch_model-{n:05d}-of-00002.safetensors", half)
    assert len(open_source(sharded)[""].headers) == 3
    (sharded / INDEX).unlink()
    refused(SourceError, "several sets", sharded)


@pytest.mark.parametrize("name", ["no", "notes.txt"])
def test_what_is_no_checkpoint_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    refused(SourceError, name, tmp_path / name)
    refused(SourceError, "empty", tmp_path / "empty")


def test_gguf_is_named(tmp_path):
    """city96/ComfyUI-GGUF#476"""
    (tmp_path / "h3.gguf").write_bytes(b"GGUF" + bytes(100))
    refused(FileFormatError, "GGUF", tmp_path / "h3.gguf")


def test_folder_single_file_index_and_first_shard_give_one_result(tmp_path):
    """kohya-ss/musubi-tuner#1026: tools took only one file, or only the first shard."""
    held = write_diffusers(tmp_path / "many", TINY, shards=3)
    write_diffusers(tmp_path / "one", TINY)
    want = reference_native(held, TINY, Layout.RELEASE)
    paths = [
        tmp_path / "many",
        tmp_path / "many" / INDEX,
        tmp_path / "many" / "diffusion_pytorch_model-00001-of-00003.safetensors",
        tmp_path / "one",
        tmp_path / "one" / "diffusion_pytorch_model.safetensors",
    ]
    for n, path in enumerate(paths):
        convert(path, tmp_path / f"out{n}", "release")
        assert read_files(tmp_path / f"out{n}") == want


def test_a_single_file_without_config_json_is_read_by_its_shapes(tmp_path):
    write_diffusers(tmp_path / "src", TINY)
    (tmp_path / "src" / "config.json").unlink()
    convert(tmp_path / "src" / "diffusion_pytorch_model.safetensors", tmp_path / "release", "release")
    (tmp_path / "release" / "config.json").unlink()
    convert(tmp_path / "release", tmp_path / "back", "diffusers")
    assert read_files(tmp_path / "back") == read_files(tmp_path / "src")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    # Diffusers files do not show the number of frequencies: the release's is assumed, and then kept.
    assert written == TINY.to_json(native=False) | {"rope_freq_dim": 16}


def test_a_root_of_partitions_is_mirrored_and_one_alone_is_enough(tmp_path):
    """SceneWorks/SceneWorks#2346: an install of one partition was unusable."""
    for partition, seed in (("transformer", 1), ("transformer_ref", 2)):
        write_diffusers(tmp_path / "root" / partition, TINY, seed)
    convert(tmp_path / "root", tmp_path / "both", "release")
    for partition in ("transformer", "transformer_ref"):
        want = reference_native(read_files(tmp_path / "root" / partition), TINY, Layout.RELEASE)
        assert read_files(tmp_path / "both" / partition) == want
    assert verify(tmp_path / "root", tmp_path / "both").equal
    shutil.rmtree(tmp_path / "root" / "transformer_ref")
    convert(tmp_path / "root", tmp_path / "one", "release")
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == ["transformer"]
    with pytest.raises(SourceError, match="different partitions"):
        verify(tmp_path / "both", tmp_path / "one")


def test_both_kinds_of_partition_at_once_are_refused(tmp_path):
    """vllm-project/vllm-omni#7610: root metadata names Diffusers, FL2VA/ holds native files; keys decide."""
    write_diffusers(tmp_path / "root" / "transformer", TINY)
    convert(tmp_path / "root" / "transformer", tmp_path / "native", "release")
    (tmp_path / "root" / "FL2VA").mkdir()
    shutil.move(tmp_path / "native", tmp_path / "root" / "FL2VA" / "transformer")
    (tmp_path / "root" / "modular_model_index.json").write_text('{"_class_name": "MiniMaxH3ModularPipeline"}')
    refused(SourceError, "both kinds", tmp_path / "root")
    convert(tmp_path / "root" / "FL2VA", tmp_path / "out", "diffusers")
    assert read_files(tmp_path / "out" / "transformer") == read_files(tmp_path / "root" / "transformer")


def test_partitions_match_by_meaning_not_by_folder(tmp_path):
    for partition, native, seed in (("transformer", "FL2VA", 1), ("transformer_ref", "Ref2VA", 2)):
        write_diffusers(tmp_path / "root" / partition, TINY, seed)
        (tmp_path / "release" / native).mkdir(parents=True)
        convert(tmp_path / "root" / partition, tmp_path / "release" / native / "transformer", "release")
    assert verify(tmp_path / "root", tmp_path / "release").equal
    swapped = tmp_path / "release" / "FL2VA"
    swapped.rename(tmp_path / "release" / "x")
    (tmp_path / "release" / "Ref2VA").rename(swapped)
    (tmp_path / "release" / "x").rename(tmp_path / "release" / "Ref2VA")
    assert len(verify(tmp_path / "root", tmp_path / "release").differences) == 2 * 66


@pytest.fixture
def hub(tmp_path):
    """A hub cache: blobs, and a snapshot of symbolic links into them."""
    write_diffusers(tmp_path / "flat", TINY, shards=2)
    blobs = tmp_path / "models--org--h3" / "blobs"
    snapshot = tmp_path / "models--org--h3" / "snapshots" / "abc" / "transformer"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in (tmp_path / "flat").iterdir():
        shutil.copy(path, blobs / path.name)
        (snapshot / path.name).symlink_to(os.path.relpath(blobs / path.name, snapshot))
    return snapshot.parent


def test_a_symlinked_snapshot_is_read_through_its_links(hub, tmp_path):
    convert(hub, tmp_path / "out", "module")
    want = reference_native(read_files(tmp_path / "flat"), TINY, Layout.MODULE)
    assert read_files(tmp_path / "out" / "transformer") == want


@settings(max_examples=settings().max_examples)
@given(data=st.data())
def test_a_damaged_index_never_raises_anything_but_our_error(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz") / "src"
    write_diffusers(folder, TINY, shards=2)
    raw = bytearray((folder / INDEX).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    (folder / INDEX).write_bytes(bytes(raw))
    try:
        open_source(folder)
    except MapperError:
        return
    shutil.rmtree(folder)
