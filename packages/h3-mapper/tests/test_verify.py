"""Verify proves equality across layouts, and catches what names, shapes and dtypes cannot show."""

import json
import shutil
import sys
from dataclasses import replace

import pytest
from h3_mapper import Layout, MapperError, convert, plan, prove, verify
from h3_mapper.demo import swap_halves
from h3_mapper.digest import Digest
from h3_mapper.errors import FileFormatError
from h3_mapper.identify import identified_all
from h3_mapper.manifest import compute, read_manifest
from h3_mapper.source import open_source
from hypothesis import given
from hypothesis import strategies as st
from mapper_testkit import TINY, reference_native, write_diffusers, write_file


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One checkpoint in all three layouts; tests copy what they damage."""
    root = tmp_path_factory.mktemp("made")
    write_diffusers(root / "diffusers", TINY, shards=2)
    convert(root / "diffusers", root / "release", "release", max_shard_size=100_000)
    convert(root / "diffusers", root / "module", "module")
    return root


@pytest.mark.parametrize("algorithm", [Digest.XXH3, Digest.BLAKE3])
def test_atom_digests_are_equal_across_layouts_and_to_a_fresh_reading(made, tmp_path, algorithm):
    """The manifest written during conversion, one computed from the files, and the source's own."""
    manifests = []
    for layout in Layout:
        found = identified_all(made / layout)[""]
        manifests.append(compute(found, algorithm, threads=2))
    for layout in (Layout.RELEASE, Layout.MODULE):
        convert(made / "diffusers", tmp_path / layout, layout, digest=algorithm)
        manifests.append(read_manifest(tmp_path / layout / "h3-manifest.json"))
    assert all(m.atoms == manifests[0].atoms for m in manifests)
    assert len({line.digest for line in manifests[0].atoms.values()}) == 66


def test_digests_are_of_the_bytes(made):
    """xxh3_128 of each atom's rows, computed here from the file in one call."""
    import xxhash

    manifest = compute(identified_all(made / "diffusers")[""], Digest.XXH3, threads=1)
    for name, part in (("transformer_blocks.1.attn.to_k.weight", "blocks.1.attn.qkv_proj.weight[k]"),):
        header, entry = open_source(made / "diffusers")[""].tensors[name]
        raw = header.path.read_bytes()[header.data_start + entry.begin : header.data_start + entry.end]
        assert manifest.atoms[part].digest == xxhash.xxh3_128_hexdigest(raw)


@given(data=st.data())
def test_any_single_flipped_bit_is_found_and_named(made, tmp_path_factory, data):
    copy = tmp_path_factory.mktemp("flip") / "release"
    shutil.copytree(made / "release", copy)
    name = data.draw(st.sampled_from(sorted(set(open_source(copy)[""].tensors) - {"rope.inv_freq"})))
    header, entry = open_source(copy)[""].tensors[name]
    at = data.draw(st.integers(entry.begin, entry.end - 1))
    raw = bytearray(header.path.read_bytes())
    raw[header.data_start + at] ^= 1 << data.draw(st.integers(0, 7))
    header.path.write_bytes(bytes(raw))
    result = verify(made / "diffusers", copy)
    assert [d.atom.partition("[")[0] for d in result.differences] == [name]
    shutil.rmtree(copy)


def test_swapped_halves_are_named_for_what_they_are(made, tmp_path):
    """huggingface/diffusers#14410"""
    shutil.copytree(made / "module", tmp_path / "bad")
    swap_halves(tmp_path / "bad", "blocks.0.mlp.fc1.weight")
    result = verify(made / "diffusers", tmp_path / "bad")
    assert [(d.atom, d.reason) for d in result.differences] == [
        ("blocks.0.mlp.fc1.weight[gate]", "holds the first's blocks.0.mlp.fc1.weight[value]"),
        ("blocks.0.mlp.fc1.weight[value]", "holds the first's blocks.0.mlp.fc1.weight[gate]"),
    ]


