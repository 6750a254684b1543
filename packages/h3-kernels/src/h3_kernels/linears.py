"""The path of a linear whose gradients involve more than its own op: several weights of one input, or a session.

Everything else takes the ops of autograd.py directly. Both paths run the same gradients, so bits agree.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from h3_kernels import autograd
from h3_kernels.backward_session import BackwardSession, active_session
from h3_kernels.logical_keys import LogicalKeys


@dataclass(frozen=True, slots=True)
class ColumnCall:
    """Settings of ``column_parallel``; with several weights they are the parts of one fused weight, in order."""

    keys: LogicalKeys | None
    parts: list[int]
    units: int
    gather_rows: int
    out_dtype: torch.dtype
    provider: str
    collective: str

    def arguments(self) -> tuple[Any, ...]:
        """What the op takes after x, weight and bias."""
        order = None if self.keys is None else self.keys.order
        rest = (self.units, self.gather_rows, self.out_dtype, self.provider, self.collective)
        return order, self.parts, *rest

    def op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y of one weight, differentiable."""
        return autograd.COLUMN_PARALLEL(x, weight, bias, *self.arguments())

    def whole(self, x: Tensor, dys: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """x and dys with all rows, in the dtype the products take."""
        rows = x
        if self.gather_rows:
            rows = autograd.GATHER_ROWS(x, self.gather_rows, self.collective)
        return rows, [dy.to(x.dtype) for dy in dys]

    def input_grad(self, dys: list[Tensor], weights: list[Tensor]) -> Tensor:
        """dX over all weights, one tree, one rounding."""
        parts, rows = self.parts, [autograd.rows_of(dy) for dy in dys]
        dy, weight = rows[0], weights[0]
        if (
            len(weights) > 1
        ):  # parts in order: unit by unit in one copy, which the op would make of their union
            parts = [0]
            dy, weight = autograd.by_unit(rows, 1, self.units), autograd.by_unit(weights, 0, self.units)
        settings = (parts, self.units, bool(self.gather_rows), self.provider, self.collective)
        dx = autograd.INPUT_GRAD(dy, weight, *settings)
        return dx.view(*dys[0].shape[:-1], dx.shape[-1]) if dys[0].dim() != 2 else dx


@dataclass(frozen=True, slots=True)
class RowCall:
    """Settings of ``row_parallel``."""

    keys: LogicalKeys | None
    units: int
    scatter_rows: bool
    provider: str
    collective: str

    def arguments(self) -> tuple[Any, ...]:
        """What the op takes after x, weight and bias."""
        order = None if self.keys is None else self.keys.order
        return order, self.units, self.scatter_rows, self.provider, self.collective

    def op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y, or this rank's rows of it, differentiable."""
        return autograd.ROW_PARALLEL(x, weight, bias, *self.arguments())

    def whole(self, x: Tensor, dys: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """x and dys with all rows."""
        if not self.scatter_rows:
            return x, dys
        return x, [autograd.GATHER_ROWS(dy, x.shape[0], self.collective) for dy in dys]

    def input_grad(self, dys: list[Tensor], weights: list[Tensor]) -> Tensor:
        """dX: one chain over N."""
        return autograd.INPUT_GRAD(dys[0], weights[0], [0], 1, False, self.provider, "")


Call = ColumnCall | RowCall


class _Linears(torch.autograd.Function):
    """ys = call(x, w) for every w. tensors: the weights, then as many biases (or None)."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, session: BackwardSession | None, x: Tensor, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = _split(tensors)
        ctx.call, ctx.session, ctx.parameters = call, session, list(zip(weights, biases, strict=True))
        for weight, bias in ctx.parameters:
            if session is not None and trains(weight, bias):
                session.expect(weight, bias, call.keys, call.provider)
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        ctx.save_for_backward(x, *weights)
        return tuple(call.op(x, w, b) for w, b in ctx.parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call, session = ctx.call, ctx.session
        x, *weights = ctx.saved_tensors
        rows, dys = call.whole(x, list(grads))
        dx = call.input_grad(dys, weights) if ctx.needs_input_grad[2] else None
        if session is not None:
            for (weight, bias), dy in zip(ctx.parameters, dys, strict=True):
                if trains(weight, bias):
                    session.record(weight, call.keys, autograd.rows_of(dy), autograd.rows_of(rows))
            return None, None, dx, *[None] * (2 * len(weights))
        need_weights, need_biases = _split(ctx.needs_input_grad[3:])
        order = None if call.keys is None else call.keys.order
        dws = [
            autograd.WEIGHT_GRAD(dy, rows, order, call.provider) if need else None
            for dy, need in zip(dys, need_weights, strict=True)
        ]
        dbs = [
            autograd.BIAS_GRAD(dy, order, dtype, call.provider) if need else None
            for dy, dtype, need in zip(dys, ctx.bias_dtypes, need_biases, strict=True)
        ]
        return None, None, dx, *dws, *dbs


def _split(tensors: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    half = len(tensors) // 2
    return list(tensors[:half]), list(tensors[half:])


def trains(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the weight or the bias wants a gradient."""
    return weight.requires_grad or (bias is not None and bias.requires_grad)


def apply_linear(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y of one weight: through the session if one is open and the weight trains, else through the op."""
    session = active_session()
    if session is not None and torch.is_grad_enabled() and trains(weight, bias):
        (y,) = session.eagerly(_apply, call, session, x, [weight], [bias])
        return cast(Tensor, y)
    return call.op(x, weight, bias)


def apply_group(
    call: ColumnCall, x: Tensor, weights: list[Tensor], biases: list[Tensor | None]
) -> tuple[Tensor, ...]:
    """ys of several weights of one input, whose dX is one reduction."""
    session = active_session()
    if session is not None and torch.is_grad_enabled():
        return cast(tuple[Tensor, ...], session.eagerly(_apply, call, session, x, weights, biases))
    if not torch.is_grad_enabled():
        return tuple(call.op(x, w, b) for w, b in zip(weights, biases, strict=True))
    return _apply(call, None, x, weights, biases)


def _apply(
    call: Call, session: BackwardSession | None, x: Tensor, weights: list[Tensor], biases: list[Tensor | None]
) -> tuple[Tensor, ...]:
    ys: tuple[Tensor, ...] = _Linears.apply(call, session, x, *weights, *biases)  # type: ignore[no-untyped-call]
    return ys
