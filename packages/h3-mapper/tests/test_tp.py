"""Shards: the rank's tensors are the slices of the full conversion; every element has exactly its owners."""

import numpy as np
import pytest
from h3_mapper import H3Config
from h3_mapper.errors import ShapeError
from h3_mapper.plan import atoms, plan, spans
from h3_mapper.spec import Layout, Parallel
from h3_mapper.tp import TP_DEGREES, check_degree, cut_axis, cut_range, shard, shard_spans
from hypothesis import given
from hypothesis import strategies as st
from mapper_testkit import TINY

LAYOUTS = st.sampled_from(list(Layout))


def numbered(config, layout):
    """Every element of every tensor holds a number of its own, the same for an atom in every layout."""
    values, start = {}, 0
    for atom in atoms(config):
        size = int(np.prod(atom.shape))
        values[atom.name] = np.arange(start, start + size).reshape(atom.shape)
        start += size
    return assembled(values, spans(config, layout))


def assembled(values, held):
    return {
        name: np.concatenate([values[span.atom][span.start : span.stop] for span in parts])
        for name, parts in held.items()
    }


def run(sharded, source):
    """A ShardPlan on numpy arrays, the obvious way."""
    result = {}
    for target in sharded.targets:
        if target.data is None:
            low, high = target.columns or (None, None)
            blocks = [source[rows.name][rows.start : rows.stop] for rows in target.rows]
            whole = np.concatenate(blocks)
            result[target.name] = whole[:, low:high] if target.columns else whole
            assert result[target.name].shape == target.shape, target.name
    return result


def sizes(tp):
    """Configurations that tp divides."""
    several = st.integers(1, 2).map(lambda n: n * tp)
    return st.builds(
        H3Config,
        num_attention_heads=several,
        attention_head_dim=st.integers(1, 3),
        hidden_size=several,
        num_layers=st.just(1),
        num_refiner_layers=st.just(1),
        ffn_dim=several,
        in_channels=several,
        audio_in_channels=several,
        patch_size=st.just((1, 1, 1)),
        text_dim=st.integers(1, 3),
        freq_dim=st.integers(1, 3),
        time_embed_hidden_dim=several,
        time_embed_dim=several,
        rope_freq_dim=st.just(1),
        vsa_gates=st.booleans(),
    )


@given(data=st.data(), tp=st.sampled_from(TP_DEGREES), source=LAYOUTS, target=LAYOUTS)
def test_shard_equals_the_slice_of_the_full_conversion_and_covers_it(data, tp, source, target):
    config = data.draw(sizes(tp))
    held, whole = numbered(config, source), numbered(config, target)
    mapping = plan(config, source, target)
    ranks = [run(shard(mapping, tp, rank), held) for rank in range(tp)]
    by_name = {atom.name: atom for atom in atoms(config)}
    for name, full in whole.items():
        parallel = by_name[spans(config, target)[name][0].atom].parallel
        parts = [rank[name] for rank in ranks]
        if parallel is Parallel.WHOLE:
            assert all(np.array_equal(part, full) for part in parts)
        else:  # every element exactly once over the ranks
            np.testing.assert_array_equal(
                np.sort(np.concatenate([p.reshape(-1) for p in parts])), np.sort(full, None)
            )
        if parallel is Parallel.ROW:
            np.testing.assert_array_equal(np.concatenate(parts, 1), full)


def test_module_shard_is_cut_inside_q_k_v_gate_and_value():
    """sglang #34529: one cut of the fused matrix has the right shape and the wrong rows."""
    whole = numbered(TINY, Layout.MODULE)
    source = numbered(TINY, Layout.DIFFUSERS)
    for rank in range(2):
        got = run(shard(plan(TINY, Layout.DIFFUSERS, Layout.MODULE), 2, rank), source)
        for name, count in (("blocks.0.attn.qkv_proj.weight", 3), ("blocks.0.mlp.fc1.weight", 2)):
            thirds = np.split(whole[name], count)
            np.testing.assert_array_equal(got[name], np.concatenate([np.split(t, 2)[rank] for t in thirds]))
            naive = np.split(whole[name], 2)[rank]
            assert naive.shape == got[name].shape
            assert not np.array_equal(naive, got[name])


def test_biases_shard_with_their_rows_and_scalars_are_whole():
    """L: a 1-D adaln bias left whole at tp 2 (LightX2V #1453) has the right dtype and the wrong rank's rows."""
    got = run(shard(plan(TINY, Layout.DIFFUSERS, Layout.MODULE), 2, 1), numbered(TINY, Layout.DIFFUSERS))
    full = numbered(TINY, Layout.MODULE)
    bias = "blocks.0.adaln_proj.linear.bias"
    np.testing.assert_array_equal(got[bias], full[bias][TINY.adaln_dim // 2 :])
    np.testing.assert_array_equal(got["time_embedder.proj_out.bias"], full["time_embedder.proj_out.bias"])
    np.testing.assert_array_equal(got["blocks.0.norm1.weight"], full["blocks.0.norm1.weight"])


def test_the_release_allows_one_two_four_and_eight():
    for tp in TP_DEGREES:
        check_degree(H3Config(), tp, tp - 1)
    for tp in (3, 7, 14, 16, 28, 56):
        with pytest.raises(ShapeError, match=r"this model allows \[1, 2, 4, 8\]"):
            check_degree(H3Config(), tp)
    with pytest.raises(ShapeError, match="rank 2 of tp 2"):
        check_degree(H3Config(), 2, 2)


def test_shard_spans_count_rows_of_the_rank():
    held = shard_spans(TINY, Layout.RELEASE, 2, 1)["blocks.0.attn.qkv_proj.weight"]
    assert [span.row for span in held] == [0, 32, 64]
    assert {(span.start, span.stop) for span in held} == {(32, 64)}


@pytest.mark.parametrize("parallel", list(Parallel))
def test_cut_ranges_tile_the_axis(parallel):
    atom = next(a for a in atoms(TINY) if a.parallel is parallel)
    axis = cut_axis(atom)
    ranges = [cut_range(atom, 2, rank) for rank in range(2)]
    if axis is None:
        assert ranges == [(0, atom.rows)] * 2
    else:
        assert ranges == [(0, atom.shape[axis] // 2), (atom.shape[axis] // 2, atom.shape[axis])]
