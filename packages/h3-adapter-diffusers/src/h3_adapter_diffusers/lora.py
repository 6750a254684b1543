"""LoRA on bound linears: the terms PEFT's wrappers hold, and the callable that replaces a wrapper's
`forward`.

PEFT computes `base + scaling * B(A(dropout(x)))` with whatever kernels torch picks. The strict term
(`h3_kernels.lora`) is the rollout's as well. A and B are taken in the dtype of the activation: fp32 masters
are rounded here, as the weight sync rounds them. The rollout engine multiplies the scale into B when it
uploads an adapter; a scale that is a power of two commutes with every rounding, any other is multiplied into
B here too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from h3_kernels.backward_session import active_session
from h3_kernels.binding import Style
from h3_kernels.logical_keys import LogicalKeys
from h3_kernels.lora import ColumnStyle, RowStyle, lora_linear
from h3_kernels.modes import eager
from torch import Tensor, nn

from h3_adapter_diffusers.bindings import LinearRule
from h3_adapter_diffusers.errors import BoundModelError
from h3_adapter_diffusers.settings import Settings


@dataclass(frozen=True, slots=True)
class LoraTerm:
    """`scaling * (x a^T) b^T`: a [r, K], b [N, r] (this rank's shards), in the activation's dtype."""

    a: Tensor
    b: Tensor
    scaling: float


def is_wrapper(module: nn.Module | None) -> bool:
    """Whether `module` is a PEFT layer around a base layer."""
    return "base_layer" in getattr(module, "_modules", ()) and hasattr(module, "get_base_layer")


def base_of(module: nn.Module | None) -> Any:
    """The linear itself, whatever wraps it."""
    linear: Any = module
    while is_wrapper(linear):
        linear = linear.base_layer
    return linear


def wrapper_obstacle(wrapper: Any) -> str | None:
    """Why the strict term does not cover this PEFT wrapper, or None if it does."""
    modules = wrapper._modules  # asked once a linear and forward, so not by nn.Module's own slower search
    if "lora_A" not in modules or "lora_B" not in modules:
        return f"adapter type {type(wrapper).__module__.split('.')[-2]} has no contract; only LoRA has"
    if is_wrapper(modules["base_layer"]):
        return "wrapped twice; put both adapters into one wrapper with add_adapter"
    for name in wrapper.active_adapters:
        if name not in modules["lora_A"]._modules:
            continue
        if getattr(wrapper, "lora_variant", {}).get(name) or getattr(wrapper, "use_dora", {}).get(name):
            return f"adapter {name!r} is a LoRA variant (DoRA or other), which the rollout engine does not compute"
        if getattr(wrapper, "lora_bias", {}).get(name):
            return f"adapter {name!r} has a LoRA bias, which the rollout engine does not compute"
        if wrapper.training and getattr(modules["lora_dropout"][name], "p", 0.0) > 0.0:
            return f"adapter {name!r} uses dropout, which the rollout engine does not: set lora_dropout=0 or eval()"
    return None


def settle(wrapper: Any) -> None:
    """Take merged terms off a disabled wrapper's weight, as PEFT does at the call."""
    if wrapper.disable_adapters and wrapper.merged:
        wrapper.unmerge()


def active_terms(name: str, wrapper: Any, dtype: torch.dtype) -> Iterator[LoraTerm]:
    """The terms a wrapper adds now, in PEFT's order; none while adapters are disabled or merged.

    Raises BoundModelError for a wrapper the strict term does not cover.
    """
    settle(wrapper)
    if wrapper.disable_adapters or wrapper.merged:
        return
    reason = wrapper_obstacle(wrapper)
    if reason is not None:
        raise BoundModelError(f"{name}: {reason}")
    for adapter in wrapper.active_adapters:
        if adapter in wrapper.lora_A:
            a, b = (side[adapter].weight for side in (wrapper.lora_A, wrapper.lora_B))
            scaling = float(wrapper.scaling[adapter])
            exact = abs(math.frexp(scaling)[0]) == 0.5
            b = _computed(b, dtype, 1.0 if exact else scaling)
            yield LoraTerm(_computed(a, dtype, 1.0), b, scaling if exact else 1.0)


def _computed(weight: Tensor, dtype: torch.dtype, scaling: float) -> Tensor:
    """`weight` rounded to `dtype`, then scaled there; in a backward session a leaf that stands for it."""
    if weight.dtype == dtype and scaling == 1.0:
        return weight

    def make(source: Tensor) -> Tensor:
        rounded = source.to(dtype)
        return rounded if scaling == 1.0 else rounded * scaling

    session = active_session() if torch.is_grad_enabled() else None
    return make(weight) if session is None else session.derived(weight, make, f"{dtype} times {scaling}")


def peft_terms(wrapper: Any, y: Tensor, x: Tensor) -> Tensor:
    """`y` plus the terms the wrapper adds now, as PEFT's own forward computes them; nothing is changed."""
    if wrapper.disable_adapters or wrapper.merged:
        return y
    result = y
    for adapter in wrapper.active_adapters:
        if adapter in wrapper.lora_A:
            a, b, dropout = (side[adapter] for side in (wrapper.lora_A, wrapper.lora_B, wrapper.lora_dropout))
            result = result + b(a(dropout(x.to(a.weight.dtype)))) * wrapper.scaling[adapter]
    return result.to(y.dtype)


def add_term(
    y: Tensor, x: Tensor, term: LoraTerm, rule: LinearRule, s: Settings, keys: LogicalKeys | None
) -> Tensor:
    """`y` [..., N] plus the strict term of `x` [..., K]."""
    tp, rank, collective = (1, 0, None) if rule.boundary else (s.tp, s.rank, s.collective)
    style = (
        RowStyle(s.contract, tp, rank, collective)
        if rule.style is Style.ROW
        else ColumnStyle(tp, rank, collective)
    )
    return lora_linear(
        x, y, term.a, term.b, term.scaling, style=style, provider=s.provider, logical_keys=keys
    )


class ContractLora:
    """Computes a PEFT LoRA wrapper around a bound linear: the base contract, then each active adapter's
    term."""

    def __init__(self, name: str, rule: LinearRule, wrapper: nn.Module, settings: Settings) -> None:
        self.name = name
        self.rule = rule
        self.wrapper: Any = wrapper
        self.settings = settings

    @eager
    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """y [..., N] of x [..., K]. PEFT's per-sample `adapter_names` are refused: a batch has one
        adapter."""
        if args or kwargs:
            raise BoundModelError(f"{self.name}: strict LoRA takes x alone, got {[*args, *kwargs]}")
        terms = list(active_terms(self.name, self.wrapper, x.dtype))
        y: Tensor = self.wrapper.base_layer(x)
        keys = self.settings.ring.keys.get(self.rule.rows)
        for term in terms:
            y = add_term(y, x, term, self.rule, self.settings, keys)
        return y
