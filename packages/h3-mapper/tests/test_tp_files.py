"""Shards on disk: equal to slices of the full conversion, from the rank's own bytes."""

import json
from dataclasses import replace

import numpy as np
import pytest
import safetensors
from h3_mapper import convert
from h3_mapper.cli import main
from h3_mapper.errors import LayoutError, OutputExistsError, ShapeError
from h3_mapper.manifest import read_manifest
from h3_mapper.spec import Layout
from h3_mapper.sync_proof import LiveDigest, combine, differing, digest_checkpoint
from h3_mapper.tp_files import convert_shards, open_shard
from mapper_testkit import TINY
from merge_testkit import base_state, save_base
from test_sync import expected

EIGHT = replace(TINY, num_attention_heads=8, in_channels=8, audio_in_channels=8)
"""Allows tp 4 and 8, as the release does."""

DTYPES = {"BF16": np.uint16, "F32": np.float32}


def raw_file(path):
    """Tensors of a file as numpy, bf16 as its bits."""
    found = {}
    for name, entry in safetensors.deserialize(path.read_bytes()):
        found[name] = np.frombuffer(entry["data"], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


def values_of(folder):
    (file,) = folder.glob("*.safetensors")
    return raw_file(file)


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        assert found[name].tobytes() == np.ascontiguousarray(value).tobytes(), name


@pytest.fixture(params=list(Layout), ids=str)
def source(request, tmp_path):
    folder = save_base(tmp_path / "source", request.param)
    return folder, request.param, values_of(folder)


@pytest.mark.parametrize("tp", [1, 2])
def test_each_rank_is_the_slice_of_the_full_conversion(source, tmp_path, tp):
    folder, layout, whole = source
    stored = {name: value for name, value in whole.items() if name != "rope.inv_freq"}
    done = convert_shards(folder, tmp_path / "out", tp)
    assert [path.name for path in done.folders] == [f"rank-{rank}-of-{tp}" for rank in range(tp)]
    for rank, path in enumerate(done.folders):
        wanted = expected(stored, layout, Layout.MODULE, tp, rank)
        assert_equal(values_of(path), wanted)
        with open_shard(folder, tp, rank) as files:
            for name, value in wanted.items():
                assert files.read(name) == np.ascontiguousarray(value).tobytes(), name
        manifest = read_manifest(path / "h3-manifest.json")
        assert manifest.atoms["blocks.0.mlp.fc2.weight"].shape == (TINY.hidden_size, TINY.ffn_dim // tp)
        assert json.loads((path / "config.json").read_text())["num_layers"] == TINY.num_layers


def test_tp_one_equals_a_plain_conversion(tmp_path):
    folder = save_base(tmp_path / "source", Layout.DIFFUSERS)
    convert(folder, tmp_path / "plain", Layout.MODULE)
    convert_shards(folder, tmp_path / "sharded", 1)
    assert_equal(values_of(tmp_path / "sharded" / "rank-0-of-1"), values_of(tmp_path / "plain"))


@pytest.mark.parametrize("tp", [4, 8])
def test_four_and_eight_ranks_are_slices_and_their_digests_add_up(tmp_path, tp):
    folder = save_base(tmp_path / "source", Layout.RELEASE, config=EIGHT)
    whole = values_of(folder)
    stored = {name: value for name, value in whole.items() if name != "rope.inv_freq"}
    folders = convert_shards(folder, tmp_path / "out", tp).folders

    def digests(order):
        partials = []
        for rank, path in zip(order, folders, strict=True):
            digest = LiveDigest(EIGHT, Layout.MODULE, tp=tp, rank=rank)
            for name, value in values_of(path).items():
                digest.add(name, value)
            partials.append(digest.partials())
        return combine(EIGHT, partials)

    for rank, path in enumerate(folders):
        assert_equal(values_of(path), expected(stored, Layout.RELEASE, Layout.MODULE, tp, rank, EIGHT))
    assert digests(range(tp)) == digest_checkpoint(folder)
    wrong = differing(digest_checkpoint(folder), digests(reversed(range(tp))))
    assert "blocks.0.attn.qkv_proj.weight[q]" in wrong
    assert "blocks.1.mlp.fc2.weight" in wrong


@pytest.mark.parametrize(("config", "tp", "rank"), [(TINY, 2, 1), (EIGHT, 8, 5)], ids=["tp2", "tp8"])
def test_only_the_rank_s_own_bytes_matter(tmp_path, config, tp, rank):
    """Every byte of the source that no piece of the rank covers is inverted; the shard does not change."""
    folder = save_base(tmp_path / "source", Layout.RELEASE, config=config)
    (file,) = folder.glob("*.safetensors")
    with open_shard(folder, tp, rank) as files:
        before = {t.name: files.read(t.name) for t in files.sharded.targets}
        pieces = [piece for t in files.sharded.targets for piece in files.pieces(t.name)]
        assert sum(piece.length for piece in pieces) == sum(t.nbytes for t in files.sharded.targets if t.rows)
        header = int.from_bytes(file.read_bytes()[:8], "little") + 8
    data = np.frombuffer(file.read_bytes(), np.uint8)
    own = np.zeros(len(data), bool)
    own[:header] = True
    for piece in pieces:
        own[piece.offset : piece.offset + piece.length] = True
    at = file.read_bytes().find(TINY.inv_freq())  # its bits are checked on opening
    own[at : at + len(TINY.inv_freq())] = True
    file.write_bytes(np.where(own, data, ~data).tobytes())
    with open_shard(folder, tp, rank) as files:
        after = {t.name: files.read(t.name) for t in files.sharded.targets}
    assert 0.9 / tp < own.mean() < 1.2 / tp + 0.05
    assert after == before


def test_a_plain_slice_of_the_file_would_be_wrong(tmp_path):
    """H02 (sglang #34227): slicing grouped rows before reordering them gives valid shapes and other rows."""
    config = replace(TINY, num_attention_heads=4, attention_head_dim=16)  # two heads a rank
    folder = save_base(tmp_path / "source", Layout.RELEASE, config=config)
    name = "blocks.0.attn.qkv_proj.weight"
    stored = values_of(folder)[name]
    with open_shard(folder, 2, 1) as files:
        ours = files.read(name)
    naive = stored[len(stored) // 2 :].tobytes()
    assert len(naive) == len(ours)
    assert naive != ours, "the naive slice must be caught"


@pytest.mark.parametrize("layout", list(Layout))
def test_digest_of_a_checkpoint_on_disk_is_that_of_its_live_tensors(tmp_path, layout):
    folder = save_base(tmp_path / "source", layout)
    live = LiveDigest(TINY, Layout.DIFFUSERS)
    for name, tensor in base_state(Layout.DIFFUSERS).items():
        live.add(name, tensor)
    assert digest_checkpoint(folder) == combine(TINY, [live.partials()])
    (file,) = folder.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # the last value of the last tensor, fp32 or bf16
    file.write_bytes(data)
    assert len(differing(digest_checkpoint(folder), combine(TINY, [live.partials()]))) == 1


def test_command_line_writes_rank_folders_and_shards_are_not_whole_checkpoints(tmp_path, capsys):
    folder = save_base(tmp_path / "source", Layout.DIFFUSERS)
    out = tmp_path / "out"
    assert main(["convert", str(folder), str(out), "--to", "module", "--tp", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [path.rpartition("/")[2] for path in shown["folders"]] == ["rank-0-of-2", "rank-1-of-2"]
    assert main(["convert", str(out / "rank-0-of-2"), str(tmp_path / "again"), "--to", "diffusers"]) == 2
    assert "rank 0 of tp 2" in capsys.readouterr().err
    with pytest.raises(OutputExistsError):
        convert_shards(folder, out, 2)
    with pytest.raises(LayoutError, match="native"):
        convert_shards(folder, tmp_path / "no", 2, to=Layout.DIFFUSERS)
    with pytest.raises(ShapeError, match="does not divide"):
        convert_shards(folder, tmp_path / "no", 4)
    assert not (tmp_path / "no").exists()
