"""The node kernels on a GPU: no less exact than the stock expressions, and invariant bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from h3_kernels import attention_providers, nodes
from h3_kernels.errors import ProviderError
from h3_kernels.testing import assert_bitwise_equal, count_differing
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HIDDEN, HEADS, DIM, EPS = 5376, 56, 128, 1e-5
MANY = 2500  # above rows.FEW_ROWS, where launches take other options


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(torch.bfloat16)


def stock_norm_modulate(x: Tensor, w: Tensor, shift: Tensor, scale: Tensor, index: Tensor) -> Tensor:
    return rms_norm(x, (x.shape[-1],), w, EPS) * (1.0 + scale[index]) + shift[index]


def stock_gated_norm(
    x: Tensor, gate: Tensor, branch: Tensor, w: Tensor, *tables: Tensor
) -> tuple[Tensor, Tensor]:
    y = x + gate[tables[2]] * branch
    return y, stock_norm_modulate(y, w, *tables)


def stock_rotate(x: Tensor, w: Tensor, table: Tensor) -> Tensor:
    n = rms_norm(x, (x.shape[-1],), w, EPS)
    half = table.shape[1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    a, b = n[..., :half], n[..., half : 2 * half]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, n[..., 2 * half :]), dim=-1)


def stock_qk(q: Tensor, k: Tensor, wq: Tensor, wk: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return stock_rotate(q, wq, table), stock_rotate(k, wk, table)


def cases(
    rows: int,
) -> dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Tensor, ...], dict[str, float]]]:
    """(node, stock expression, tensors, settings), in the full model's widths."""
    x, branch, w = random(rows, HIDDEN), random(rows, HIDDEN, seed=1), random(HIDDEN, seed=2)
    gate, shift, scale = random(6, 3 * HIDDEN, seed=3, scale=0.3).chunk(3, dim=-1)
    index = torch.arange(rows, device="cuda") * 5 % 6
    qkv = random(rows, 3 * HEADS * DIM, seed=4)
    q, k, _ = (part.unflatten(-1, (HEADS, DIM)) for part in qkv.chunk(3, dim=-1))
    angles = torch.rand(rows, 48, device="cuda") * 100
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).bfloat16()
    ffn = random(rows, 2 * 14336, seed=5).chunk(2, dim=-1)
    eps = {"eps": EPS}
    return {
        "rms_norm": (nodes.rms_norm, lambda x, w: rms_norm(x, (HIDDEN,), w, EPS), (x, w), eps),
        "rms_norm_modulate": (nodes.rms_norm_modulate, stock_norm_modulate, (x, w, shift, scale, index), eps),
        "residual": (nodes.residual, torch.add, (x, branch), {}),
        "gated_residual": (nodes.gated_residual, lambda x, g, b, i: x + g[i] * b, (x, gate, branch, index), {}),
        "gated_residual_norm": (
            nodes.gated_residual_norm, stock_gated_norm, (x, gate, branch, w, shift, scale, index), eps,
        ),
        "qk_norm_rope": (nodes.qk_norm_rope, stock_qk, (q, k, random(DIM), random(DIM, seed=1), table), eps),
        "swiglu": (nodes.swiglu, lambda g, v: silu(g) * v, ffn, {}),
    }  # fmt: skip


CASES = (
    "rms_norm", "rms_norm_modulate", "residual", "gated_residual", "gated_residual_norm", "qk_norm_rope", "swiglu",
)  # fmt: skip


def differentiate(
    function: Callable[..., Any], tensors: tuple[Tensor, ...], rows: int, **settings: Any
) -> list[Tensor]:
    """Outputs, then the gradients of every floating tensor, for gradients drawn row by row from one seed."""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    result = function(*leaves, **settings)
    outs = list(result) if isinstance(result, tuple) else [result]
    grads = [random(MANY, *o.shape[1:], seed=20 + i)[:rows].to(o.dtype) for i, o in enumerate(outs)]
    wanted = [t for t in leaves if t.requires_grad]
    found = torch.autograd.grad(outs, wanted, grads, allow_unused=True)
    return [o.detach() for o in outs] + [torch.zeros(1) if g is None else g for g in found]


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))


@pytest.mark.parametrize("name", CASES)
def test_error_is_not_above_the_stock_expressions(name: str) -> None:
    rows = 300
    node, stock, tensors, settings = cases(rows)[name]
    exact = differentiate(stock, tuple(t.double() if t.is_floating_point() else t for t in tensors), rows)
    ours = differentiate(node, tensors, rows, **settings)
    theirs = differentiate(stock, tensors, rows)
    for found, other, right in zip(ours, theirs, exact, strict=True):
        if found.is_cuda and right.is_cuda:
            assert relative_error(found, right) <= 1.02 * relative_error(other, right) + 1e-7


