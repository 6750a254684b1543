"""The strict LoRA term: the same bits from a PEFT layer and from a slice of a fused vLLM linear.

    h = A x        a chain over K (row-parallel linears: the unit tree of the base linear), rounded to x's
    dtype t = B h        a chain over the rank, left in fp32 y = base + scaling * t    in fp32, product and
    sum each rounded, then one rounding

``base`` is the rounded output of the base linear, so a wrapper around any base layer has the same result, and an
adapter of zeros returns it unchanged. PEFT and vLLM both round h, t, the product and the sum, each in its own order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from h3_kernels.autograd import SCALED_ADD
from h3_kernels.collectives.protocol import Collective, check_collective, name_of
from h3_kernels.contract import UNITS
from h3_kernels.errors import InputError
from h3_kernels.linear_inputs import check_operands
from h3_kernels.linears import ColumnCall, apply_linear
from h3_kernels.logical_keys import LogicalKeys, as_logical_keys
from h3_kernels.lora_expand import expand, served
from h3_kernels.projection import Keys, input_grad_units, projection
from h3_kernels.row_parallel import row_parallel


@dataclass(frozen=True, slots=True)
class ColumnStyle:
    """The adapted linear is column-parallel (or replicated): A whole, B this rank's rows."""

    tp: int = 1
    rank: int = 0
    collective: Collective | None = None


@dataclass(frozen=True, slots=True)
class RowStyle:
    """The adapted linear is row-parallel: A this rank's columns, B whole; ``contract`` as for the base linear."""

    contract: str = f"h3-parallel-v1-u{UNITS}"
    tp: int = 1
    rank: int = 0
    collective: Collective | None = None


LoraStyle = ColumnStyle | RowStyle


@dataclass(frozen=True, slots=True)
class LoraSlice:
    """One adapter of one slice of a fused linear: columns [start, start + b rows) of the output.

    ``a`` [r, K], ``b`` [rows, r], both of x's dtype; ``scaling`` is alpha / r as PEFT computes it.
    """

    a: Tensor
    b: Tensor
    start: int
    scaling: float


def lora_linear(
    x: Tensor,
    base_out: Tensor,
    a: Tensor,
    b: Tensor,
    scaling: float,
    *,
    style: LoraStyle = ColumnStyle(),
    provider: str = "auto",
    logical_keys: Keys = None,
) -> Tensor:
    """y [..., N] = base_out [..., N] + scaling * (x [..., K] a [r, K]^T) b [N, r]^T, in the module's order.

    All tensors share a dtype, bf16 or fp32. Backward: d base_out is dy; ``scaling * dy`` is rounded once to that
    dtype and then takes the gradient orders of the two projections. Raises what ``projection`` and ``row_parallel``
    raise.
    """
    keys = as_logical_keys(logical_keys)
    check_operands("lora_linear", x, a, None)
    _check_out("lora_linear", x, base_out, a, b)
    return _expand(_shrink(x, a, style, provider, keys), base_out, b, scaling, style, provider, keys)


def lora_slices(
    x: Tensor,
    base_out: Tensor,
    slices: Sequence[LoraSlice],
    *,
    style: LoraStyle = ColumnStyle(),
    provider: str = "auto",
    logical_keys: Keys = None,
) -> Tensor:
    """``lora_linear`` on each slice of a fused linear's output; columns no slice covers are base_out's.

    The shrinking products of all slices run as one. y, dA and dB equal ``lora_linear`` on each slice alone; dX is one
    reduction over the ranks of all slices, where separate calls add rounded ones. Raises InputError if slices overlap
    or leave the output, and what ``lora_linear`` raises.
    """
    keys = as_logical_keys(logical_keys)
    ordered = sorted(slices, key=lambda s: s.start)
    _check_slices(ordered, base_out.shape[-1])
    if not ordered:
        return base_out
    for s in ordered:
        check_operands("lora_slices", x, s.a, None)
        _check_out("lora_slices", x, base_out[..., s.start : s.start + s.b.shape[0]], s.a, s.b)
    shrunk = _shrink(x, torch.cat([s.a for s in ordered]), style, provider, keys)
    pieces, at, column = [], 0, 0
    for s in ordered:
        stop = s.start + s.b.shape[0]
        h = shrunk[..., at : at + s.a.shape[0]]
        pieces += [base_out[..., column : s.start]] if column < s.start else []
        pieces.append(_expand(h, base_out[..., s.start : stop], s.b, s.scaling, style, provider, keys))
        at, column = at + s.a.shape[0], stop
    pieces += [base_out[..., column:]] if column < base_out.shape[-1] else []
    return torch.cat(pieces, dim=-1)


def _shrink(x: Tensor, a: Tensor, style: LoraStyle, provider: str, keys: LogicalKeys | None) -> Tensor:
    if isinstance(style, ColumnStyle):
        return projection(x, a, provider=provider, logical_keys=keys)
    return row_parallel(
        x,
        a,
        contract=style.contract,
        tp=style.tp,
        rank=style.rank,
        collective=style.collective,
        provider=provider,
        logical_keys=keys,
    )


def _expand(
    h: Tensor,
    base_out: Tensor,
    b: Tensor,
    scaling: float,
    style: LoraStyle,
    provider: str,
    keys: LogicalKeys | None,
) -> Tensor:
    """base_out + scaling * B h. B's rows are sharded for a column-parallel linear, so its dX is a unit tree."""
    column = isinstance(style, ColumnStyle)
    tp = style.tp if column else 1
    collective = name_of(style.collective) if column else ""
    if column:
        check_collective(style.collective, style.tp, style.rank, UNITS)
    units = input_grad_units(b.shape[0] * tp, 1) // tp
    if served(base_out, h, b, scaling):
        b = b if scaling == 1.0 else b * scaling
        return expand(base_out, h, b, None if keys is None else keys.order, units, provider, collective)
    call = ColumnCall(
        keys=keys,
        parts=[0],
        units=units,
        gather_rows=0,
        out_dtype=torch.float32,
        provider=provider,
        collective=collective,
    )
    return SCALED_ADD(base_out, apply_linear(call, h, b, None), float(scaling))


def _check_out(name: str, x: Tensor, base_out: Tensor, a: Tensor, b: Tensor) -> None:
    if b.dim() != 2 or b.shape[1] != a.shape[0] or b.dtype != x.dtype or b.device != x.device:
        raise InputError(
            f"{name}: a {list(a.shape)} and b {list(b.shape)} {b.dtype} on {b.device}; "
            f"expected [r, K] and [N, r], {x.dtype} on {x.device}"
        )
    expected = (*x.shape[:-1], b.shape[0])
    if tuple(base_out.shape) != expected or base_out.dtype != x.dtype or base_out.device != x.device:
        raise InputError(
            f"{name}: base_out {list(base_out.shape)} {base_out.dtype} on {base_out.device}; "
            f"expected {list(expected)} {x.dtype} on {x.device}"
        )


def _check_slices(ordered: Sequence[LoraSlice], columns: int) -> None:
    end = 0
    for s in ordered:
        stop = s.start + s.b.shape[0]
        if s.start < end or stop > columns:
            raise InputError(f"lora_slices: columns {s.start}..{stop} overlap a slice or leave 0..{columns}")
        end = stop
