"""Theorem: dX, dW and dbias have one written order, invariant to tp, fusion, row order, packing and padding.

dX of a column-parallel linear is the unit tree over N (unit-major over its parts), dX of a row-parallel one is a chain
over N, dW and dbias are chains over rows in key order. Each is compared with that order spelled out on ``tree_gemm``.
Degrees above 1 with real ranks are in test_collectives.py; here ranks are emulated to reach large shapes.
"""

import pytest
import torch
from h3_kernels.logical_keys import LogicalKeys
from h3_kernels.projection import projection, projection_group
from h3_kernels.providers import tree_gemm
from h3_kernels.reference import fold_tree
from h3_kernels.row_parallel import row_parallel
from h3_kernels.testing import (
    assert_bitwise_equal,
    cancellation_inputs,
    count_differing,
    large_magnitude_inputs,
    random_inputs,
    shard_parts,
)
from h3_kernels.testing.orders import left_fold

ROWS, N, K = 37, 64, 96
F32, BF16 = torch.float32, torch.bfloat16
INPUTS = {"random": random_inputs, "cancellation": cancellation_inputs, "large": large_magnitude_inputs}

pytestmark = pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "fp32"])


def tensors(make, dtype, parts=1):
    """x [ROWS, K], weight [parts N, K], bias [parts N] and dy [ROWS, parts N].

    Products cancel over N (dX) and over rows (dW, dbias): rows 18 to 35 repeat rows 0 to 17 with dy negated,
    and the last row, 2^-14 as large, is what is left.
    """
    x, _ = make(ROWS, 1, K, dtype=dtype, seed=1)
    dy, weight_t = make(ROWS, K, parts * N, dtype=dtype, seed=2)
    half = ROWS // 2
    x[half : 2 * half], dy[half : 2 * half] = x[:half], -dy[:half]
    dy[-1] *= 2.0**-14
    return x, weight_t.t().contiguous(), torch.zeros(parts * N, dtype=dtype), dy


def grads(linear, x, weight, bias, dy, **settings):
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    return torch.autograd.grad(linear(*leaves, **settings), leaves, dy)


def unit_major(t, dim, parts, units):
    """[part, unit, width] along ``dim`` to [unit, part, width], index by index."""
    width = t.shape[dim] // (parts * units)
    columns = [(p * units + u) * width + i for u in range(units) for p in range(parts) for i in range(width)]
    return t.index_select(dim, torch.tensor(columns))