@pytest.mark.parametrize("name", CASES)
def test_rows_keep_their_bits(name: str) -> None:
    """Theorem: outputs and row gradients are the same among many rows, few, alone, and on a second run."""
    node, _, tensors, settings = cases(MANY)[name]
    whole = differentiate(node, tensors, MANY, **settings)
    for first, second in zip(whole, differentiate(node, tensors, MANY, **settings), strict=True):
        assert_bitwise_equal(first, second, name)
    for rows in (1, 70, 925):
        some = differentiate(
            node, tuple(t[:rows] if t.shape[0] == MANY else t for t in tensors), rows, **settings
        )
        for one, other in zip(whole, some, strict=True):
            if one.shape[0] == MANY:
                assert_bitwise_equal(one[:rows], other, f"{name}, {rows} rows")


@pytest.mark.parametrize("name", CASES)
def test_gaps_between_columns_change_no_bit(name: str) -> None:
    """Theorem: weights, tables, indices and rows may be views with a stride on their last axis."""
    node, _, tensors, settings = cases(70)[name]
    gaps = tuple(torch.stack([t, torch.zeros_like(t)], dim=-1)[..., 0] for t in tensors)
    for dense, strided in zip(
        differentiate(node, tensors, 70, **settings), differentiate(node, gaps, 70, **settings), strict=True
    ):
        assert_bitwise_equal(dense, strided, name)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", CASES)
def test_tensors_need_not_be_on_the_current_device(name: str) -> None:
    node, _, tensors, settings = cases(70)[name]
    there = node(*(t.to("cuda:1") for t in tensors), **settings)
    for a, b in zip(
        *(r if isinstance(r, tuple) else (r,) for r in (node(*tensors, **settings), there)), strict=True
    ):
        assert b.device.index == 1
        assert_bitwise_equal(a.cpu(), b.cpu(), name)


def test_fused_residual_norm_is_the_two_nodes() -> None:
    x, gate, branch, w, shift, scale, index = cases(200)["gated_residual_norm"][2]

    def apart(*t: Tensor) -> tuple[Tensor, Tensor]:
        y = nodes.gated_residual(t[0], t[1], t[2], index)
        return y, nodes.rms_norm_modulate(y, t[3], t[4], t[5], index, EPS)

    tensors = (x, gate, branch, w, shift, scale)
    fused = differentiate(lambda *t: nodes.gated_residual_norm(*t, index, EPS), tensors, 200)
    for one, other in zip(fused, differentiate(apart, tensors, 200), strict=True):
        assert_bitwise_equal(one, other)


def test_head_and_column_splits_keep_their_bits() -> None:
    q, k, wq, wk, table = cases(70)["qk_norm_rope"][2]
    whole = nodes.qk_norm_rope(q, k, wq, wk, table, EPS)
    gate, value = cases(70)["swiglu"][2]
    act = nodes.swiglu(gate, value)
    for tp in (2, 4, 8):
        heads, columns = HEADS // tp, gate.shape[1] // tp
        for rank in range(tp):
            mine = slice(rank * heads, (rank + 1) * heads)
            part = nodes.qk_norm_rope(q[:, mine], k[:, mine], wq, wk, table, EPS)
            for one, other in zip(whole, part, strict=True):
                assert_bitwise_equal(one[:, mine].contiguous(), other)
            mine = slice(rank * columns, (rank + 1) * columns)
            assert_bitwise_equal(act[:, mine].contiguous(), nodes.swiglu(gate[:, mine], value[:, mine]))


def test_gradients_of_tables_follow_the_logical_order() -> None:
    """Theorem: with `order`, permuting rows and adding padding changes no bit of any gradient of a weight or table."""
    node, _, (x, w, shift, scale, index), settings = cases(300)["rms_norm_modulate"]
    w, shift, scale = (
        w.float(),
        shift.float(),
        scale.float(),
    )  # bf16 gradients would round the difference away
    dy = random(300, HIDDEN, seed=9)

    def gradients(rows: Tensor, padding: int, order: Tensor | None) -> tuple[Tensor, ...]:
        pad = lambda t: torch.cat([t[rows], t[:padding]])  # noqa: E731
        leaves = [t.detach().requires_grad_() for t in (pad(x), w, shift, scale)]
        y = node(*leaves, pad(index), order=order, **settings)
        return torch.autograd.grad(y, leaves[1:], pad(dy))

    plain = torch.arange(300, device="cuda")
    permuted = torch.randperm(300, device="cuda")
    order = torch.argsort(permuted)
    expected = gradients(plain, 0, plain)
    for found, right in zip(gradients(permuted, 37, order), expected, strict=True):
        assert_bitwise_equal(found, right)
    wrong = gradients(permuted, 0, plain)
    assert any(count_differing(a, b) for a, b in zip(wrong, expected, strict=True)), "the order must matter"


def attention_inputs(documents: tuple[int, ...]) -> tuple[list[Tensor], list[int]]:
    tensors = [random(sum(documents), HEADS, DIM, seed=s) for s in range(4)]
    return tensors, list(itertools.accumulate(documents, initial=0))


