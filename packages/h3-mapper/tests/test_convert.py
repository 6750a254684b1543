"""Any layout to any layout and back is bitwise, for any dimensions, sharding and order; output follows the
hub's rules and the library reads it; digests do not depend on layout, shards or threads."""

import itertools
import json
import random
from dataclasses import replace

import pytest
import torch
from h3_mapper import H3Config, Layout, convert, tensors, verify
from h3_mapper.shards import out_files, parse_size
from h3_mapper.spec import TensorSpec
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given
from hypothesis import strategies as st
from mapper_testkit import TINY, configs, read_files, reference_native, snapshot, write_diffusers, write_file
from safetensors import safe_open
from safetensors.torch import load_file

PAIRS = list(itertools.permutations(Layout, 2))


def written_in(folder, config, layout, seed=0):
    """A checkpoint in any layout, made by the reference mapping."""
    held = write_diffusers(folder, config, seed)
    if layout.native:
        held = reference_native(held, config, layout)
        (folder / "diffusion_pytorch_model.safetensors").unlink()
        write_file(folder / "model.safetensors", held)
    return held


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_all_six_directions_equal_the_reference_mapping(tmp_path, source, target):
    written_in(tmp_path / "a", TINY, source)
    want = written_in(tmp_path / "want", TINY, target)
    convert(tmp_path / "a", tmp_path / "b", target, stated=source)
    assert read_files(tmp_path / "b") == want
    convert(tmp_path / "b", tmp_path / "again", source)
    assert read_files(tmp_path / "again") == read_files(tmp_path / "a")


@given(config=configs(), data=st.data())
def test_any_walk_through_layouts_shards_and_orders_comes_back_bitwise(tmp_path_factory, config, data):
    root = tmp_path_factory.mktemp("walk")
    held = write_diffusers(
        root / "0", config, seed=data.draw(st.integers(0, 9)), shards=data.draw(st.integers(1, 3))
    )
    at = Layout.DIFFUSERS
    steps = data.draw(st.lists(st.sampled_from(list(Layout)), min_size=1, max_size=3))
    path = root / "0"
    for n, layout in enumerate([*steps, Layout.DIFFUSERS], start=1):
        if layout is not at:
            size, threads = data.draw(st.sampled_from([300, 2000, "5GB"])), data.draw(st.integers(1, 3))
            convert(path, root / str(n), layout, max_shard_size=size, threads=threads)
            path, at = root / str(n), layout
            want = held if layout is Layout.DIFFUSERS else reference_native(held, config, layout)
            assert read_files(path) == want
            assert verify(root / "0", path).equal


def test_bytes_written_do_not_depend_on_threads_or_source_sharding(tmp_path):
    held = write_diffusers(tmp_path / "many", TINY, shards=3)
    write_diffusers(tmp_path / "one", TINY)
    shuffled = list(held.items())
    random.Random(3).shuffle(shuffled)
    write_file(tmp_path / "one" / "diffusion_pytorch_model.safetensors", dict(shuffled))
    convert(tmp_path / "many", tmp_path / "a", "release", max_shard_size=100_000, threads=1)
    convert(tmp_path / "one", tmp_path / "b", "release", max_shard_size=100_000, threads=5)
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")


def test_an_unaligned_source_gives_the_same_result(tmp_path):
    """safetensors/safetensors#231: header lengths of real files are not always a multiple of 8."""
    held = write_diffusers(tmp_path / "a", TINY)
    write_file(tmp_path / "a" / "diffusion_pytorch_model.safetensors", held, {"pad": "x" * 3})
    assert (tmp_path / "a" / "diffusion_pytorch_model.safetensors").read_bytes()[0] % 8 != 0
    convert(tmp_path / "a", tmp_path / "b", "module")
    assert read_files(tmp_path / "b") == reference_native(held, TINY, Layout.MODULE)


def test_pieces_longer_than_a_chunk_and_shards_smaller_than_one(tmp_path, monkeypatch):
    """The chunk boundary falls inside rows, heads and atoms alike."""
    held = write_diffusers(tmp_path / "a", TINY)
    for chunk in (1, 7, 4096):
        monkeypatch.setattr("h3_mapper.stream.CHUNK", max(chunk, 977))
        convert(tmp_path / "a", tmp_path / f"out{chunk}", "release", max_shard_size=5000)
        assert read_files(tmp_path / f"out{chunk}") == reference_native(held, TINY, Layout.RELEASE)
        assert verify(tmp_path / "a", tmp_path / f"out{chunk}").equal


