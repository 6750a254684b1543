"""The node kernels in Triton's interpreter on the CPU: right within rounding, and invariant bit for bit.

Run by test_triton_nodes_interpreter.py in a process of its own with TRITON_INTERPRET=1, because the interpreter is
chosen when a kernel is defined. What it cannot show (speed, layouts, tensor cores) the gpu tests do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from bf16_interpreter import bf16_arithmetic, random
from torch import Tensor

__all__ = ["bf16_arithmetic"]  # an autouse fixture
EPS = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in rows computed but not stored


def spread(*shape: int, seed: int = 0) -> Tensor:
    """fp32 values over 20 binades: sums of their squares round at every step (sums of bf16 squares do not)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.exp2(torch.randn(*shape, generator=generator) * 3)


def assert_close(found: Tensor, expected: Tensor, ulps: float = 1.01) -> None:
    """At most `ulps` bf16 roundings apart: both come from fp32 values that differ in the order of a sum."""
    found, expected = found.double(), expected.double()
    scale = expected.abs().clamp(min=expected.abs().mean() * 2.0**-4)
    worst = ((found - expected).abs() / scale).max().item()
    assert worst <= ulps * 2.0**-7, worst


def pair_tree(x: Tensor) -> Tensor:
    """Adjacent pairs over the last axis, a power of two long."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def row_sum(x: Tensor) -> Tensor:
    """The order of triton/rows.py in torch."""
    from h3_kernels.triton.rows import chunking

    shape = chunking(x.shape[-1])
    lanes = torch.nn.functional.pad(x, (0, shape["CHUNK"] * shape["CHUNKS"] - x.shape[-1]))
    first, *rest = lanes.unflatten(-1, (shape["CHUNKS"], shape["CHUNK"])).unbind(-2)
    for chunk in rest:
        first = first + chunk
    return pair_tree(first)


@pytest.mark.parametrize("width", [192, 1024, 2100])
def test_norm_is_the_written_order_bit_for_bit(width: int) -> None:
    from h3_kernels.triton.rms_norm import norm_forward

    x, weight, shift, scale = (
        spread(5, width),
        random(width, seed=1),
        random(3, width, seed=2),
        random(3, width, seed=3),
    )
    index = torch.tensor([2, 0, 1, 1, 0])
    r = 1.0 / (row_sum(x * x) / width + EPS).double().sqrt().float()  # a correctly rounded square root
    n = x * r[:, None] * weight.float()
    modulated = n * (1.0 + scale.float())[index] + shift.float()[index]
    assert torch.equal(norm_forward(x, weight, None, None, None, EPS), n)
    assert torch.equal(norm_forward(x, weight, shift, scale, index, EPS), modulated)
    assert not torch.equal(row_sum((x * x).roll(1, -1)), row_sum(x * x)), (
        "another order must be another number"
    )


def node_cases() -> dict[str, tuple[Callable[..., object], tuple[object, ...], dict[str, object]]]:
    """(public CPU node, tensors, settings) at sizes with a ragged last chunk, block and head group."""
    from h3_kernels import nodes

    rows, width, heads = 6, 1100, 9
    x, branch, weight = random(rows, width), random(rows, width, seed=1), random(width, seed=2)
    gate, shift, scale = (random(4, width, seed=s, scale=0.3) for s in (3, 4, 5))
    index = torch.tensor([3, 0, 3, 1, 1, 3])
    q, k = random(rows, heads, 128, seed=6), random(rows, heads, 128, seed=7)
    wq, wk = random(128, seed=8), random(128, seed=9)
    angles = torch.randn(rows, 48, generator=torch.Generator().manual_seed(1))
    table = torch.cat([angles.cos(), angles.sin()], -1).bfloat16()
    return {
        "rms_norm": (nodes.rms_norm, (x, weight), {"eps": EPS}),
        "rms_norm_modulate": (nodes.rms_norm_modulate, (x, weight, shift, scale, index), {"eps": EPS}),
        "residual": (nodes.residual, (x, branch), {}),
        "gated_residual": (nodes.gated_residual, (x, gate, branch, index), {}),
        "gated_residual_norm": (
            nodes.gated_residual_norm, (x, gate, branch, weight, shift, scale, index), {"eps": EPS},
        ),
        "qk_norm_rope": (nodes.qk_norm_rope, (q, k, wq, wk, table), {"eps": EPS}),
        "qk_norm": (nodes.qk_norm_rope, (q, k, wq, wk, None), {"eps": EPS}),
        "swiglu": (nodes.swiglu, (x, branch), {}),
    }  # fmt: skip


CASES = (
    "rms_norm", "rms_norm_modulate", "residual", "gated_residual", "gated_residual_norm", "qk_norm_rope", "qk_norm",
    "swiglu",
)  # fmt: skip


@pytest.fixture
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to send CPU tensors to the CUDA entry points from then on."""
    from h3_kernels.nodes import _op

    def implementation(self: _op.NodeOp, device: torch.device, direction: str) -> Callable[..., object]:
        suffix = "" if direction == "forward" else "_backward"
        return _op._launcher(self.module, f"launch_{self.name}{suffix}")

    return lambda: monkeypatch.setattr(_op.NodeOp, "_implementation", implementation)