def ordered_keys(rows=ROWS):
    return torch.stack([torch.arange(rows) // 10, torch.arange(rows) % 10], dim=1)


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
def test_column_parallel_orders_spelled_out(make, dtype):
    x, weight, bias, dy = tensors(make, dtype)
    dx, dw, db = grads(projection, x, weight, bias, dy)
    assert_bitwise_equal(dx, tree_gemm(dy, weight.t(), units=8, out_dtype=dtype))
    assert_bitwise_equal(dw, tree_gemm(dy.t(), x.t(), units=1, out_dtype=dtype))
    assert_bitwise_equal(
        db, tree_gemm(dy.t(), torch.ones(1, ROWS, dtype=dtype), units=1, out_dtype=dtype)[:, 0]
    )


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
def test_row_parallel_orders_spelled_out(make, dtype):
    x, weight, bias, dy = tensors(make, dtype)
    dx, dw, db = grads(row_parallel, x, weight, bias, dy)
    assert_bitwise_equal(dx, tree_gemm(dy, weight.t(), units=1, out_dtype=dtype))
    assert_bitwise_equal(dw, tree_gemm(dy.t(), x.t(), units=1, out_dtype=dtype))
    assert_bitwise_equal(
        db, tree_gemm(dy.t(), torch.ones(1, ROWS, dtype=dtype), units=1, out_dtype=dtype)[:, 0]
    )


def test_fused_dx_consumes_each_unit_of_every_part_in_turn(dtype):
    """Unit u of a fused weight: the u-th eighth of q, then of k, then of v, as one chain."""
    x, weight, bias, dy = tensors(cancellation_inputs, dtype, parts=3)
    dx, *_ = grads(projection, x, weight, bias, dy, parts=(0, 1, 2))
    columns = unit_major(dy, 1, 3, 8), unit_major(weight, 0, 3, 8)
    assert_bitwise_equal(dx, tree_gemm(columns[0], columns[1].t(), units=8, out_dtype=dtype))
    other, *_ = grads(projection, x, weight, bias, dy)
    assert count_differing(dx, other) > dx.numel() // 4, "twin: parts ignored"


def test_gate_value_and_value_gate_agree_when_their_order_is_stated(dtype):
    """fc1 stores [gate; value], ff.net.0.proj [value; gate]: one dX, if each says in which order its parts are read."""
    x, weight, bias, dy = tensors(cancellation_inputs, dtype, parts=2)
    swap = lambda t, dim: torch.cat(t.chunk(2, dim=dim)[::-1], dim=dim)  # noqa: E731
    dx, dw, _ = grads(projection, x, weight, bias, dy, parts=(0, 1))
    dx2, dw2, _ = grads(projection, x, swap(weight, 0), bias, swap(dy, 1), parts=(1, 0))
    assert_bitwise_equal(dx, dx2)
    assert_bitwise_equal(dw, swap(dw2, 0))
    dx3, *_ = grads(projection, x, swap(weight, 0), bias, swap(dy, 1), parts=(0, 1))
    assert count_differing(dx, dx3) > dx.numel() // 4, "twin: the order of the parts not stated"


def test_group_equals_fused_and_separate_calls_agree_in_all_but_dx(dtype):
    x, weight, bias, dy = tensors(cancellation_inputs, dtype, parts=3)
    fused = grads(projection, x, weight, bias, dy, parts=(0, 1, 2))
    leaf = x.clone().requires_grad_()
    weights, biases = (
        [t.detach().clone().requires_grad_() for t in whole.chunk(3)] for whole in (weight, bias)
    )
    for separate in (False, True):
        if separate:
            ys = [projection(leaf, w, b) for w, b in zip(weights, biases, strict=True)]
        else:
            ys = projection_group(leaf, weights, biases)
        dx, *rest = torch.autograd.grad(ys, [leaf, *weights, *biases], dy.chunk(3, dim=1))
        assert_bitwise_equal(torch.cat(rest[:3]), fused[1])
        assert_bitwise_equal(torch.cat(rest[3:]), fused[2])
        if separate:
            assert count_differing(dx, fused[0]) > dx.numel() // 4, (
                "documented: three rounded parts added by autograd"
            )
        else:
            assert_bitwise_equal(dx, fused[0])


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_dx_of_column_shards_completes_to_that_of_one_process(tp, parts, dtype):
    x, weight, bias, dy = tensors(cancellation_inputs, dtype, parts=parts)
    order = tuple(range(parts))
    dx, dw, _ = grads(projection, x, weight, bias, dy, parts=order)
    shards = [
        (shard_parts(dy, tp, r, parts=parts, dim=1), shard_parts(weight, tp, r, parts=parts))
        for r in range(tp)
    ]
    roots = torch.stack(
        [
            tree_gemm(
                unit_major(g, 1, parts, 8 // tp),
                unit_major(w, 0, parts, 8 // tp).t(),
                units=8 // tp,
                out_dtype=F32,
            )
            for g, w in shards
        ]
    )
    assert_bitwise_equal(fold_tree(roots).to(dtype), dx)
    if tp > 2:
        assert count_differing(left_fold(roots).to(dtype), dx) > dx.numel() // 8, (
            "twin: ranks summed left to right"
        )
    for rank, (g, w) in enumerate(shards):
        _, local, _ = grads(projection, x, w, bias[: w.shape[0]], g)
        assert_bitwise_equal(local, shard_parts(dw, tp, rank, parts=parts))


@pytest.mark.parametrize("linear", [projection, row_parallel])
def test_row_order_packing_and_padding_change_no_gradient_bit(linear, dtype):
    x, weight, bias, dy = tensors(cancellation_inputs, dtype)
    keys = ordered_keys()
    expected = grads(linear, x, weight, bias, dy)
    assert LogicalKeys(keys).order is None, "ordered rows are read in place"
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3))
    garbage = torch.full((3, K), torch.nan, dtype=dtype), torch.full((3, N), torch.inf, dtype=dtype)
    packed = [torch.cat([t[order[:20]], pad, t[order[20:]]]) for t, pad in zip((x, dy), garbage, strict=True)]
    packed_keys = torch.cat([keys[order[:20]], torch.full((3, 2), -1), keys[order[20:]]])
    dx, dw, db = grads(linear, packed[0], weight, bias, packed[1], logical_keys=packed_keys)
    place = torch.cat([order[:20], torch.full((3,), -1), order[20:]])
    assert_bitwise_equal(dw, expected[1])
    assert_bitwise_equal(db, expected[2])
    assert_bitwise_equal(dx[place >= 0], expected[0][order])


