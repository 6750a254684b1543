"""A row's bits, forward and backward, depend on that row (for attention, on its document) alone.

Not on the number of rows, their place, padding, other documents, memory layout, or the split of heads and channels over
ranks; and gradients of parameters depend on the rows' logical order alone. Each promise has a negative twin: an order
that does depend on those things, which the same comparison must catch.
"""

from __future__ import annotations

import pytest
import torch
from h3_kernels import nodes
from h3_kernels.errors import InputError
from h3_kernels.nodes import _order
from h3_kernels.testing import assert_bitwise_equal, count_differing
from hypothesis import given, settings
from hypothesis import strategies as st

H, D, HEADS, TABLE, EPS = 48, 16, 8, 6, 1e-5


def normal(*shape: int, seed: int, mean: float = 0.0, scale: float = 1.0) -> torch.Tensor:
    return (mean + scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def index(rows: int, seed: int = 9) -> torch.Tensor:
    return torch.randint(0, TABLE, (rows,), generator=torch.Generator().manual_seed(seed))


W = normal(H, seed=90, mean=1.0, scale=0.3)
SHIFT, SCALE, GATE = (normal(TABLE, H, seed=s) for s in (91, 92, 93))
QW, KW = (normal(D, seed=s, mean=1.0, scale=0.3) for s in (94, 95))


def rope(rows: int) -> torch.Tensor:
    positions = torch.randint(0, 90, (rows, 3), generator=torch.Generator().manual_seed(8))
    return nodes.rope_table(positions, nodes.inverse_frequencies(2))


# Node -> (function of row tensors, makers of row tensors given (rows)).
ROWWISE = {
    "rms_norm": (lambda x: nodes.rms_norm(x, W, EPS), lambda n: [normal(n, H, seed=1)]),
    "rms_norm_modulate": (
        lambda x, i: nodes.rms_norm_modulate(x, W, SHIFT, SCALE, i, EPS),
        lambda n: [normal(n, H, seed=1), index(n)],
    ),
    "residual": (nodes.residual, lambda n: [normal(n, H, seed=1), normal(n, H, seed=2)]),
    "gated_residual": (
        lambda x, y, i: nodes.gated_residual(x, GATE, y, i),
        lambda n: [normal(n, H, seed=1), normal(n, H, seed=2), index(n)],
    ),
    "gated_residual_norm": (
        lambda x, y, i: nodes.gated_residual_norm(x, GATE, y, W, SHIFT, SCALE, i, EPS),
        lambda n: [normal(n, H, seed=1), normal(n, H, seed=2), index(n)],
    ),
    "qk_norm_rope": (
        lambda q, k, t: nodes.qk_norm_rope(q, k, QW, KW, t, EPS),
        lambda n: [normal(n, HEADS, D, seed=1), normal(n, HEADS, D, seed=2), rope(n)],
    ),
    "swiglu": (nodes.swiglu, lambda n: [normal(n, H, seed=1, scale=3.0), normal(n, H, seed=2)]),
    "silu": (nodes.silu, lambda n: [normal(n, H, seed=1, scale=3.0)]),
}


def forward_backward(function, inputs):
    """Outputs and the gradients of the floating row tensors, for a cotangent that is itself a function of the row."""
    leaves = [t.clone().requires_grad_() if t.dtype == torch.bfloat16 and t.dim() > 1 else t for t in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [t for t in leaves if t.requires_grad]
    cotangents = [torch.sin(7.0 * o.detach().float()).to(o.dtype) for o in outputs]
    grads = torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)
    return [t.detach() for t in (*outputs, *(g for g in grads if g is not None))]


@pytest.mark.parametrize("name", ROWWISE)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_row_is_the_same_in_any_batch_at_any_place(name, data):
    function, make = ROWWISE[name]
    rows = data.draw(st.integers(1, 70), label="rows")
    inputs = make(rows)
    whole = forward_backward(function, inputs)
    chosen = torch.tensor(
        data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=90), label="chosen")
    )
    part = forward_backward(function, [t[chosen] for t in inputs])
    for i, (a, b) in enumerate(zip(whole, part, strict=True)):
        assert_bitwise_equal(a[chosen], b, f"{name} result {i}")


