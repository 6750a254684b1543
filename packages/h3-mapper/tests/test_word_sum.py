"""The digest's arithmetic: one definition for every library, chunk and split; what it sees, and what it cannot."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from h3_mapper import H3Config, word_sum
from h3_mapper.errors import ShapeError
from h3_mapper.plan import atoms
from h3_mapper.spec import Layout, Parallel
from h3_mapper.sync_pieces import grid, word_bytes
from h3_mapper.sync_proof import LiveDigest
from h3_mapper.word_sum import BLOCK, COLUMNS, GOLD, MULTIPLIER, RESIDUES, Grid, GroupSums, words_of
from hypothesis import given
from hypothesis import strategies as st

MASK = 2**64 - 1
GRID = Grid(rows=200, width=96, parts=2, residues=16)
WORDS = np.random.default_rng(5).integers(-(2**63), 2**63, (GRID.rows, GRID.width), np.int64)


def mixed(value):
    value &= MASK
    for factor in (MULTIPLIER & MASK, MULTIPLIER & MASK, 1):
        value = (value ^ value >> 32) * factor & MASK
    return value


def definition(words, of):
    """The two sums as the documentation words them, on Python integers."""
    groups = {RESIDUES: {}, COLUMNS: {}}
    part = of.width // of.parts
    for (row, column), word in np.ndenumerate(words):
        residue = (row * of.parts + column // part) * of.residues + column % part % of.residues
        for family, number in ((RESIDUES, residue), (COLUMNS, row // BLOCK * of.width + column)):
            groups[family][number] = groups[family].get(number, 0) + int(word)
    return [
        sum(mixed(total + GOLD * number) for number, total in groups[family].items()) & MASK
        for family in (RESIDUES, COLUMNS)
    ]


def summed(words, of=GRID, cuts=(), make=np.asarray):
    """The sums of words added in row ranges, as holders do."""
    held = GroupSums(make(words))
    edges = sorted({0, *cuts, len(words)})
    for low, high in pairwise(edges):
        held.add("atom", of, make(words[low:high])[None], low)
    assert not held.open
    totals = [0, 0]
    for key, family, total in held.totals():
        assert key == "atom"
        totals[family] += int(total)
    return [total & MASK for total in totals]


REFERENCE = definition(WORDS, GRID)


@given(cuts=st.lists(st.integers(0, GRID.rows), max_size=4))
def test_numpy_and_torch_sum_as_defined_however_rows_are_added(cuts):
    assert summed(WORDS, cuts=cuts) == REFERENCE
    assert summed(WORDS, cuts=cuts, make=torch.from_numpy) == REFERENCE


@pytest.mark.parametrize("room", [1, 100, 1 << 15])
@pytest.mark.parametrize("chunk", [1, 1 << 19])
def test_chunks_and_room_change_no_bit(monkeypatch, room, chunk):
    monkeypatch.setattr(word_sum, "HOST_ROOM", room)
    monkeypatch.setattr(word_sum, "HOST_CHUNK", chunk)
    assert summed(WORDS) == summed(WORDS, make=torch.from_numpy) == REFERENCE


def test_columns_on_two_holders_add_up_if_each_has_whole_parts():
    totals = [0, 0]
    for left in (0, 48):
        held = GroupSums(WORDS)
        held.add("atom", GRID, np.ascontiguousarray(WORDS[None, :, left : left + 48]), 0, left)
        for _, family, total in held.totals():
            totals[family] += int(total)
    assert [total & MASK for total in totals] == REFERENCE
    assert summed(WORDS[:, :48]) != REFERENCE


def test_heads_of_a_fused_tensor_are_added_as_one_strided_piece():
    fused = np.random.default_rng(6).integers(-(2**63), 2**63, (3, 3, 64, 96), np.int64)
    q = np.ascontiguousarray(fused[:, 1]).reshape(192, 96)
    of = Grid(192, 96, 1, 16)
    for make in (np.asarray, torch.from_numpy):
        held = GroupSums(make(fused))
        held.add("q", of, make(fused)[:, 1], 0)
        totals = [0, 0]
        for _, family, total in held.totals():
            totals[family] += int(total)
        assert [total & MASK for total in totals] == definition(q, of)


@given(
    places=st.lists(
        st.tuples(st.integers(0, GRID.rows - 1), st.integers(0, GRID.width - 1), st.integers(0, 63)),
        min_size=1, max_size=3, unique_by=lambda p: p[:2],
    )
)  # fmt: skip
def test_up_to_three_changed_words_are_seen_sign_bits_and_cancelling_ones_too(places):
    changed = WORDS.copy()
    for row, column, bit in places:
        changed[row, column] ^= np.int64(-(2**63)) if bit == 63 else np.int64(1 << bit)
    found = summed(changed)
    assert found != REFERENCE
    if len(places) == 1:
        assert found[0] != REFERENCE[0]
        assert found[1] != REFERENCE[1]


@given(first=st.integers(0, GRID.rows - 1), second=st.integers(0, GRID.rows - 1))
def test_swapped_rows_of_a_diagonal_matrix_are_seen(first, second):
    """Row and column sums alone would miss this: every row and every column holds the same one word."""
    eye = torch.eye(GRID.rows, 384, dtype=torch.bfloat16)
    swapped = eye.clone()
    swapped[[first, second]] = eye[[second, first]]
    one, two = (summed(t.view(torch.int64).numpy()) for t in (eye, swapped))
    assert (one == two) is (first == second)


def test_the_smallest_change_that_is_missed_has_four_corners_that_cancel():
    """What the documentation admits. Rows in one block and congruent columns: missed; any other rectangle: seen."""

    def corners(rows, columns):
        changed = WORDS.copy()
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                changed[row, column] += np.int64(1 if i == j else -1)
        return summed(changed)

    assert corners((3, 40), (2, 18)) == REFERENCE
    assert corners((3, 70), (2, 18)) != REFERENCE
    assert corners((3, 40), (2, 19)) != REFERENCE
    assert corners((3, 40), (2, 50)) != REFERENCE


def test_mixing_is_a_bijection_that_spreads_every_bit():
    """Its steps are invertible, and one flipped input bit flips each output bit about every second time."""
    values = np.random.default_rng(7).integers(0, 2**63, 20_000, np.int64).view(np.uint64)

    def mix(x):
        for factor in (MULTIPLIER & MASK, MULTIPLIER & MASK, 1):
            x = (x ^ x >> np.uint64(32)) * np.uint64(factor)
        return x

    assert int(mix(values)[0]) == mixed(int(values[0]))
    assert MULTIPLIER % 2 == 1
    for bit in range(64):
        flips = mix(values) ^ mix(values ^ np.uint64(1 << bit))
        rates = [(flips >> np.uint64(out) & np.uint64(1)).mean() for out in range(64)]
        assert max(abs(rate - 0.5) for rate in rates) < 0.02, bit


def test_words_are_views_where_they_can_be_and_copies_where_they_cannot():
    flat = torch.arange(65, dtype=torch.int32).to(torch.bfloat16)
    aligned, shifted = flat[:64].view(4, 16), flat[1:].view(4, 16)
    assert words_of(aligned, 8).ctypes.data == flat.data_ptr()
    assert np.array_equal(words_of(shifted, 8), shifted.clone().view(torch.int64).numpy())
    assert np.array_equal(words_of(flat, 2), flat.view(torch.int16).to(torch.int64)[:, None].numpy())


def test_without_numpy_a_cpu_tensor_is_summed_by_torch_with_the_same_result(monkeypatch):
    tensor = torch.from_numpy(WORDS).view(torch.bfloat16)
    monkeypatch.setattr(word_sum, "_numpy_is_there", lambda: False)
    words = words_of(tensor, 8)
    assert isinstance(words, torch.Tensor)
    assert summed(words.numpy(), make=torch.from_numpy) == REFERENCE


def test_the_grid_of_the_released_matrices():
    """Eight-byte words; 16 residues in bf16 and 32 in fp32; row-parallel matrices in eighths that tp 8 does not cut."""
    for atom in atoms(H3Config()):
        found = grid(atom)
        if len(atom.shape) == 1:
            assert (found.width, found.parts, found.residues) == (1, 1, 1)
            continue
        assert word_bytes(atom) == 8
        assert found.parts == (8 if atom.parallel is Parallel.ROW else 1)
        assert found.residues in ({"BF16": (16, 8), "F32": (32, 16)}[atom.dtype])
        assert found.width % (found.parts * found.residues) == 0


def test_a_degree_that_cuts_an_eighth_of_a_row_is_refused():
    config = H3Config(num_attention_heads=3, attention_head_dim=16, hidden_size=48, ffn_dim=48, in_channels=3,
                      audio_in_channels=6, text_dim=12, time_embed_hidden_dim=48, time_embed_dim=24,
                      num_layers=1, num_refiner_layers=1, rope_freq_dim=2)  # fmt: skip
    with pytest.raises(ShapeError, match=r"within an eighth of its rows; digests allow tp \[1, 2, 4, 8\]"):
        LiveDigest(config, Layout.MODULE, tp=3)
