"""Digests of live weights: equal across layouts, shards and libraries; any single changed bit is named."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from h3_mapper import H3Config
from h3_mapper.errors import ShapeError, UnknownNameError
from h3_mapper.plan import atoms, plan
from h3_mapper.spec import Layout
from h3_mapper.sync_pieces import word_bytes
from h3_mapper.sync_proof import (
    DifferentWeightsError,
    LiveDigest,
    assert_same,
    combine,
    differing,
)
from h3_mapper.tp import shard
from hypothesis import given
from hypothesis import strategies as st
from mapper_testkit import TINY
from test_sync import state
from test_tp import run

VALUES = state(seed=11)


def partials(values, layout, tp=1, rank=0, config=TINY):
    digest = LiveDigest(config, layout, tp=tp, rank=rank)
    for name, value in values.items():
        digest.add(name, value)
    return digest.partials()


def converted(layout, tp=1, rank=0):
    return run(shard(plan(TINY, Layout.DIFFUSERS, layout), tp, rank), VALUES)


REFERENCE = combine(TINY, [partials(VALUES, Layout.DIFFUSERS)])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("layout", list(Layout))
def test_every_layout_and_degree_gives_the_trainer_s_digests(layout, tp):
    ranks = [partials(converted(layout, tp, rank), layout, tp, rank) for rank in range(tp)]
    assert combine(TINY, ranks) == REFERENCE
    assert len(REFERENCE) == len(set(REFERENCE.values())) == len(atoms(TINY))


@given(st.data())
def test_one_flipped_bit_anywhere_is_named(data):
    layout = data.draw(st.sampled_from(list(Layout)))
    values = {name: value.copy() for name, value in converted(layout).items()}
    name = data.draw(st.sampled_from(sorted(values)))
    raw = values[name].reshape(-1).view(np.uint8)
    raw[data.draw(st.integers(0, raw.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    wrong = differing(REFERENCE, combine(TINY, [partials(values, layout)]))
    assert len(wrong) == 1
    native = wrong[0].partition("[")[0]
    assert native == name or layout is Layout.DIFFUSERS
    with pytest.raises(DifferentWeightsError, match="hold different bits"):
        assert_same(REFERENCE, combine(TINY, [partials(values, layout)]))


def test_a_norm_weight_one_ulp_off_is_caught():
    """R08: a tolerance on log-probabilities lets this pass."""
    values = converted(Layout.MODULE)
    values["blocks.1.attn.q_norm.weight"] = values["blocks.1.attn.q_norm.weight"].copy()
    values["blocks.1.attn.q_norm.weight"][3] += 1
    assert differing(REFERENCE, combine(TINY, [partials(values, Layout.MODULE)])) == [
        "blocks.1.attn.q_norm.weight"
    ]


def test_scrambled_rows_of_the_right_shape_are_caught():
    """release rows called module rows: same name, shape, dtype and bytes, other places."""
    wrong = combine(TINY, [partials(converted(Layout.RELEASE), Layout.MODULE)])
    blocks = TINY.num_layers + TINY.num_refiner_layers
    assert len(differing(REFERENCE, wrong)) == 3 * blocks
    assert all("qkv_proj" in name for name in differing(REFERENCE, wrong))


def test_swapped_words_and_paired_flips_do_not_cancel():
    name = "transformer_blocks.0.adaln_proj.linear.weight"
    base = VALUES[name]
    for change in ("swap", "two sign bits"):
        value = base.copy()
        if change == "swap":
            value[[0, 5]] = value[[5, 0]]
        else:
            value[0, 3] ^= 0x8000
            value[7, 3] ^= 0x8000
        wrong = combine(TINY, [partials(VALUES | {name: value}, Layout.DIFFUSERS)])
        assert differing(REFERENCE, wrong) == ["blocks.0.adaln_proj.linear.weight"]


@given(cuts=st.lists(st.integers(0, TINY.inner_size), max_size=3), layout=st.sampled_from(list(Layout)))
def test_holders_of_some_rows_add_up(cuts, layout):
    """FSDP: each rank digests the rows it has, of any split."""
    values = converted(layout)
    edges = sorted({0, *cuts})
    holders = []
    for low, high in zip(edges, [*edges[1:], None], strict=True):
        digest = LiveDigest(TINY, layout)
        for name, value in values.items():
            if len(value[low:high]):
                digest.add(name, value[low:high], low)
        holders.append(digest.partials())
    if len(edges) > 1:
        assert any(len(h) < len(REFERENCE) or h != holders[0] for h in holders)
    assert combine(TINY, holders) == REFERENCE


def halves(layout=Layout.DIFFUSERS):
    """Two holders that cut every matrix within a block of rows."""
    made = []
    for low, high in ((0, 17), (17, None)):
        digest = LiveDigest(TINY, layout)
        for name, value in converted(layout).items():
            if len(value[low:high]):
                digest.add(name, value[low:high], low)
        made.append(digest.partials())
    return made


def test_blocks_of_rows_that_holders_share_travel_as_column_sums():
    one, two = halves()
    name = "blocks.0.attn.qkv_proj.weight[q]"
    assert one[name].shares[0].rows + two[name].shares[0].rows == 64
    assert len(one[name].shares[0].sums) == TINY.hidden_size * 2
    assert combine(TINY, [one, two]) == REFERENCE
    spoiled = replace(two[name].shares[0], sums=bytes(len(two[name].shares[0].sums)))
    wrong = combine(TINY, [one, two | {name: replace(two[name], shares=(spoiled,))}])
    assert differing(REFERENCE, wrong) == [name]


def test_sums_of_another_definition_are_refused():
    other = {name: replace(part, digest_id="h3-live-digest-v1") for name, part in halves()[0].items()}
    with pytest.raises(
        DifferentWeightsError, match="summed as h3-live-digest-v1, and this is h3-live-digest-v2"
    ):
        combine(TINY, [other, halves()[1]])


def test_missing_ranks_doubled_ranks_and_drifted_replicas_are_named():
    ranks = [partials(converted(Layout.MODULE, 2, rank), Layout.MODULE, 2, rank) for rank in range(2)]
    with pytest.raises(DifferentWeightsError, match=r"the holders have \d+ of its \d+ values"):
        combine(TINY, ranks[:1])
    with pytest.raises(DifferentWeightsError, match="once"):
        combine(TINY, [*ranks, ranks[1]])
    drifted = converted(Layout.MODULE, 2, 1)
    drifted["blocks.0.norm1.weight"] = drifted["blocks.0.norm1.weight"] ^ 1
    with pytest.raises(
        DifferentWeightsError, match=r"blocks\.0\.norm1\.weight: replicas differ: holders \[1\]"
    ):
        combine(TINY, [ranks[0], partials(drifted, Layout.MODULE, 2, 1)])
    doubled = [{name: replace(p, shares=p.shares * 2) for name, p in rank.items()} for rank in halves()]
    with pytest.raises(DifferentWeightsError, match=r"rows from \d+ on are held twice or not at all"):
        combine(TINY, doubled)
    digest = LiveDigest(TINY, Layout.MODULE)
    digest.add("final_layer.norm.weight", converted(Layout.MODULE)["final_layer.norm.weight"])
    assert combine(TINY, [digest.partials()], partial=True).keys() == {"final_layer.norm.weight"}


def test_torch_and_numpy_agree_also_on_unaligned_storage():
    values = {}
    for name, value in VALUES.items():
        flat = torch.from_numpy(value.astype(np.int32) if value.dtype == np.uint16 else value)
        tensor = flat.to(torch.int16).view(torch.bfloat16) if value.dtype == np.uint16 else flat
        padded = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
        padded[1:] = tensor.reshape(-1)
        values[name] = padded[1:].view(tensor.shape)  # as an FSDP flat parameter hands it out
    assert combine(TINY, [partials(values, Layout.DIFFUSERS)]) == REFERENCE


def test_wrong_names_shapes_and_dtypes_are_refused():
    digest = LiveDigest(TINY, Layout.MODULE)
    with pytest.raises(UnknownNameError):
        digest.add("blocks.0.attn.to_q.weight", VALUES["transformer_blocks.0.attn.to_q.weight"])
    with pytest.raises(ShapeError):
        digest.add("final_layer.norm.weight", np.zeros(TINY.hidden_size + 1, np.uint16))
    with pytest.raises(ShapeError):
        digest.add("final_layer.norm.weight", np.zeros(TINY.hidden_size, np.float32))
    with pytest.raises(ShapeError):
        digest.add("final_layer.norm.weight", np.zeros(2, np.uint16), TINY.hidden_size - 1)


def test_released_matrices_have_eight_byte_words():
    assert {word_bytes(atom) for atom in atoms(H3Config()) if len(atom.shape) == 2} == {8}
