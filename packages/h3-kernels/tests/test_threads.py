"""Ranks as threads: scattered rows are the contract's share of the whole tree, and gathered they are it again."""

import pytest
import torch
from h3_kernels.contract import row_range
from h3_kernels.testing import count_differing
from h3_kernels.testing.threads import on_threads


@pytest.mark.parametrize(("tp", "rows"), [(2, 6), (4, 7), (8, 3)])
def test_scattered_rows_are_the_whole_trees(tp, rows):
    roots = torch.randn(tp, rows, 5)

    def work(rank, collective):
        whole = collective.all_reduce_tree(roots[rank])
        own = collective.reduce_scatter_tree(roots[rank])
        return whole, own, collective.all_gather_rows(own, rows)

    for rank, (whole, own, gathered) in enumerate(on_threads(tp, work)):
        begin, end = row_range(rows, tp, rank)
        assert own.shape[0] == end - begin
        assert count_differing(own, whole[begin:end]) == 0
        assert count_differing(gathered, whole) == 0


def test_what_a_rank_raises_is_raised_and_the_others_do_not_wait():
    def work(rank, collective):
        if rank == 1:
            raise ArithmeticError("rank 1")
        return collective.all_reduce_tree(torch.zeros(1, 1))

    with pytest.raises(ArithmeticError, match="rank 1"):
        on_threads(2, work)
