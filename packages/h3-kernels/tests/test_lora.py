"""Theorem: the LoRA term has one written order, so a PEFT layer and a slice of a fused linear give the same bits."""

import pytest
import torch
from h3_kernels import autograd
from h3_kernels.errors import ContractError, InputError
from h3_kernels.logical_keys import LogicalKeys
from h3_kernels.lora import ColumnStyle, LoraSlice, RowStyle, lora_linear, lora_slices
from h3_kernels.lora_expand import expand, folded
from h3_kernels.projection import projection
from h3_kernels.providers import tree_gemm
from h3_kernels.testing import assert_bitwise_equal, cancellation_inputs, count_differing, random_inputs

ROWS, N, K, RANK = 19, 48, 128, 8
SCALING = 0.3
F32, BF16 = torch.float32, torch.bfloat16
pytestmark = pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "fp32"])


def tensors(dtype, seed=0, make=random_inputs):
    """x [ROWS, K], base_out [ROWS, N], a [RANK, K], b [N, RANK], dy [ROWS, N]."""
    x, a = make(ROWS, RANK, K, dtype=dtype, seed=seed)
    base, b = random_inputs(ROWS, N, RANK, dtype=dtype, seed=seed + 1)
    dy, _ = random_inputs(ROWS, 1, N, dtype=dtype, seed=seed + 2)
    return x, base @ torch.eye(RANK, N, dtype=dtype), a, b, dy


def grads(call, *leaves, dy):
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize(
    ("style", "units"), [(ColumnStyle(), 1), (RowStyle(), 8), (RowStyle("h3-parallel-v1-u2"), 2)]
)
def test_order_spelled_out(style, units, dtype):
    x, base, a, b, dy = tensors(dtype, make=cancellation_inputs)
    call = lambda x, base, a, b: lora_linear(x, base, a, b, SCALING, style=style)  # noqa: E731
    y, dx, dbase, da, db = grads(call, x, base, a, b, dy=dy)
    h = tree_gemm(x, a, units=units, out_dtype=dtype)
    t = tree_gemm(h, b, units=1, out_dtype=F32)
    assert_bitwise_equal(y, (base.float() + t * SCALING).to(dtype))
    g = (dy.float() * SCALING).to(dtype)
    dh = tree_gemm(g, b.t(), units=8, out_dtype=dtype)
    assert_bitwise_equal(dbase, dy)
    assert_bitwise_equal(db, tree_gemm(g.t(), h.t(), units=1, out_dtype=dtype))
    assert_bitwise_equal(da, tree_gemm(dh.t(), x.t(), units=1, out_dtype=dtype))
    assert_bitwise_equal(dx, tree_gemm(dh, a.t(), units=8 if units == 1 else 1, out_dtype=dtype))


def test_twin_the_order_of_peft_is_another_one(dtype):
    """base + B(A x) * scaling in the module's dtype: t and the product are rounded too."""
    x, base, a, b, _ = tensors(dtype)
    peft = base + projection(projection(x, a), b) * SCALING
    differing = count_differing(peft, lora_linear(x, base, a, b, SCALING))
    assert differing > base.numel() // 20 if dtype == BF16 else differing == 0


def test_error_to_fp64_is_not_above_that_of_peft(dtype):
    x, base, a, b, _ = tensors(dtype)
    linear = torch.nn.functional.linear
    truth = base.double() + linear(linear(x.double(), a.double()), b.double()) * SCALING
    errors = [
        float((y.double() - truth).square().mean().sqrt())
        for y in (lora_linear(x, base, a, b, SCALING), base + linear(linear(x, a), b) * SCALING)
    ]
    slack = (
        1.01 if dtype == BF16 else 2.0
    )  # one fp32 accumulator against the several of a CPU BLAS; docs/contract.md
    assert errors[0] <= errors[1] * slack


def test_slices_of_a_fused_linear_equal_separate_adapters(dtype):
    """q and v of a fused qkv have their own rank and scaling; k has no adapter, its columns are base_out's bytes."""
    x, base, *_ = tensors(dtype)
    wide = torch.cat([base, base.flip(1), -base], dim=1)
    _, _, a_q, b_q, _ = tensors(dtype, seed=10)
    _, _, a_v, b_v, _ = tensors(dtype, seed=20)
    a_v, b_v = a_v[:3], b_v[:, :3]
    slices = [LoraSlice(a_v, b_v, 2 * N, 1.7), LoraSlice(a_q, b_q, 0, SCALING)]
    fused = lora_slices(x, wide, slices)
    q, k, v = wide.chunk(3, dim=1)
    assert_bitwise_equal(fused[:, :N], lora_linear(x, q, a_q, b_q, SCALING))
    assert_bitwise_equal(fused[:, N : 2 * N], k)
    assert_bitwise_equal(fused[:, 2 * N :], lora_linear(x, v, a_v, b_v, 1.7))
    assert_bitwise_equal(lora_slices(x, wide, []), wide)
    by_row = lora_slices(x, wide, slices, style=RowStyle())
    assert_bitwise_equal(by_row[:, :N], lora_linear(x, q, a_q, b_q, SCALING, style=RowStyle()))