@pytest.mark.parametrize(("is_", "said"), [("release", "module"), ("module", "release")])
def test_a_misstated_row_order_is_found_and_diagnosed(made, tmp_path, is_, said):
    """MiniMax-AI/MiniMax-H3#48: the first head's q rows agree under both orders, so a prefix proves nothing."""
    held = reference_native(write_diffusers(tmp_path / "a", TINY), TINY, Layout(is_))
    (tmp_path / "b").mkdir()
    write_file(tmp_path / "b" / "model.safetensors", held)
    result = verify(tmp_path / "a", tmp_path / "b", stated=(None, Layout(said)))
    assert {d.atom.partition("[")[0] for d in result.differences} == {
        name for name in held if name.endswith("qkv_proj.weight")
    }
    assert f"read as {is_}, not {said}" in result.hint
    other = {"release": Layout.MODULE, "module": Layout.RELEASE}[is_]
    wrong = reference_native(write_diffusers(tmp_path / "c", TINY), TINY, other)
    rows = TINY.attention_head_dim * TINY.hidden_size * 2
    name = "blocks.0.attn.qkv_proj.weight"
    assert held[name][2][:rows] == wrong[name][2][:rows]
    assert held[name][2] != wrong[name][2]


def test_a_wrong_plan_that_is_still_a_permutation_is_caught(made, tmp_path, monkeypatch):
    """prove() accepts any permutation; that the rows are the right ones is what digests are for."""

    def swapped(config, source, target):
        good = plan(config, source, target)
        name = "blocks.0.mlp.fc1.weight"
        targets = (replace(t, rows=t.rows[::-1]) if t.name == name else t for t in good.targets)
        wrong = replace(good, targets=tuple(targets))
        prove(wrong)
        return wrong

    monkeypatch.setattr(sys.modules["h3_mapper.convert"], "plan", swapped)
    convert(made / "diffusers", tmp_path / "out", "release")
    atoms = ["blocks.0.mlp.fc1.weight[gate]", "blocks.0.mlp.fc1.weight[value]"]
    assert [d.atom for d in verify(made / "diffusers", tmp_path / "out").differences] == atoms
    assert [
        d.atom for d in verify(made / "diffusers", tmp_path / "out" / "h3-manifest.json").differences
    ] == atoms


def test_a_manifest_stands_for_a_checkpoint(made, tmp_path):
    assert verify(made / "diffusers", made / "release" / "h3-manifest.json").equal
    changed = json.loads((made / "release" / "h3-manifest.json").read_text())
    changed["atoms"]["blocks.0.norm1.weight"]["digest"] = "0" * 32
    del changed["atoms"]["blocks.1.norm1.weight"]
    (tmp_path / "m.json").write_text(json.dumps(changed))
    result = verify(made / "diffusers", tmp_path / "m.json")
    assert {(d.atom, d.reason) for d in result.differences} == {
        ("blocks.0.norm1.weight", "bits differ"),
        ("blocks.1.norm1.weight", "only in the first"),
    }


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"format": "h3-manifest-v0"}', '{"format": "h3-manifest-v1", "atoms": 3}']
)
def test_a_malformed_manifest_is_refused(made, tmp_path, text):
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(FileFormatError, match="manifest"):
        verify(made / "diffusers", tmp_path / "m.json")


def test_digest_none_writes_no_manifest_and_compares_nothing(made, tmp_path):
    convert(made / "diffusers", tmp_path / "out", "release", digest="none")
    assert not (tmp_path / "out" / "h3-manifest.json").exists()
    with pytest.raises(MapperError, match="compares nothing"):
        verify(made / "diffusers", made / "release", digest=Digest.NONE)


def test_checkpoints_of_different_size_differ(made, tmp_path):
    write_diffusers(tmp_path / "gated", TINY.with_gates(True))
    assert "only in the second" in {
        d.reason for d in verify(made / "diffusers", tmp_path / "gated").differences
    }
