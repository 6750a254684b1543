"""Theorem: tensor-parallel ranks, in real processes, produce the bytes of one process, forward and backward.

Each world size runs once, in spawned gloo processes, and saves every result; the tests below compare them with the same
calls in this process. All inputs cancel, so that another order of addition changes most elements.
"""

import functools

import gloo_ranks as ranks
import pytest
import torch
from h3_kernels.collectives import LocalCollective, TorchDistributedCollective
from h3_kernels.contract import row_range
from h3_kernels.errors import CollectiveError, InputError
from h3_kernels.lora import RowStyle, lora_linear
from h3_kernels.projection import projection
from h3_kernels.reference import finish, fold_tree
from h3_kernels.row_parallel import row_parallel
from h3_kernels.testing import assert_bitwise_equal, count_differing, shard_columns, shard_parts
from h3_kernels.testing.orders import left_fold

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WORLDS = [
    *(pytest.param(("cpu", size), id=f"tp{size}") for size in (2, 4, 8)),
    *(pytest.param(("cuda", size), id=f"tp{size}-one-gpu", marks=NEEDS_CUDA) for size in (2, 4, 8)),
]
BIAS = torch.arange(5).float()


class Results(list):
    """What every rank saved, in rank order, and the device they all used."""

    def __init__(self, device, size, folder):
        super().__init__(ranks.run_ranks(size, folder, device))
        self.device = device


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Results by device and size, each run once."""
    return functools.cache(lambda *world: Results(*world, tmp_path_factory.mktemp("ranks")))


@pytest.fixture(params=WORLDS)
def results(request, worlds):
    return worlds(*request.param)


@pytest.fixture(params=ranks.FORMS)
def form(request):
    return request.param


def whole(name, leaves, call, dy):
    """y and gradients of one process, brought to the CPU as the ranks' are."""
    leaves = {n: t.clone().requires_grad_() for n, t in leaves.items()}
    found = ranks.gradients(name, call(*leaves.values()), dy, **leaves)
    return {n: t.cpu() for n, t in found.items()}


def test_every_form_gives_the_canonical_tree_on_every_rank(results, form):
    for rows in (1, len(results), ranks.ROWS):
        root = fold_tree(ranks.roots(len(results), rows))
        for rank, result in enumerate(results):
            context = f"{form} rank {rank} rows {rows}"
            rounded = finish(root, BIAS, torch.bfloat16)
            start, stop = row_range(rows, len(results), rank)
            assert_bitwise_equal(result[f"{form}/reduce{rows}"], root, context)
            assert_bitwise_equal(result[f"{form}/reduce{rows}/bf16"], rounded, context)
            assert_bitwise_equal(result[f"{form}/scatter{rows}"], rounded[start:stop], context)
            assert_bitwise_equal(result[f"{form}/gather{rows}"], rounded, context)
            assert result[f"{form}/untouched{rows}"], "the caller's root is not written to"


def test_twin_the_sum_of_a_backend_or_a_left_fold_is_caught(results):
    """With two ranks there is one order only; above, both other orders must show."""
    roots = ranks.roots(len(results), ranks.ROWS)
    tree = fold_tree(roots)
    wrong = [left_fold(roots), results[0]["backend sum"]]
    for other in wrong:
        differing = count_differing(other, tree)
        assert differing == 0 if len(results) == 2 else differing > tree.numel() // 4


def test_column_parallel_equals_one_process(results, form):
    x, weight, bias, dy = ranks.column_tensors(results.device)
    call = lambda x, w, b: projection(x, w, b, parts=(0, 1, 2), logical_keys=ranks.keys(results.device))  # noqa: E731
    one = whole("column", {"x": x, "w": weight, "b": bias}, call, dy)
    tp = len(results)
    for rank, result in enumerate(results):
        shard = lambda t, dim=0: shard_parts(t, tp, rank, parts=ranks.PARTS, dim=dim)  # noqa: B023, E731
        assert_bitwise_equal(result[f"{form}/column/y"], shard(one["column/y"], 1), f"rank {rank} y")
        assert_bitwise_equal(result[f"{form}/column/dx"], one["column/dx"], f"rank {rank} dx")
        assert_bitwise_equal(result[f"{form}/group/dx"], one["column/dx"], f"rank {rank} group dx")
        assert_bitwise_equal(result[f"{form}/column/dw"], shard(one["column/dw"]), f"rank {rank} dw")
        assert_bitwise_equal(result[f"{form}/column/db"], shard(one["column/db"]), f"rank {rank} db")
        own = row_range(ranks.ROWS, tp, rank)
        assert_bitwise_equal(result[f"{form}/sequence column/dx"], one["column/dx"][slice(*own)])
        for name in ("y", "dw", "db"):
            assert_bitwise_equal(result[f"{form}/sequence column/{name}"], result[f"{form}/column/{name}"])