def test_gradients_of_slices_equal_those_of_separate_adapters(dtype):
    x, base, a, b, dy = tensors(dtype)
    wide, dy2 = torch.cat([base, base], dim=1), torch.cat([dy, -dy.flip(0)], dim=1)
    call = lambda a, b: lora_slices(x, wide, [LoraSlice(a, b, 0, 0.5), LoraSlice(a.flip(0), b, N, 2.0)])  # noqa: E731
    alone = lambda a, b: torch.cat(  # noqa: E731
        [lora_linear(x, base, a, b, 0.5), lora_linear(x, base, a.flip(0), b, 2.0)], dim=1
    )
    for got, expected in zip(grads(call, a, b, dy=dy2), grads(alone, a, b, dy=dy2), strict=True):
        assert_bitwise_equal(got, expected)


def test_rows_are_independent_and_gradients_follow_keys(dtype):
    x, base, a, b, dy = tensors(dtype)
    keys = torch.stack([torch.zeros(ROWS, dtype=torch.int64), torch.arange(ROWS)], dim=1)

    def run(rows):
        call = lambda *t: lora_linear(*t, 0.5, logical_keys=LogicalKeys(keys[rows]))  # noqa: E731
        return grads(call, x[rows], base[rows], a, b, dy=dy[rows])

    y, _, _, da, db = run(torch.arange(ROWS))
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    permuted = run(order)
    assert_bitwise_equal(permuted[0], y[order])
    assert_bitwise_equal(permuted[3], da)
    assert_bitwise_equal(permuted[4], db)
    assert_bitwise_equal(lora_linear(x[4], base[4], a, b, 0.5), y[4])


def test_rows_added_in_blocks_have_the_same_bits(monkeypatch, dtype):
    x, base, a, b, _ = tensors(dtype)
    whole = lora_linear(x, base, a, b, SCALING)
    monkeypatch.setattr(autograd, "_SCALED_ADD_ELEMENTS", 5 * N)
    assert_bitwise_equal(lora_linear(x, base, a, b, SCALING), whole)


def _both_ways(dtype, scaling):
    """y, d base, dh and dB of the term: the product and the addition apart, and as one op whose B carries the scale."""
    h, base, _, b, dy = tensors(dtype)
    h, eye = h[:, :RANK].contiguous(), torch.eye(RANK, dtype=dtype)
    apart = grads(lambda h, base, b: lora_linear(h, base, eye, b, scaling), h, base, b, dy=dy)
    one = grads(lambda h, base, b: expand(base, h, b * scaling, None, 8, "auto", ""), h, base, b, dy=dy)
    return apart, one


@pytest.mark.parametrize("scaling", [1.0, 2.0, -0.25])
def test_one_op_whose_b_carries_a_power_of_two_has_the_bits_of_the_term(scaling, dtype):
    assert folded(scaling)
    for found, expected in zip(*_both_ways(dtype, scaling), strict=True):
        assert_bitwise_equal(found, expected)


def test_twin_another_scale_carried_by_b_has_other_bits(dtype):
    assert not folded(SCALING)
    assert any(count_differing(a, b) for a, b in zip(*_both_ways(dtype, SCALING), strict=True))


def test_an_adapter_of_zeros_returns_the_base(dtype):
    x, base, a, b, _ = tensors(dtype)
    assert_bitwise_equal(lora_linear(x, base, a, torch.zeros_like(b), 0.5), base)


def test_bad_adapters_are_refused(dtype):
    x, base, a, b, _ = tensors(dtype)
    with pytest.raises(InputError, match=r"a \[8, 128\] and b \[48, 7\]"):
        lora_linear(x, base, a, b[:, :7], 1.0)
    with pytest.raises(InputError, match=r"base_out \[19, 40\].*expected \[19, 48\]"):
        lora_linear(x, base[:, :40], a, b, 1.0)
    with pytest.raises(InputError, match="expected one dtype"):
        lora_linear(x, base, a.half(), b, 1.0)
    with pytest.raises(InputError, match=r"columns 40\.\.88 overlap a slice or leave 0\.\.96"):
        lora_slices(x, torch.cat([base, base], 1), [LoraSlice(a, b, 0, 1.0), LoraSlice(a, b, 40, 1.0)])
    with pytest.raises(InputError, match=r"leave 0\.\.48"):
        lora_slices(x, base, [LoraSlice(a, b, 8, 1.0)])
    with pytest.raises(ContractError, match="does not divide into 8"):
        lora_linear(x[:, :9], base, a[:, :9], b, 1.0, style=RowStyle())
