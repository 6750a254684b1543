"""Theorem: a row's bits depend on that row alone, a column's on that column alone, and not on tp, batch or memory.

Transitivity: every case below is compared with the same element computed alone, so any two of them agree too. The order
itself is fixed by test_reference.py. Inputs cancel, so that another order shows in most elements; each invariance has a
negative twin that breaks exactly the property it states.
"""

import pytest
import torch
from h3_kernels.contract import UNIT_COUNTS, parallel_id
from h3_kernels.errors import ContractError, InputError, ProviderError
from h3_kernels.projection import projection, projection_group
from h3_kernels.row_parallel import row_parallel
from h3_kernels.testing import (
    assert_bitwise_equal,
    cancellation_inputs,
    count_differing,
    emulated_row_parallel,
    large_magnitude_inputs,
    random_inputs,
    shard_parts,
)
from hypothesis import given, settings
from hypothesis import strategies as st

INPUTS = {"random": random_inputs, "cancellation": cancellation_inputs, "large": large_magnitude_inputs}
LINEARS = {"projection": projection, "row_parallel": row_parallel}
ROWS, N = 37, 48
# Powers of two, where batch-invariant kernels have failed before, and K of the model's three linears.
KS = (512, 1024, 2048, 4096, 5376, 7168, 14336)

pytestmark = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


@pytest.fixture(params=LINEARS)
def linear(request):
    return LINEARS[request.param]


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("k", KS)
def test_row_subsets_permutations_padding_and_batch_mixes_change_no_bit(linear, make, k, dtype):
    x, weight = make(ROWS, N, k, dtype=dtype)
    y = linear(x, weight)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    for rows in (order[:1], order[:16], order[:17], order):
        assert_bitwise_equal(linear(x[rows], weight), y[rows], f"{len(rows)} rows")
    padded = torch.cat([x, torch.zeros(27, k, dtype=dtype)])
    assert_bitwise_equal(linear(padded, weight)[:ROWS], y, "padding")
    other, _ = make(5, N, k, dtype=dtype, seed=9)
    assert_bitwise_equal(linear(torch.cat([other, x]), weight)[5:], y, "batch mix")
    other[1:3], other[3:] = torch.nan, torch.inf
    assert_bitwise_equal(linear(torch.cat([other, x]), weight)[5:], y, "not even of NaN and infinities")
    assert_bitwise_equal(linear(x, weight), y, "again")


def test_columns_of_a_fused_weight_equal_the_same_columns_alone(linear, dtype):
    x, weight = cancellation_inputs(ROWS, 3 * N, 512, dtype=dtype)
    y = linear(x, weight)
    for part, alone in zip(y.chunk(3, dim=1), weight.chunk(3), strict=True):
        assert_bitwise_equal(linear(x, alone), part)
    swapped = torch.cat([weight[N:], weight[:N]])
    assert_bitwise_equal(linear(x, swapped), torch.cat([y[:, N:], y[:, :N]], dim=1))
    assert_bitwise_equal(linear(x, weight[5:6]), y[:, 5:6])


def test_twin_a_column_from_the_wrong_part_is_caught(linear, dtype):
    x, weight = cancellation_inputs(ROWS, 3 * N, 512, dtype=dtype)
    q, k, _ = linear(x, weight).chunk(3, dim=1)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(q, k)


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("units", UNIT_COUNTS)
def test_tensor_parallel_degrees_agree(units, make, dtype):
    x, weight = make(ROWS, N, 896, dtype=dtype)
    bias = torch.linspace(-1e-4, 1e-4, N, dtype=dtype)
    y = row_parallel(x, weight, bias, contract=parallel_id(units))
    for tp in (1, 2, 4, 8):
        if tp <= units:
            assert_bitwise_equal(emulated_row_parallel(x, weight, bias, tp=tp, units=units), y, f"tp={tp}")


def test_twin_ranks_that_round_their_partials_or_use_fewer_units_are_caught(dtype):
    x, weight = cancellation_inputs(ROWS, N, 896, dtype=dtype)
    y = row_parallel(x, weight)
    halves = [
        row_parallel(x[:, s], weight[:, s], contract=parallel_id(4)) for s in (slice(448), slice(448, None))
    ]
    wrong = (halves[0].bfloat16() + halves[1].bfloat16()).to(dtype)
    assert count_differing(wrong, y) > y.numel() // 2
    for units in (1, 2, 4):
        assert count_differing(row_parallel(x, weight, contract=parallel_id(units)), y) > y.numel() // 4


def test_column_shards_equal_slices_at_every_degree(dtype):
    x, weight = cancellation_inputs(ROWS, 3 * N, 512, dtype=dtype)
    y = projection(x, weight)
    for tp in (2, 4, 8):
        for rank in range(tp):
            shard = projection(x, shard_parts(weight, tp, rank, parts=3))
            assert_bitwise_equal(shard, shard_parts(y, tp, rank, parts=3, dim=1))


def test_u1_is_the_projection_chain(dtype):
    x, weight = cancellation_inputs(ROWS, N, 512, dtype=dtype)
    assert_bitwise_equal(row_parallel(x, weight, contract="h3-parallel-v1-u1"), projection(x, weight))


STRIDED = {
    "every second column": lambda t: torch.stack([t, -t], dim=-1).flatten(-2)[:, ::2],
    "transposed": lambda t: t.t().contiguous().t(),
    "rows of a wider tensor": lambda t: torch.cat([t, t], dim=1)[:, : t.shape[1]],
    "every second row": lambda t: torch.stack([t, -t], dim=1).flatten(0, 1)[::2],
    "flipped": lambda t: t.flip(0).flip(0),
}