def test_row_parallel_equals_one_process(results, form):
    x, weight, bias, dy = ranks.row_tensors(results.device)
    call = lambda x, w, b: row_parallel(x, w, b, logical_keys=ranks.keys(results.device))  # noqa: E731
    one = whole("row", {"x": x, "w": weight, "b": bias}, call, dy)
    tp = len(results)
    for rank, result in enumerate(results):
        own = slice(*row_range(ranks.ROWS, tp, rank))
        assert_bitwise_equal(result[f"{form}/row/y"], one["row/y"], f"rank {rank} y")
        assert_bitwise_equal(result[f"{form}/sequence row/y"], one["row/y"][own], f"rank {rank} y rows")
        for kind in ("row", "sequence row"):
            for name in ("dx", "dw"):
                expected = shard_columns(one[f"row/{name}"], tp, rank)
                assert_bitwise_equal(result[f"{form}/{kind}/{name}"], expected, f"rank {rank} {kind} {name}")
            assert_bitwise_equal(result[f"{form}/{kind}/db"], one["row/db"], f"rank {rank} {kind} db")


def test_lora_equals_one_process(results, form):
    tp = len(results)
    x, base, a, b, dy = ranks.lora_tensors(results.device)
    leaves = {"x": x, "base": base, "a": a, "b": b}
    one = whole("lora", leaves, lambda x, base, a, b: lora_linear(x, base, a, b, 0.75), dy)
    row = whole("row", leaves, lambda x, base, a, b: lora_linear(x, base, a, b, 0.75, style=RowStyle()), dy)
    for rank, result in enumerate(results):
        for name, dim in {"y": 1, "dbase": 1, "db": 0, "dx": None, "da": None}.items():
            expected = (
                one[f"lora/{name}"] if dim is None else shard_parts(one[f"lora/{name}"], tp, rank, dim=dim)
            )
            assert_bitwise_equal(result[f"{form}/lora column/{name}"], expected, f"rank {rank} column {name}")
        for name in ("y", "dbase", "db", "dx", "da"):
            local = name in ("dx", "da")
            expected = shard_columns(row[f"row/{name}"], tp, rank) if local else row[f"row/{name}"]
            assert_bitwise_equal(result[f"{form}/lora row/{name}"], expected, f"rank {rank} row {name}")


def test_fully_sharded_parameters_change_no_bit(worlds):
    results = worlds("cpu", 2)
    one = ranks.block_gradients(ranks.Block())
    for rank, result in enumerate(results):
        for name, expected in one.items():
            assert_bitwise_equal(result[name], expected, f"rank {rank} {name}")


def test_compiled_ranks_equal_eager_ones(worlds):
    for rank, result in enumerate(worlds("cpu", 2)):
        for name in ("y", "dx", "dup", "ddown"):
            assert_bitwise_equal(result[f"compiled/{name}"], result[f"eager/{name}"], f"rank {rank} {name}")


def test_auto_gathers_few_rows_and_scatters_many():
    """At 8 ranks and 5376 columns: 8 MiB are 55 rows from each of 7 peers."""
    exchange = TorchDistributedCollective.__new__(TorchDistributedCollective)
    exchange.form, exchange.world_size = "auto", 8
    few, many = (torch.empty(rows, 5376, device="meta") for rows in (55, 56))
    assert exchange._gathers(few)
    assert not exchange._gathers(many)


def test_one_rank_needs_no_group():
    local = LocalCollective()
    root = ranks.roots(1, 4)[0]
    assert_bitwise_equal(local.all_reduce_tree(root), root)
    assert_bitwise_equal(local.reduce_scatter_tree(root, bias=BIAS), root + BIAS)
    assert_bitwise_equal(local.all_gather_rows(root, 4), root)
    with pytest.raises(CollectiveError, match="must hold all"):
        local.all_gather_rows(root, 5)
    x, weight, _, _ = ranks.row_tensors()
    assert_bitwise_equal(
        projection(x, weight, gather_rows=ranks.ROWS, collective=local), projection(x, weight)
    )
    assert_bitwise_equal(row_parallel(x, weight, scatter_rows=True), row_parallel(x, weight))
    with pytest.raises(CollectiveError, match="holds 13 rows of 14"):
        projection(x, weight, gather_rows=14)


def test_a_missing_or_foreign_collective_is_refused():
    x, weight = torch.ones(2, 8), torch.ones(3, 8)
    with pytest.raises(CollectiveError, match="tp=2 needs a collective"):
        row_parallel(x, weight, tp=2)
    stranger = LocalCollective()
    stranger.world_size = 4
    for linear in (projection, row_parallel):
        with pytest.raises(CollectiveError, match="rank 0 of 4, the call says 0 of 1"):
            linear(x, weight, collective=stranger)
    with pytest.raises(CollectiveError, match="rank 0 of 1, the call says 1 of 2"):
        row_parallel(x, weight, tp=2, rank=1, collective=LocalCollective())
    with pytest.raises(CollectiveError, match=r"rank 2 is not in 0\.\.1"):
        row_parallel(x, weight, tp=2, rank=2, collective=LocalCollective())
    with pytest.raises(CollectiveError, match="not initialised"):
        TorchDistributedCollective()
    for call in (
        lambda t: projection(t, weight, gather_rows=2),
        lambda t: row_parallel(t, weight, scatter_rows=True),
    ):
        with pytest.raises(InputError, match=r"needs x \[T, K\], got \[1, 2, 8\]"):
            call(x[None])
