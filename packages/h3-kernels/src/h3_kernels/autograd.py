"""Forward and backward of the two linears as torch.library ops in the ``h3_kernels`` namespace.

Opaque to the compiler and the same code in eager mode, so bits cannot depend on torch.compile, checkpointing or
sharding (dispatch.py). Orders (docs/contract.md):

- column-parallel: y is one chain over K; dX is the unit tree over 8 ranges of N, unit-major over the fused parts.
- row-parallel: y is the unit tree over K; dX is one chain over N, with no sum across ranks.
- dW and dbias: one chain over the rows in ascending logical-key order, local to the rank.

Shapes: x [..., K], weight [N, K] (a rank's shard), bias [N], y and dy [..., N]; leading dimensions are T rows, and
sequence parallelism has exactly one. ``order`` is int64 [active rows]. ``collective`` is a name from
``collectives.protocol.name_of``; "" is a single rank.
"""

from typing import Any

import torch
from torch import Tensor

from h3_kernels.collectives.protocol import by_name
from h3_kernels.contract import row_range
from h3_kernels.dispatch import define
from h3_kernels.providers import tree_gemm

Grads = tuple[Tensor | None, ...]

_SCALED_ADD_ELEMENTS = 1 << 24
"""Rows are added in blocks of this many elements: fp32 temporaries of 64 MiB, instead of 1 GB at 8349 rows of fc1."""


def rows_of(t: Tensor) -> Tensor:
    """[T, K] of t [..., K]; a vector is one row."""
    return t.reshape(-1, t.shape[-1])


def _with_rows_of(y: Tensor, x: Tensor) -> Tensor:
    """[..., N] of y [T, N] with the leading dimensions of x [..., K], and not a view: the op made the tensor."""
    if x.dim() == 2:
        return y
    reshaped: Tensor = torch.ops.aten._unsafe_view.default(y, [*x.shape[:-1], y.shape[1]])
    return reshaped


# Column-parallel: qkv_proj, fc1 and every projection that is not sharded.


def column_parallel(  # noqa: PLR0913, PLR0917  # an op has no keyword objects
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor | None,
    parts: list[int],
    units: int,
    gather_rows: int,
    out_dtype: torch.dtype,
    provider: str,
    collective: str,
) -> Tensor:
    """y [..., N]: one chain per element. ``units`` is the rank's share of the units of dX."""
    if gather_rows:
        x = by_name(collective).all_gather_rows(x, gather_rows)
    y = tree_gemm(rows_of(x), weight, units=1, out_dtype=out_dtype, bias=bias, provider=provider)
    return _with_rows_of(y, x)


def _column_parallel_fake(x: Tensor, weight: Tensor, *settings: Any) -> Tensor:
    *_, gather_rows, out_dtype, _, _ = settings
    rows = (gather_rows,) if gather_rows else x.shape[:-1]
    return x.new_empty(*rows, weight.shape[0], dtype=out_dtype)


def _column_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, order, *ctx.settings = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, order)


def _column_backward(ctx: Any, dy: Tensor) -> Grads:
    x, weight, order = ctx.saved_tensors
    parts, units, gather_rows, _, provider, collective = ctx.settings
    need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
    dy = dy.to(x.dtype)
    dx = dw = db = None
    if need_x:
        dx = INPUT_GRAD(dy, weight, parts, units, bool(gather_rows), provider, collective)
    if need_weight:
        whole = GATHER_ROWS(x, gather_rows, collective) if gather_rows else x
        dw = WEIGHT_GRAD(dy, whole, order, provider)
    if need_bias:
        db = BIAS_GRAD(dy, order, ctx.bias_dtype, provider)
    return dx, dw, db, *[None] * 7


# Row-parallel: out_proj and fc2.


def row_parallel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor | None,
    units: int,
    scatter_rows: bool,
    provider: str,
    collective: str,
) -> Tensor:
    """y [..., N], or the rank's rows of it: ``units`` chains per element, the tree, one rounding."""
    rows = rows_of(x)
    if collective:
        root = tree_gemm(rows, weight, units=units, out_dtype=torch.float32, provider=provider)
        y = _reduce(root, bias, x.dtype, scatter_rows, collective)
    else:
        y = tree_gemm(rows, weight, units=units, out_dtype=x.dtype, bias=bias, provider=provider)
    return y if scatter_rows else _with_rows_of(y, x)