@pytest.mark.parametrize("name", ROWWISE)
def test_a_row_is_the_same_in_any_memory_layout(name):
    function, make = ROWWISE[name]
    inputs = make(33)
    strided = []
    for t in inputs:
        room = t.new_zeros((t.shape[0], 3, *t.shape[1:]))
        room[:, 1] = t
        strided.append(room[:, 1])
    results = zip(forward_backward(function, inputs), forward_backward(function, strided), strict=True)
    for i, (a, b) in enumerate(results):
        assert_bitwise_equal(a, b, f"{name} result {i}")


def qkv(rows: int, seed: int = 20) -> list[torch.Tensor]:
    return [normal(rows, HEADS, D, seed=seed + i) for i in range(3)]


def attend(tensors, lengths):
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return forward_backward(lambda q, k, v: nodes.attention(q, k, v, bounds, max(lengths), D**-0.5), tensors)


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(any), which=st.integers(0, 3))
def test_a_document_attends_the_same_alone_and_packed(lengths, which):
    which = which % len(lengths)
    rows = slice(sum(lengths[:which]), sum(lengths[: which + 1]))
    tensors = qkv(sum(lengths))
    packed = attend(tensors, lengths)
    if lengths[which]:
        alone = attend([t[rows] for t in tensors], [lengths[which]])
        for i, (a, b) in enumerate(zip(packed, alone, strict=True)):
            assert_bitwise_equal(a[rows], b, f"attention result {i}")


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_heads_attend_the_same_on_any_rank(ranks):
    tensors = qkv(29)
    whole = attend(tensors, [29])
    parts = [attend([t.chunk(ranks, 1)[r] for t in tensors], [29]) for r in range(ranks)]
    for i, result in enumerate(whole):
        assert_bitwise_equal(result, torch.cat([p[i] for p in parts], dim=1), f"attention result {i}")


def test_attention_over_a_mask_instead_of_documents_is_caught():
    """Negative twin: one softmax over all rows under an additive mask folds other documents' zeros in between."""
    q, k, v = qkv(30)
    packed = attend([q, k, v], [13, 17])[0]
    mask = torch.full((30, 30), float("-inf"))
    mask[:13, :13] = 0
    mask[13:, 13:] = 0
    one = (t.transpose(0, 1)[None] for t in (q, k, v))
    twin = torch.nn.functional.scaled_dot_product_attention(*one, attn_mask=mask.bfloat16())[0].transpose(
        0, 1
    )
    assert count_differing(packed, twin) > 0


def test_attention_over_keys_in_another_order_is_caught():
    """Negative twin: the same keys and values in reverse give other bits, so key order is part of the contract."""
    q, k, v = qkv(40)
    forward = nodes.attention(q, k, v, torch.tensor([0, 40], dtype=torch.int32), 40, D**-0.5)
    turned = nodes.attention(q, k.flip(0), v.flip(0), torch.tensor([0, 40], dtype=torch.int32), 40, D**-0.5)
    assert count_differing(forward, turned) > 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_heads_and_channels_split_over_ranks_change_nothing(ranks):
    q, k = normal(21, HEADS, D, seed=1), normal(21, HEADS, D, seed=2)
    gate, value = normal(21, H, seed=3, scale=3.0), normal(21, H, seed=4)
    whole = [*nodes.qk_norm_rope(q, k, QW, KW, rope(21), EPS), nodes.swiglu(gate, value)]
    parts = []
    for r in range(ranks):
        q_r, k_r = (t.chunk(ranks, 1)[r] for t in (q, k))
        halves = (t.chunk(ranks, 1)[r] for t in (gate, value))
        parts.append([*nodes.qk_norm_rope(q_r, k_r, QW, KW, rope(21), EPS), nodes.swiglu(*halves)])
    for i, result in enumerate(whole):
        assert_bitwise_equal(result, torch.cat([p[i] for p in parts], dim=1), f"result {i}")


PARAMETERS = {
    "rms_norm": (lambda p, x, i, o: nodes.rms_norm(x, p[0], EPS, order=o), [W]),
    "rms_norm_modulate": (
        lambda p, x, i, o: nodes.rms_norm_modulate(x, p[0], p[1], p[2], i, EPS, order=o),
        [W, SHIFT, SCALE],
    ),
    "gated_residual": (lambda p, x, i, o: nodes.gated_residual(x, p[0], x.detach(), i, order=o), [GATE]),
    "qk_norm_rope": (
        lambda p, x, i, o: nodes.qk_norm_rope(
            x.view(-1, 3, D), x.view(-1, 3, D), p[0], p[1], None, EPS, order=o
        )[0],
        [QW, KW],
    ),
}


