"""The LoRA term's last step on CUDA as one op: base + B h without the fp32 term in memory.

The order is ``lora``'s: t = B h, one chain over the rank, stays fp32; y = base + t, one rounding. The fused kernel is
proved on the device, once per rank and output width, against the product and the addition apart. Backward: d base is
dy; dh and dB take the gradient orders of the projection.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from h3_kernels import autograd
from h3_kernels.backward_session import active_session
from h3_kernels.dispatch import define
from h3_kernels.providers import tree_gemm

_PROBE_ROWS = 321


def folded(scaling: float) -> bool:
    """Whether ``scaling`` is a power of two, so that B may carry it: no rounding of the term then changes."""
    return abs(math.frexp(scaling)[0]) == 0.5


def served(base: Tensor, h: Tensor, b: Tensor, scaling: float) -> bool:
    """Whether the fused op computes this term: CUDA, bf16 rows, its ranks, a folded scaling, no backward session."""
    if not base.is_cuda or base.dim() != 2 or not folded(scaling):
        return False
    if any(t.dtype != torch.bfloat16 or t.stride(1) != 1 for t in (base, h, b)):
        return False
    if torch.is_grad_enabled() and active_session() is not None:
        return False
    try:
        return _proved(base.shape[1], h.shape[1], base.device)
    except _CapturingError:
        return False


class _CapturingError(Exception):
    """Nothing can be proved while a graph is captured; an exception, so that no answer is remembered."""


def expand(base: Tensor, h: Tensor, b: Tensor, order: Tensor | None, units: int, provider: str,
           collective: str) -> Tensor:  # fmt: skip
    """y [T, N] = base [T, N] + h [T, r] b [N, r]^T. ``order``, ``units``, ``provider`` and ``collective`` are of the
    backward, as for ``column_parallel``."""
    return LORA_EXPAND(base, h, b, order, units, provider, collective)


@functools.lru_cache(maxsize=256)
def _proved(columns: int, rank: int, device: torch.device) -> bool:
    from h3_kernels.triton.lora import RANKS, lora_expand

    if rank not in RANKS:
        return False
    if torch.cuda.is_current_stream_capturing():
        raise _CapturingError
    generator = torch.Generator(device).manual_seed(columns)
    base, h, b = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        for shape in ((_PROBE_ROWS, columns), (_PROBE_ROWS, rank), (columns, rank))
    )
    h[:, rank // 2 :], b[:, rank // 2 :] = -h[:, : rank // 2], b[:, : rank // 2] * (1 + 2.0**-6)
    with torch.autocast("cuda", enabled=False):
        fused, separate = lora_expand(base, h, b), _apart(base, h, b, "auto")
        return torch.equal(fused.view(torch.int16), separate.view(torch.int16))


def _apart(base: Tensor, h: Tensor, b: Tensor, provider: str) -> Tensor:
    return (base.float() + tree_gemm(h, b, units=1, out_dtype=torch.float32, provider=provider)).to(
        base.dtype
    )


def _forward(base: Tensor, h: Tensor, b: Tensor, order: Tensor | None, units: int, provider: str,
             collective: str) -> Tensor:  # fmt: skip
    if not base.is_cuda:
        return _apart(base, h, b, provider)
    from h3_kernels.triton.lora import lora_expand

    return lora_expand(base, h, b)


def _fake(base: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(base, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, h, b, order, *ctx.settings = inputs
    ctx.save_for_backward(h, b, order)


def _backward(ctx: Any, dy: Tensor) -> autograd.Grads:
    h, b, order = ctx.saved_tensors
    units, provider, collective = ctx.settings
    need_base, need_h, need_b = ctx.needs_input_grad[:3]
    dh = autograd.INPUT_GRAD(dy, b, [0], units, False, provider, collective) if need_h else None
    db = autograd.WEIGHT_GRAD(dy, h, order, provider) if need_b else None
    return dy if need_base else None, dh, db, None, None, None, None


LORA_EXPAND = define(
    "lora_expand(Tensor base, Tensor h, Tensor b, Tensor? order, int units, str provider, str collective) -> Tensor",
    _forward,
    _fake,
    (_backward, _setup),
)