def _row_parallel_fake(x: Tensor, weight: Tensor, *settings: Any) -> Tensor:
    *_, scatter_rows, _, collective = settings
    return x.new_empty(*_own_rows(x, scatter_rows, collective), weight.shape[0])


def _row_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, order, _, *ctx.settings = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, order)


def _row_backward(ctx: Any, dy: Tensor) -> Grads:
    x, weight, order = ctx.saved_tensors
    scatter_rows, provider, collective = ctx.settings
    need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
    if scatter_rows:
        dy = GATHER_ROWS(dy, x.shape[0], collective)
    dx = INPUT_GRAD(dy, weight, [0], 1, False, provider, "") if need_x else None
    dw = WEIGHT_GRAD(dy, x, order, provider) if need_weight else None
    db = BIAS_GRAD(dy, order, ctx.bias_dtype, provider) if need_bias else None
    return dx, dw, db, *[None] * 5


# Gradients.


def _input_grad(
    dy: Tensor,
    weight: Tensor,
    parts: list[int],
    units: int,
    scatter_rows: bool,
    provider: str,
    collective: str,
) -> Tensor:
    """dX [..., K] = dy W: the unit tree over N, each unit one chain over its share of every part in ``parts`` order."""
    rows, weight = _unit_major(rows_of(dy), 1, parts, units), _unit_major(weight, 0, parts, units)
    if collective:
        root = tree_gemm(rows, weight.t(), units=units, out_dtype=torch.float32, provider=provider)
        dx = _reduce(root, None, dy.dtype, scatter_rows, collective)
    else:
        dx = tree_gemm(rows, weight.t(), units=units, out_dtype=dy.dtype, provider=provider)
    return dx if scatter_rows else _with_rows_of(dx, dy)


def _input_grad_fake(
    dy: Tensor, weight: Tensor, parts: Any, units: int, scatter_rows: bool, provider: str, collective: str
) -> Tensor:
    return dy.new_empty(*_own_rows(dy, scatter_rows, collective), weight.shape[1])


def _unit_major(t: Tensor, dim: int, parts: list[int], units: int) -> Tensor:
    """Reorder dimension ``dim`` from [part, unit, width] to [unit, part in ``parts`` order, width]."""
    if len(parts) == 1 or (units == 1 and list(parts) == sorted(parts)):
        return t
    width = t.shape[dim] // (len(parts) * units)
    blocks = t.reshape(*t.shape[:dim], len(parts), units, width, *t.shape[dim + 1 :])
    # stack and not index_select: an index made on the host could not be captured in a CUDA graph.
    return torch.stack([blocks.select(dim, part) for part in parts], dim=dim + 1).flatten(dim, dim + 2)


def by_unit(parts: list[Tensor], dim: int, units: int) -> Tensor:
    """Equal tensors joined along ``dim`` as [unit, part, width]: ``_unit_major`` of their union, in one copy."""
    width = parts[0].shape[dim] // units
    cut = [part.reshape(*part.shape[:dim], units, width, *part.shape[dim + 1 :]) for part in parts]
    return torch.stack(cut, dim=dim + 1).flatten(dim, dim + 2)


def _weight_grad(dy: Tensor, x: Tensor, order: Tensor | None, provider: str) -> Tensor:
    """dW [N, K] = dy^T x, one chain over the rows in ``order``; rows already in order are read in place."""
    dy, x = rows_of(dy), rows_of(x)
    if order is not None:
        dy, x = dy.index_select(0, order), x.index_select(0, order)
    return tree_gemm(dy.t(), x.t(), units=1, out_dtype=x.dtype, provider=provider)


def _weight_grad_fake(dy: Tensor, x: Tensor, order: Tensor | None, provider: str) -> Tensor:
    return x.new_empty(dy.shape[-1], x.shape[-1])


def _bias_grad(dy: Tensor, order: Tensor | None, dtype: torch.dtype, provider: str) -> Tensor:
    """dbias [N] = dy^T 1: the chain of dW against a column of ones, whose products are exact."""
    dy = rows_of(dy)
    if order is not None:
        dy = dy.index_select(0, order)
    ones = dy.new_ones(1, dy.shape[0])
    return tree_gemm(dy.t(), ones, units=1, out_dtype=dtype, provider=provider).squeeze(1)