def parameter_gradients(name, x, i, cotangent, order):
    function, parameters = PARAMETERS[name]
    leaves = [p.clone().requires_grad_() for p in parameters]
    y = function(leaves, x, i, order)
    return torch.autograd.grad(y, leaves, cotangent.view_as(y), materialize_grads=True)


@pytest.mark.parametrize("name", PARAMETERS)
@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 40), padding=st.integers(0, 9), seed=st.integers(0, 99))
def test_parameter_gradients_follow_the_logical_order(name, rows, padding, seed):
    x, i, cotangent = normal(rows, H, seed=1), index(rows), normal(rows, H, seed=2)
    expected = parameter_gradients(name, x, i, cotangent, None)
    # The same rows scattered among padding rows, which hold other values, at arbitrary places.
    places = torch.randperm(rows + padding, generator=torch.Generator().manual_seed(seed))[:rows]
    wide, wide_i = normal(rows + padding, H, seed=3), index(rows + padding, seed=4)
    wide_g = normal(rows + padding, H, seed=5)
    wide[places], wide_i[places], wide_g[places] = x, i, cotangent
    found = parameter_gradients(name, wide, wide_i, wide_g, places)
    for a, b in zip(expected, found, strict=True):
        assert_bitwise_equal(a, b, name)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_gradients_without_the_order_are_caught(name):
    """Negative twin: permuted rows without their order give other bits."""
    x, i, cotangent = normal(200, H, seed=1), index(200), normal(200, H, seed=2)
    leaves = [
        p.float() for p in PARAMETERS[name][1]
    ]  # fp32 parameters: nothing is hidden by a rounding to bf16
    permuted = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PARAMETERS, name, (PARAMETERS[name][0], leaves))
        expected = parameter_gradients(name, x, i, cotangent, None)
        found = parameter_gradients(name, x[permuted], i[permuted], cotangent[permuted], None)
    assert count_differing(expected[0], found[0]) > 0


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(0, 70), padding=st.integers(0, 70))
def test_row_sums_ignore_rows_of_zeros_behind(rows, padding):
    x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(rows))
    assert_bitwise_equal(_order.sum_rows(x), _order.sum_rows(torch.cat([x, torch.zeros(padding, 5)])))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_rank_of_heads_holds_a_subtree_of_the_sum_over_heads(tp):
    x = torch.randn(56, D, generator=torch.Generator().manual_seed(0))
    roots = torch.stack([_order.sum_heads(part, 8 // tp) for part in x.chunk(tp)])
    assert_bitwise_equal(_order.sum_rows(roots), _order.sum_heads(x, 8))


def test_a_sum_over_heads_without_groups_is_caught():
    """Negative twin: the tree of neighbours over 56 heads pairs heads of different ranks."""
    x = torch.randn(56, 512, generator=torch.Generator().manual_seed(0))
    roots = torch.stack([_order.sum_rows(part) for part in x.chunk(8)])
    assert count_differing(_order.sum_rows(roots), _order.sum_rows(x)) > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nodes.rms_norm(normal(3, H, seed=1), QW, EPS), r"weight must be \[48\]"),
        (lambda: nodes.gated_residual(W[None], GATE[:, :4], W[None], index(1)), r"table must be \[R, 48\]"),
        (lambda: nodes.gated_residual(W[None], GATE, W[None], index(1).int()), "index must be int64"),
        (lambda: nodes.swiglu(W[None], W[None].float()), "one .rows, width. and dtype"),
        (lambda: nodes.attention(*qkv(4), torch.tensor([0, 4]), 4, 1.0), "cu_seqlens must be int32"),
        (lambda: nodes.attention(*qkv(4), torch.tensor([0, 3]).int(), 4, 1.0), "must rise from 0 to 4"),
        (
            lambda: nodes.attention(*qkv(4), torch.tensor([0, 4]).int(), 4, 1.0, provider="fa3"),
            "the CPU has one provider",
        ),
        (lambda: nodes.attention(*qkv(4), torch.tensor([0, 4]).int(), 3, 1.0), "4 rows exceeds 3"),
        (lambda: nodes.qk_norm_rope(*qkv(4)[:2], QW, KW, rope(3), EPS), r"table must be \[4"),
        (lambda: nodes.rope_table(torch.zeros(4, 2), torch.ones(2)), r"positions must be \[rows, 3\]"),
        (lambda: nodes.scatter_rows(4, torch.bfloat16, (W[None], index(2))), "do not fit positions"),
    ],
)
def test_bad_input_is_refused_with_one_line(call, message):
    with pytest.raises(InputError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