@pytest.mark.parametrize("stride", STRIDED)
def test_memory_layout_changes_no_bit(linear, stride, dtype):
    x, weight = cancellation_inputs(ROWS, N, 512, dtype=dtype)
    y, lay = linear(x, weight), STRIDED[stride]
    assert_bitwise_equal(linear(lay(x), weight), y, "x")
    assert_bitwise_equal(linear(x, lay(weight)), y, "weight")
    assert_bitwise_equal(linear(x[:1].expand(4, -1), weight), y[:1].expand(4, -1), "expanded")


@settings(max_examples=60, deadline=None)
@given(data=st.data(), units=st.sampled_from(UNIT_COUNTS), width=st.integers(1, 40), rows=st.integers(1, 40))
def test_any_selection_of_rows_and_columns_at_any_degree_and_layout(dtype, data, units, width, rows):
    """Rows and columns are drawn with repetition, and each operand and shard takes a drawn memory layout."""
    k, n = units * width, 24
    x, weight = cancellation_inputs(rows, n, k, dtype=dtype, seed=data.draw(st.integers(0, 9)))
    y = row_parallel(x, weight, contract=parallel_id(units))
    indices = (
        st.lists(st.integers(0, rows - 1), min_size=1, max_size=50),
        st.lists(st.integers(0, n - 1), min_size=1),
    )
    some_rows, some_columns = (torch.tensor(data.draw(drawn)) for drawn in indices)
    lay_x, lay_weight = (STRIDED[data.draw(st.sampled_from(sorted(STRIDED)))] for _ in range(2))
    tp = data.draw(st.sampled_from([tp for tp in (1, 2, 4, 8) if tp <= units]))
    got = emulated_row_parallel(lay_x(x[some_rows]), lay_weight(weight[some_columns]), tp=tp, units=units)
    assert_bitwise_equal(got, y[some_rows][:, some_columns])


def test_leading_dimensions_and_vectors(linear, dtype):
    x, weight = cancellation_inputs(12, N, 512, dtype=dtype)
    y = linear(x, weight)
    assert_bitwise_equal(linear(x.view(3, 2, 2, 512), weight), y.view(3, 2, 2, N))
    assert_bitwise_equal(linear(x[3], weight), y[3])
    assert linear(x[:0], weight).shape == (0, N)


def test_many_tiles_match_the_reference_of_a_few(linear, dtype):
    """A persistent loop that stores one tile in another's place fails here, not on a single tile."""
    x, weight = random_inputs(32, 1024, 128, dtype=dtype)
    y = linear(x, weight)
    for column in range(0, 1024, 128):
        assert_bitwise_equal(linear(x[::5], weight[column : column + 128]), y[::5, column : column + 128])


def test_fp32_operands_are_not_rounded_on_the_way_in(linear, dtype):
    """1 + 2^-20 is neither a bf16 nor a TF32 number."""
    x = torch.full((1, 8), 1 + 2.0**-20).to(dtype)
    y = linear(x, torch.eye(8, dtype=dtype))
    assert_bitwise_equal(y, x)


def test_group_equals_fused(dtype):
    x, weight = cancellation_inputs(ROWS, 3 * N, 512, dtype=dtype)
    bias = torch.linspace(-1e-4, 1e-4, 3 * N, dtype=dtype)
    ys = projection_group(x, weight.chunk(3), bias.chunk(3))
    assert_bitwise_equal(torch.cat(ys, dim=1), projection(x, weight, bias, parts=(0, 1, 2)))


def test_bad_operands_are_refused_with_both_sides_named(linear, dtype):
    x, weight = random_inputs(4, 8, 16, dtype=dtype)
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    for arguments, message in {
        (x, weight.to(other)): "x is torch.* weight is torch.*",
        (x.half(), weight.half()): "expected one dtype, bf16 or fp32",
        (x, weight[:, :8]): r"x \[4, 16\] and weight \[8, 8\]",
        (x, weight[0]): r"weight \[16\]",
        (x, weight, torch.zeros(7, dtype=dtype)): r"bias \[7\].*expected \[8\]",
        (x, weight, torch.zeros(8, dtype=torch.float64)): "bf16 or fp32",
        (x, weight.to("meta")): "weight on meta",
        (x.to("meta"), weight.to("meta")): "no provider runs on meta",
        (x, None): "weight is a NoneType; expected a torch.Tensor",
    }.items():
        with pytest.raises(InputError, match=message):
            linear(*arguments)


def test_bad_contracts_and_providers_are_refused(dtype):
    x, weight = random_inputs(4, 8, 20, dtype=dtype)
    with pytest.raises(ContractError, match="K=20 does not divide into 8"):
        row_parallel(x, weight)
    with pytest.raises(ContractError, match="not a row-parallel contract"):
        row_parallel(x, weight, contract="h3-projection-gemm-v1")
    with pytest.raises(ContractError, match="3 equal parts"):
        projection(x, weight, parts=(0, 1, 2))
    with pytest.raises(InputError, match="not a permutation"):
        projection(x, weight, parts=(0, 2))
    with pytest.raises(InputError, match="expected equal shapes"):
        projection_group(x, [weight, weight[:4]])
    with pytest.raises(
        ProviderError, match=r"no provider is named 'cublas' on cpu; known: auto, .*reference"
    ):
        projection(x, weight, provider="cublas")