def _bias_grad_fake(dy: Tensor, order: Tensor | None, dtype: torch.dtype, provider: str) -> Tensor:
    return dy.new_empty(dy.shape[-1], dtype=dtype)


# The LoRA term.


def scaled_add(base: Tensor, term: Tensor, scaling: float) -> Tensor:
    """base + scaling * term [T, N] in fp32, product and sum each rounded, then one rounding to base's dtype."""
    out = torch.empty_like(base, memory_format=torch.contiguous_format)
    rows = max(1, _SCALED_ADD_ELEMENTS // max(base.shape[-1], 1))
    blocks = (torch.split(rows_of(whole), rows) for whole in (out, base, term))
    for y, b, t in zip(*blocks, strict=True):
        y.copy_(b.float() + t.float() * scaling)
    return out


def _scaled_add_fake(base: Tensor, term: Tensor, scaling: float) -> Tensor:
    return torch.empty_like(base, memory_format=torch.contiguous_format)


def _scaled_add_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, term, ctx.scaling = inputs
    ctx.term_dtype = term.dtype


def _scaled_add_backward(ctx: Any, dy: Tensor) -> Grads:
    need_base, need_term, _ = ctx.needs_input_grad
    term = SCALE(dy, ctx.scaling, ctx.term_dtype) if need_term else None
    return dy if need_base else None, term, None


def _scale(t: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """scaling * t in fp32, rounded once to ``dtype``."""
    return (t.float() * scaling).to(dtype)


def _scale_fake(t: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(t, dtype=dtype)


# Rows of sequence-parallel ranks.


def _reduce(
    root: Tensor, bias: Tensor | None, dtype: torch.dtype, scatter_rows: bool, collective: str
) -> Tensor:
    exchange = by_name(collective)
    reduce = exchange.reduce_scatter_tree if scatter_rows else exchange.all_reduce_tree
    return reduce(root, bias=bias, out_dtype=dtype)


def _own_rows(t: Tensor, scatter_rows: bool, collective: str) -> tuple[int, ...]:
    """Leading dimensions of what a linear gives for t [..., K]."""
    if not scatter_rows:
        return tuple(t.shape[:-1])
    exchange = by_name(collective)
    start, stop = row_range(t.shape[0], exchange.world_size, exchange.rank)
    return (stop - start,)


def _gather_rows(rows: Tensor, total: int, collective: str) -> Tensor:
    return by_name(collective).all_gather_rows(rows.contiguous(), total).clone()


def _gather_rows_fake(rows: Tensor, total: int, collective: str) -> Tensor:
    return rows.new_empty(total, rows.shape[1])


COLUMN_PARALLEL = define(
    "column_parallel(Tensor x, Tensor weight, Tensor? bias, Tensor? order, int[] parts, int units, "
    "SymInt gather_rows, ScalarType out_dtype, str provider, str collective) -> Tensor",
    column_parallel,
    _column_parallel_fake,
    (_column_backward, _column_setup),
)
ROW_PARALLEL = define(
    "row_parallel(Tensor x, Tensor weight, Tensor? bias, Tensor? order, int units, bool scatter_rows, "
    "str provider, str collective) -> Tensor",
    row_parallel,
    _row_parallel_fake,
    (_row_backward, _row_setup),
)
INPUT_GRAD = define(
    "input_grad(Tensor dy, Tensor weight, int[] parts, int units, bool scatter_rows, str provider, "
    "str collective) -> Tensor",
    _input_grad,
    _input_grad_fake,
)
WEIGHT_GRAD = define(
    "weight_grad(Tensor dy, Tensor x, Tensor? order, str provider) -> Tensor", _weight_grad, _weight_grad_fake
)
BIAS_GRAD = define(
    "bias_grad(Tensor dy, Tensor? order, ScalarType dtype, str provider) -> Tensor",
    _bias_grad,
    _bias_grad_fake,
)
SCALED_ADD = define(
    "scaled_add(Tensor base, Tensor term, float scaling) -> Tensor",
    scaled_add,
    _scaled_add_fake,
    (_scaled_add_backward, _scaled_add_setup),
)
SCALE = define("scale(Tensor t, float scaling, ScalarType dtype) -> Tensor", _scale, _scale_fake)
GATHER_ROWS = define(
    "gather_rows(Tensor rows, SymInt total, str collective) -> Tensor", _gather_rows, _gather_rows_fake
)
