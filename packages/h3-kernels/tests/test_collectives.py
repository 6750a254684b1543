"""Theorem: tensor-parallel ranks, in real processes, produce the bytes of one process, forward and backward.

Each world size runs once, in spawned processes, and saves every result; the tests below compare them with the same
calls in this process. All inputs cancel, so that another order of addition changes most elements. Gloo worlds share the
CPU or one GPU; NCCL worlds need a GPU a rank.
"""

import functools
import itertools
import os

import gloo_ranks as ranks
import pytest
import torch
from h3_kernels.collectives import LocalCollective, TorchDistributedCollective, cost, wires
from h3_kernels.contract import row_range
from h3_kernels.errors import CollectiveError, InputError
from h3_kernels.lora import RowStyle, lora_linear
from h3_kernels.projection import projection
from h3_kernels.reference import finish, fold_tree
from h3_kernels.row_parallel import row_parallel
from h3_kernels.testing import assert_bitwise_equal, count_differing, shard_columns, shard_parts
from h3_kernels.testing.orders import left_fold, reversed_fold, strided_tree

SIZES = (2, 4, 8)
GPUS = min(torch.cuda.device_count(), int(os.environ.get("H3_GPUS", "8")))
"""Devices a run may use: those there are, and no more than tools/gpu_matrix.py was asked for."""


def needs(gpus):
    lacking = pytest.mark.skipif(gpus > GPUS, reason=f"needs {gpus} CUDA devices, {GPUS} may be used")
    return [pytest.mark.gpu, lacking]


WORLDS = [
    *(pytest.param(("cpu", "gloo", size), id=f"tp{size}") for size in SIZES),
    *(pytest.param(("cuda", "gloo", size), id=f"tp{size}-one-gpu", marks=needs(1)) for size in SIZES),
    *(pytest.param(("cuda", "nccl", size), id=f"tp{size}-nccl", marks=needs(size)) for size in SIZES),
]
CASES = [
    pytest.param((world.values[0], form), id=f"{world.id}-{form}".replace(" ", "-"), marks=world.marks)
    for world in WORLDS
    for device, backend, size in world.values
    for form in ranks.forms(size, device, backend)
]
BIAS = torch.arange(5).float()


class Results(list):
    """What every rank saved, in rank order, and the device they all used."""

    def __init__(self, device, backend, size, folder):
        super().__init__(ranks.run_ranks(size, folder, device, backend))
        self.device = device


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Results by device, backend and size, each run once."""
    return functools.cache(lambda *world: Results(*world, tmp_path_factory.mktemp("ranks")))


@pytest.fixture(params=WORLDS)
def results(request, worlds):
    return worlds(*request.param)


@pytest.fixture(params=CASES)
def case(request, worlds):
    """Results of one world, and the form of collective to look at."""
    world, form = request.param
    return worlds(*world), form


def whole(name, leaves, call, dy):
    """y and gradients of one process, brought to the CPU as the ranks' are."""
    leaves = {n: t.clone().requires_grad_() for n, t in leaves.items()}
    found = ranks.gradients(name, call(*leaves.values()), dy, **leaves)
    return {n: t.cpu() for n, t in found.items()}


def test_every_form_gives_the_canonical_tree_on_every_rank(case):
    results, form = case
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


@pytest.mark.parametrize("case", [c for c in CASES if c.values[0][1].startswith("peer")], indirect=True)
def test_replays_of_a_captured_peer_exchange_have_the_same_bits(case):
    results, form = case
    root = fold_tree(ranks.roots(len(results), ranks.ROWS))
    for rank, result in enumerate(results):
        own = slice(*row_range(ranks.ROWS, len(results), rank))
        for i, expected in enumerate((root, root[own], root)):
            assert_bitwise_equal(result[f"{form}/captured{i}"], expected, f"rank {rank} call {i}")


@pytest.mark.parametrize("results", [w for w in WORLDS if w.values[0][:2] != ("cuda", "gloo")], indirect=True)
def test_hierarchical_groups_equal_flat_ones(results):
    """2x4 and 4x2 against 1x8, whole rows and scattered ones, forward and backward, byte for byte."""
    flat = [name for name in results[0] if name.startswith("scatter/")]
    grouped = ("hierarchical", "two nodes") if len(results) == 8 else ("hierarchical",)
    for result, form, name in itertools.product(results, grouped, flat):
        assert_bitwise_equal(result[name.replace("scatter", form, 1)], result[name], f"{form} {name}")
    assert flat


def test_twin_another_order_of_the_ranks_is_caught(results):
    """The backend's own sum, a ring's, and nodes of every second rank. With two ranks there is one order only."""
    roots = ranks.roots(len(results), ranks.ROWS)
    tree = fold_tree(roots)
    for other in (left_fold(roots), reversed_fold(roots), strided_tree(roots)):
        differing = count_differing(other, tree)
        assert differing == 0 if len(results) == 2 else differing > tree.numel() // 4
    differing = count_differing(results[0]["backend sum"], tree)
    assert differing == 0 if len(results) == 2 else differing > 0


def test_twin_the_backends_sum_of_an_input_gradient_is_caught(results):
    """As above, backward: the fp32 partial dX of all ranks, computed on the CPU and added by the backend."""
    tree = fold_tree(torch.stack([ranks.partial_dx(len(results), rank) for rank in range(len(results))]))
    for result in results:
        differing = count_differing(result["backend dx"], tree)
        assert differing == 0 if len(results) == 2 else differing > 0


def test_column_parallel_equals_one_process(case):
    results, form = case
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


def test_row_parallel_equals_one_process(case):
    results, form = case
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


def test_lora_equals_one_process(case):
    results, form = case
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
    results = worlds("cpu", "gloo", 2)
    one = ranks.block_gradients(ranks.Block())
    for rank, result in enumerate(results):
        for name, expected in one.items():
            assert_bitwise_equal(result[name], expected, f"rank {rank} {name}")


def test_compiled_ranks_equal_eager_ones(worlds):
    for rank, result in enumerate(worlds("cpu", "gloo", 2)):
        for name in ("y", "dx", "dup", "ddown"):
            assert_bitwise_equal(result[f"compiled/{name}"], result[f"eager/{name}"], f"rank {rank} {name}")


@pytest.mark.parametrize(("tp", "rows"), [(2, 1560), (4, 208), (8, 68)])
def test_auto_gathers_few_rows_and_scatters_many(tp, rows):
    """Of 5376 columns to bf16: up to where scattering saves 8 MiB."""
    assert cost.gathers("backend", tp, rows * 5376, 2)
    assert not cost.gathers("backend", tp, (rows + 1) * 5376, 2)
    assert not cost.gathers("peer", tp, rows * 5376, 2)


def test_the_table_of_bytes():
    """Of one value: tp - 1 roots, or the share of a root and of a result that the other ranks own."""
    assert [cost.received_bytes("gather", tp, 1, 2) for tp in SIZES] == [4, 12, 28]
    assert [cost.received_bytes("scatter", tp, 8, 2) / 8 for tp in SIZES] == [3, 4.5, 5.25]


def test_the_collective_that_torch_renamed_is_called_by_its_new_name():
    """The old one warns, and warnings are errors here; torch 2.11 has the old one only."""
    newer = hasattr(torch.distributed, "all_gather_single")
    assert wires._all_gather_single.__name__ == ("all_gather_single" if newer else "all_gather_into_tensor")


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