def run_node(
    case: tuple[Callable[..., object], tuple[object, ...], dict[str, object]],
    seed: int = 11,
    layout: Callable[[Tensor], Tensor] = Tensor.contiguous,
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and the gradients of every floating tensor, for random output gradients, all laid out by ``layout``."""
    function, tensors, settings = case
    tensors = tuple(layout(t) if isinstance(t, Tensor) else t for t in tensors)
    inputs = [
        t.detach().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors
    ]
    result = function(*inputs, **settings)
    outputs = list(result) if isinstance(result, tuple) else [result]
    leaves = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    given = [layout(random(*o.shape, seed=seed + i)) for i, o in enumerate(outputs)]
    grads = torch.autograd.grad(outputs, leaves, given, allow_unused=True)  # a rope table has no gradient
    return [o.detach() for o in outputs], [g for g in grads if g is not None]


@pytest.mark.parametrize("name", CASES)
def test_kernel_agrees_with_the_cpu_node(name: str, kernels_on_cpu: Callable[[], None]) -> None:
    case = node_cases()[name]
    expected = run_node(case)
    kernels_on_cpu()
    found = run_node(case)
    for left, right in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        assert left.dtype == right.dtype
        assert_close(left, right)


@pytest.mark.parametrize("name", CASES)
def test_a_row_keeps_its_bits_in_any_company(name: str, kernels_on_cpu: Callable[[], None]) -> None:
    function, tensors, settings = node_cases()[name]
    kernels_on_cpu()
    rows = 6
    taken = torch.tensor([4, 1, 5, 5])
    whole = function(*tensors, **settings)
    some = function(
        *(t[taken] if isinstance(t, Tensor) and t.shape[0] == rows else t for t in tensors), **settings
    )
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (whole, some)), strict=True):
        assert torch.equal(a[taken], b)


def with_gaps(x: Tensor) -> Tensor:
    """The values of x, the elements of its last axis two apart, with NaN (or a wrong index) between them."""
    between = torch.full_like(x, float("nan")) if x.is_floating_point() else torch.zeros_like(x)
    return torch.stack([x, between], dim=-1)[..., 0]


@pytest.mark.parametrize("name", CASES)
def test_gaps_between_columns_change_no_bit(name: str, kernels_on_cpu: Callable[[], None]) -> None:
    """Every operand and every gradient may be a view with a stride on its last axis: weights, tables, indices too."""
    kernels_on_cpu()
    dense, strided = (run_node(node_cases()[name], layout=f) for f in (Tensor.contiguous, with_gaps))
    for a, b in zip(dense[0] + dense[1], strided[0] + strided[1], strict=True):
        assert torch.equal(a, b)


def test_a_gate_gradient_of_transposed_rows(kernels_on_cpu: Callable[[], None]) -> None:
    """dy and branch may both lie column by column, and then so does their product."""
    from h3_kernels.triton.gated_residual import launch_gated_residual_backward

    rows, width = 6, 96
    x, branch, dy = (random(rows, width, seed=s) for s in range(3))
    gate, index = random(4, width, seed=3), torch.tensor([3, 0, 3, 1, 1, 3])
    needs = (True, True, True, False, False)

    def gradients(dy: Tensor, branch: Tensor) -> tuple[Tensor | None, ...]:
        return launch_gated_residual_backward(dy, x, gate, branch, index, None, needs=needs)

    expected = gradients(dy, branch)
    for a, b in zip(
        expected[:3], gradients(dy.t().contiguous().t(), branch.t().contiguous().t())[:3], strict=True
    ):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


def test_strided_rows_change_no_bit(kernels_on_cpu: Callable[[], None]) -> None:
    from h3_kernels import nodes

    kernels_on_cpu()
    fused = random(6, 3 * 9 * 128)
    q, k, _ = (part.unflatten(-1, (9, 128)) for part in fused.chunk(3, dim=-1))
    weight = random(128, seed=1)
    views = nodes.qk_norm_rope(q, k, weight, weight, None, EPS)
    copies = nodes.qk_norm_rope(q.contiguous(), k.contiguous(), weight, weight, None, EPS)
    assert all(torch.equal(a, b) for a, b in zip(views, copies, strict=True))
    gate, value = fused.chunk(2, dim=-1)
    assert torch.equal(nodes.swiglu(gate, value), nodes.swiglu(gate.contiguous(), value.contiguous()))
    assert torch.equal(
        nodes.rms_norm(q[:, 0], weight, EPS), nodes.rms_norm(q[:, 0].contiguous(), weight, EPS)
    )


@pytest.mark.parametrize("gate_first", [True, False])
def test_the_gradient_of_a_fused_projection_is_not_copied(
    gate_first: bool, kernels_on_cpu: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from h3_kernels import nodes

    fused, dy = random(6, 200).requires_grad_(), random(6, 100, seed=1)

    def gradient() -> Tensor:
        blocks = nodes.column_blocks(fused, 2)
        gate, value = blocks if gate_first else blocks[::-1]
        return torch.autograd.grad(nodes.swiglu(gate, value), fused, dy)[0]

    expected = gradient()
    kernels_on_cpu()
    monkeypatch.setattr(torch, "cat", None)  # joining the halves would need it
    assert_close(gradient(), expected)


@pytest.mark.parametrize(("rows", "columns"), [(3, 100), (200, 128), (129, 300)])
def test_lora_term_in_one_pass(rows: int, columns: int) -> None:
    """Within rounding of fp64 (the interpreter's products have no order), on rows with gaps, nothing left unwritten."""
    from h3_kernels.triton.lora import lora_expand

    base, h, b = random(rows, 2 * columns)[:, columns:], random(rows, 16, seed=1), random(columns, 16, seed=2)
    exact = base.double() + h.double() @ b.double().t()
    assert_close(lora_expand(base, h, b), exact.bfloat16())
    assert not torch.equal(lora_expand(base, h, b), base + (h.float() @ b.float().t()).bfloat16())


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_row_sums_have_the_bits_of_the_cpu_tree(rows: int) -> None:
    from h3_kernels.nodes import _order
    from h3_kernels.triton import sum_rows as kernels

    x = spread(rows, 40)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(2))[: max(1, rows * 2 // 3)]
    index = torch.arange(rows) * 7 % 3
    assert torch.equal(kernels.sum_rows(x), _order.sum_rows(x))
    assert torch.equal(kernels.sum_rows(x, order), _order.sum_rows(x[order]))
    for some in (None, order):
        expected = _order.sum_rows_by_index(x, index, 4, some)
        assert torch.equal(kernels.sum_rows_by_index(x, index, 4, some), expected)
    if rows == 300:
        assert not torch.equal(kernels.sum_rows(x.flip(0)), _order.sum_rows(x))


def test_a_tree_of_two_levels_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from h3_kernels.nodes import _order
    from h3_kernels.triton import sum_rows as kernels

    monkeypatch.setattr(kernels, "BLOCK_ROWS", 4)
    x = spread(70, 40)
    assert torch.equal(kernels.sum_rows(x), _order.sum_rows(x))


def test_no_rows_give_empty_results_and_zero_gradients(kernels_on_cpu: Callable[[], None]) -> None:
    from h3_kernels import nodes

    kernels_on_cpu()
    weight = random(192).requires_grad_()
    y = nodes.rms_norm(random(0, 192).requires_grad_(), weight, EPS)
    assert y.shape == (0, 192)
    (grad,) = torch.autograd.grad(y, weight, torch.zeros_like(y))
    assert torch.equal(grad, torch.zeros_like(weight))