def test_a_sparse_source_gives_the_same_bytes_and_stays_sparse(tmp_path):
    """Holes are zeros to readers and digests; they are kept, so a full-size sparse checkpoint needs little disk."""
    wide = replace(TINY, hidden_size=512, ffn_dim=2048)
    held = {n: (d, s, bytes(len(b))) for n, (d, s, b) in write_diffusers(tmp_path / "a", wide).items()}
    marked = "transformer_blocks.0.ff.net.0.proj.weight"
    for name in (marked, "proj_in.bias", "transformer_blocks.1.attn.to_k.weight"):
        dtype, shape, data = held[name]
        held[name] = (dtype, shape, data[:-3] + b"end")
    path = tmp_path / "a" / "diffusion_pytorch_model.safetensors"
    write_file(path, held, {"format": "pt"})
    dense = path.read_bytes()
    path.unlink()
    with path.open("wb") as file:
        for at in range(0, len(dense), 4096):
            if any(block := dense[at : at + 4096]):
                file.seek(at)
                file.write(block)
        file.truncate(len(dense))
    convert(tmp_path / "a", tmp_path / "b", "release")
    assert read_files(tmp_path / "b") == reference_native(held, wide, Layout.RELEASE)
    assert verify(tmp_path / "a", tmp_path / "b").equal
    written = tmp_path / "b" / "model.safetensors"
    assert written.stat().st_size > 20_000_000
    assert written.stat().st_blocks * 512 < 6_000_000


@pytest.mark.parametrize("limit", ["5GB", 100_000, 3000, 1])
def test_the_library_reads_every_shard_and_the_index_is_the_union(tmp_path, limit):
    """NVIDIA-NeMo/Automodel#2096: an index that lacked other ranks' keys."""
    write_diffusers(tmp_path / "a", TINY)
    convert(tmp_path / "a", tmp_path / "b", "release", max_shard_size=limit)
    shards = sorted((tmp_path / "b").glob("*.safetensors"))
    held = {name: path.name for path in shards for name in load_file(path)}
    assert set(held) == {spec.name for spec in tensors(TINY, Layout.RELEASE)}
    for path in shards:
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt", "h3.layout": "release"}
    index = tmp_path / "b" / "model.safetensors.index.json"
    assert index.exists() == (len(shards) > 1)
    if len(shards) > 1:
        parsed = json.loads(index.read_text())
        total = sum(spec.nbytes for spec in tensors(TINY, Layout.RELEASE))
        assert parsed == {"metadata": {"total_size": total}, "weight_map": held}


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    limit=st.integers(1, 200),
)
def test_sharding_is_the_hubs(sizes, limit):
    state = {f"t{n}": torch.empty(size, dtype=torch.uint8) for n, size in enumerate(sizes)}
    theirs = split_torch_state_dict_into_shards(
        state, filename_pattern="m{suffix}.safetensors", max_shard_size=limit
    )

    class Byte(TensorSpec):
        nbytes = property(lambda self: self.shape[0])

    ours = out_files([Byte(n, (t.numel(),), "U8", "") for n, t in state.items()], "m", limit, {})
    assert {f.name: sorted(e.name for e in f.entries) for f in ours} == {
        file: sorted(names) for file, names in theirs.filename_to_tensors.items()
    }


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("4GiB", 2**32), ("1.5KB", 1500), (77, 77)]
)
def test_sizes_are_read_as_the_hub_reads_them(text, size):
    assert parse_size(text) == size


def test_config_json_is_converted_and_unrelated_keys_survive(tmp_path):
    write_diffusers(tmp_path / "a", TINY)
    original = TINY.to_json(native=False) | {"norm_eps": 1e-6, "note": "kept"}
    (tmp_path / "a" / "config.json").write_text(json.dumps(original))
    convert(tmp_path / "a", tmp_path / "b", "release")
    native = json.loads((tmp_path / "b" / "config.json").read_text())
    assert native["latents_dim"] == 4
    assert native["note"] == "kept"
    convert(tmp_path / "b", tmp_path / "c", "diffusers")
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == original


def test_the_release_gets_inv_freq_and_a_module_file_may_lack_it(tmp_path):
    held = written_in(tmp_path / "m", TINY, Layout.MODULE)
    del held["rope.inv_freq"]
    write_file(tmp_path / "m" / "model.safetensors", held)
    convert(tmp_path / "m", tmp_path / "r", "release", stated="module")
    assert read_files(tmp_path / "r")["rope.inv_freq"] == ("F32", [4], TINY.inv_freq())


def test_vsa_gates_are_carried(tmp_path):
    gated = TINY.with_gates(True)
    held = write_diffusers(tmp_path / "a", gated)
    convert(tmp_path / "a", tmp_path / "b", "release")
    assert read_files(tmp_path / "b") == reference_native(held, gated, Layout.RELEASE)
    assert sum("to_gate_compress" in name for name in read_files(tmp_path / "b")) == 2


def test_the_released_plan_builds_in_a_blink_and_copies_every_byte():
    """Full 33B shapes, headers included, without touching a disk."""
    full = H3Config()
    for layout in Layout:
        files = out_files(tensors(full, layout), "m", 5 * 10**9, {})
        assert sum(f.entries[-1].end for f in files) == sum(s.nbytes for s in tensors(full, layout))
        assert all(f.entries[-1].end <= 5 * 10**9 for f in files)