@pytest.mark.parametrize("linear", [projection, row_parallel])
def test_twin_without_keys_a_permutation_shows_in_dw(linear, dtype):
    x, weight, bias, dy = tensors(cancellation_inputs, dtype)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3))
    _, dw, _ = grads(linear, x, weight, bias, dy)
    _, permuted, _ = grads(linear, x[order], weight, bias, dy[order])
    assert count_differing(dw, permuted) > dw.numel() // 20


@pytest.mark.parametrize("linear", [projection, row_parallel])
def test_leading_dimensions_change_no_gradient_bit(linear, dtype):
    x, weight, bias, dy = tensors(cancellation_inputs, dtype)
    flat = grads(linear, x[:36], weight, bias, dy[:36])
    deep = grads(linear, x[:36].view(3, 4, 3, K), weight, bias, dy[:36].view(3, 4, 3, N))
    assert_bitwise_equal(deep[0], flat[0].view(3, 4, 3, K))
    for a, b in zip(deep[1:], flat[1:], strict=True):
        assert_bitwise_equal(a, b)


def test_padding_only_gives_zero_gradients(dtype):
    x, weight, bias, dy = tensors(random_inputs, dtype)
    _, dw, db = grads(projection, x, weight, bias, dy, logical_keys=torch.full((ROWS, 2), -1))
    assert not dw.any()
    assert not db.any()


def test_n_that_cannot_be_sharded_has_a_chain_for_dx(dtype):
    x, weight, bias, dy = tensors(cancellation_inputs, dtype)
    weight, bias, dy = weight[:33], bias[:33], dy[:, :33]
    dx, *_ = grads(projection, x, weight, bias, dy)
    assert_bitwise_equal(dx, tree_gemm(dy, weight.t(), units=1, out_dtype=dtype))


def test_gradients_are_no_further_from_fp64_than_those_of_torch(dtype):
    x, weight, bias, dy = tensors(random_inputs, dtype, parts=3)
    ours = grads(projection, x, weight, bias, dy, parts=(0, 1, 2))
    theirs = grads(torch.nn.functional.linear, x, weight, bias, dy)
    exact = grads(torch.nn.functional.linear, *(t.double() for t in (x, weight, bias, dy)))
    slack = (
        1.01 if dtype == BF16 else 2.0
    )  # fp32 sums of a few dozen terms: both are within one rounding of exact
    for got, reference, truth in zip(ours, theirs, exact, strict=True):
        errors = [float((t.double() - truth).square().mean().sqrt()) for t in (got, reference)]
        assert errors[0] <= slack * errors[1]
