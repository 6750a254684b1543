"""Theorem: units, tree and ranks are the ones written down by hand here, and importing them needs no torch."""

import subprocess
import sys

import pytest
from h3_kernels import contract
from h3_kernels.contract import Legal, Rejected, legality
from hypothesis import given
from hypothesis import strategies as st


def test_ids_are_the_declared_strings():
    assert contract.PROJECTION == "h3-projection-gemm-v1"
    assert [contract.parallel_id(u) for u in (1, 2, 4, 8)] == [f"h3-parallel-v1-u{u}" for u in (1, 2, 4, 8)]
    assert contract.parse_parallel_id("h3-parallel-v1-u4") == 4


@pytest.mark.parametrize(
    "wrong", ["", "h3-parallel-v1", "h3-parallel-v1-u3", "h3-parallel-v1-u8 ", "h3-parallel-v2-u8"]
)
def test_an_unknown_id_is_refused_and_the_known_ones_are_named(wrong):
    with pytest.raises(ValueError, match="h3-parallel-v1-u8"):
        contract.parse_parallel_id(wrong)


def test_tree_is_the_canonical_one():
    assert contract.TREE == (((0, 1), (2, 3)), ((4, 5), (6, 7)))
    assert contract.tree(4) == ((0, 1), (2, 3))
    assert contract.tree(2) == (0, 1)
    assert contract.tree(1) == 0


def test_unit_bounds_of_the_model_by_hand():
    """out_proj: K 7168 is 56 heads of 128, a unit is 7 heads = 896. fc2: K 14336, a unit is 1792."""
    assert contract.unit_bounds(7168)[:3] == ((0, 896), (896, 1792), (1792, 2688))
    assert contract.unit_bounds(7168)[-1] == (6272, 7168)
    assert contract.unit_bounds(14336)[1] == (1792, 3584)
    assert contract.unit_bounds(16, 2) == ((0, 8), (8, 16))


def test_rank_units_by_hand():
    assert [contract.rank_units(2, r) for r in range(2)] == [(0, 4), (4, 8)]
    assert [contract.rank_units(4, r) for r in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert contract.rank_units(8, 5) == (5, 6)
    assert contract.rank_units(2, 1, units=2) == (1, 2)


def leaves(node):
    return [node] if isinstance(node, int) else leaves(node[0]) + leaves(node[1])


def subtrees(node):
    return [leaves(node)] + ([] if isinstance(node, int) else subtrees(node[0]) + subtrees(node[1]))


@given(st.sampled_from([(tp, u) for u in contract.UNIT_COUNTS for tp in contract.TP_DEGREES if tp <= u]))
def test_every_rank_owns_exactly_one_subtree_and_ranks_tile_the_units(case):
    tp, units = case
    ranges = [contract.rank_units(tp, rank, units) for rank in range(tp)]
    assert [u for start, stop in ranges for u in range(start, stop)] == list(range(units))
    assert all(list(range(start, stop)) in subtrees(contract.tree(units)) for start, stop in ranges)


@given(st.integers(1, 4096), st.sampled_from(contract.UNIT_COUNTS))
def test_units_tile_k_equally_or_k_is_refused(k, units):
    if k % units:
        with pytest.raises(ValueError, match="does not divide"):
            contract.unit_bounds(k, units)
        return
    bounds = contract.unit_bounds(k, units)
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(k))
    assert {stop - start for start, stop in bounds} == {k // units}


@given(st.integers(0, 100), st.sampled_from(contract.TP_DEGREES))
def test_row_ranges_tile_the_rows_in_rank_order(rows, tp):
    ranges = [contract.row_range(rows, tp, rank) for rank in range(tp)]
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(rows))


@pytest.mark.parametrize(
    ("contract_id", "sizes", "reason"),
    [
        ("h3-parallel-v1-u8", {"n": 5376, "k": 7168, "tp": 8}, None),
        ("h3-parallel-v1-u8", {"n": 5376, "k": 7169}, "does not divide"),
        ("h3-parallel-v1-u4", {"n": 5376, "k": 7168, "tp": 8}, "tp=8 does not divide 4 units"),
        ("h3-parallel-v1-u8", {"n": 5376, "k": 7168, "tp": 3}, "tp=3"),
        ("h3-projection-gemm-v1", {"n": 21504, "k": 5376, "tp": 8, "parts": 3}, None),
        ("h3-projection-gemm-v1", {"n": 33, "k": 5}, None),
        ("h3-projection-gemm-v1", {"n": 33, "k": 5, "tp": 2}, "does not divide into 8 units"),
        ("h3-projection-gemm-v1", {"n": 32, "k": 5, "parts": 3}, "3 equal parts"),
        ("h3-projection-gemm-v1", {"n": 0, "k": 5}, "positive"),
        ("something-else", {"n": 8, "k": 8}, "not a row-parallel contract"),
    ],
)
def test_legality_is_a_value_with_a_reason(contract_id, sizes, reason):
    verdict = legality(contract_id, **sizes)
    if reason is None:
        assert verdict == Legal()
    else:
        assert isinstance(verdict, Rejected)
        assert reason in verdict.reason


def test_contract_binding_modes_and_errors_import_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['triton'] = None\n"
        "import h3_kernels.contract, h3_kernels.binding, h3_kernels.modes, h3_kernels.errors"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