def run_attention(
    x: list[Tensor], bounds: list[int], provider: str = "triton", **options: Any
) -> list[Tensor]:
    """out, dq, dk, dv of q, k, v, dout."""
    from h3_kernels.triton.attention import launch_attention
    from h3_kernels.triton.attention_backward import attention_backward

    q, k, v, dout = x
    cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    longest = max(b - a for a, b in itertools.pairwise(bounds))
    scale = DIM**-0.5
    out, _, lse = launch_attention(q, k, v, cu, max_seqlen=longest, scale=scale, provider=provider)
    return [out, *attention_backward(dout, q, k, v, out, lse, cu, longest, scale, **options)]


def test_attention_ignores_heads_documents_padding_and_repetition() -> None:
    """Theorem: out, dq, dk and dv of a (row, head) depend on its document and head alone, even beside NaN."""
    x, bounds = attention_inputs((70, 925, 33, 1, 300))
    whole = run_attention(x, bounds)
    for a, b in zip(whole, run_attention(x, bounds), strict=True):
        assert_bitwise_equal(a, b, "repeated")
    for heads in (28, 14, 7, 1):
        part = run_attention([t[:, :heads].contiguous() for t in x], bounds)
        for a, b in zip(whole, part, strict=True):
            assert_bitwise_equal(a[:, :heads].contiguous(), b, f"{heads} heads")
    for start, end in itertools.pairwise(bounds):
        alone = run_attention([t[start:end] for t in x], [0, end - start])
        for a, b in zip(whole, alone, strict=True):
            assert_bitwise_equal(a[start:end], b, f"document of {end - start} rows alone")
    nan = torch.full_like(x[0][:99], float("nan"))
    padded = run_attention([torch.cat([t, nan]) for t in x], [*bounds, bounds[-1] + 99])
    for a, b in zip(whole, padded, strict=True):
        assert_bitwise_equal(a, b[: bounds[-1]], "padding")


def test_backward_tiles_and_workspace_change_no_bit() -> None:
    """Theorem: dq, dk, dv are chains, so tiles and the way dq gets dS are a matter of speed; another chain is not."""
    x, bounds = attention_inputs((925, 300))
    expected = run_attention(x, bounds)

    def tile(rows: int, keys: int, warps: int) -> dict[str, int]:
        return {"ROWS": rows, "KEYS": keys, "num_warps": warps, "num_stages": 2}

    one_head = (1225 + 2 * 64) * 1024 * 2
    variants: list[dict[str, Any]] = [
        {"workspace": 0},
        {"workspace": one_head},
        {"workspace": 5 * one_head},
        {"dkdv_tile": tile(64, 128, 8), "dq_tile": tile(64, 64, 4)},
        {"dkdv_tile": tile(32, 64, 4), "dq_tile": tile(128, 128, 8)},
        {"workspace": 0, "recomputed_dq_tile": tile(64, 64, 4)},
        {"workspace": 0, "recomputed_dq_tile": tile(128, 128, 8)},
    ]
    for variant in variants:
        for a, b in zip(expected, run_attention(x, bounds, **variant), strict=True):
            assert_bitwise_equal(a, b, str(variant))
    rolled = run_attention([t[:925].roll(1, 0) for t in x], [0, 925])
    assert count_differing(expected[1][:925], rolled[1].roll(-1, 0))


@pytest.mark.parametrize("provider", [p.name for p in attention_providers.registered()])
def test_attention_error_is_that_of_stock(provider: str) -> None:
    """dq, dk, dv and out against fp64, no worse than torch's flash attention by more than a tenth."""
    x, bounds = attention_inputs((925,))
    call = attention_providers.AttentionCall.of(x[0])
    if any(p.name == provider and p.refuses(call) for p in attention_providers.registered()):
        with pytest.raises(ProviderError, match=provider):
            run_attention(x, bounds, provider)
        return
    ours = run_attention(x, bounds, provider)
    heads = [t.transpose(0, 1)[None].detach().requires_grad_() for t in x]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(*heads[:3])
    theirs = [out.detach(), *torch.autograd.grad(out, heads[:3], heads[3].detach())]
    wide = [t.double().detach().requires_grad_() for t in heads]
    exact = (wide[0] @ wide[1].transpose(2, 3) * DIM**-0.5).softmax(-1) @ wide[2]
    right = [exact.detach(), *torch.autograd.grad(exact, wide[:3], wide[3].detach())]
    for found, other, truth in zip(ours, theirs, right, strict=True):
        mine = relative_error(found.transpose(0, 1)[None], truth)
        assert mine <= 1.1 * relative_error(other, truth)


def test_a_graph_replays_the_same_bits() -> None:
    x, bounds = attention_inputs((925,))
    expected = run_attention(x, bounds)
    cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    node, _, tensors, settings = cases(925)["rms_norm_modulate"]
    normed = node(*tensors, **settings)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_providers.choose(
            attention_providers.AttentionCall.of(x[0]), "triton", x[0].device
        ).forward(*x[:3], cu, 925, DIM**-0.5)[0]
        again = node(*tensors, **settings)
    out.zero_()
    graph.replay()
    assert_bitwise_equal(out, expected[0])
    assert_bitwise_equal(again, normed)
