"""LoRA on bound linears: the strict term, and the callable that replaces a PEFT wrapper's `forward`.

PEFT computes `base + scaling * B(A(dropout(x)))` with whatever kernels torch picks. The rollout engine
multiplies the scale into B once, when it uploads the adapter, and adds `B(A(x))` rounded to the activation's
dtype. The strict term is the rollout's: A and B are taken in the dtype of the activation (fp32 masters are
rounded here, as the weight sync rounds them), B is scaled first, and both products are contract linears, so
trainer and rollout add the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from h3_kernels.projection import projection
from torch import Tensor, nn

from h3_adapter_diffusers.bindings import LinearRule, Style
from h3_adapter_diffusers.errors import BoundModelError
from h3_adapter_diffusers.method import Settings, contract_linear


def is_wrapper(module: nn.Module) -> bool:
    """Whether `module` is a PEFT layer around a base layer."""
    return hasattr(module, "base_layer") and hasattr(module, "get_base_layer")


def wrapper_obstacle(wrapper: Any) -> str | None:
    """Why the strict term does not cover this PEFT wrapper, or None if it does."""
    if not hasattr(wrapper, "lora_A") or not hasattr(wrapper, "lora_B"):
        return f"adapter type {type(wrapper).__module__.split('.')[-2]} has no contract; only LoRA has"
    for name in wrapper.active_adapters:
        if name not in wrapper.lora_A:
            continue
        variant = getattr(wrapper, "lora_variant", {}).get(name)
        if variant is not None or getattr(wrapper, "use_dora", {}).get(name):
            return f"adapter {name!r} is a LoRA variant (DoRA or other), which the rollout engine does not compute"
        if getattr(wrapper, "lora_bias", {}).get(name):
            return f"adapter {name!r} has a LoRA bias, which the rollout engine does not compute"
        if wrapper.training and getattr(wrapper.lora_dropout[name], "p", 0.0) > 0.0:
            return f"adapter {name!r} uses dropout, which the rollout engine does not: set lora_dropout=0 or eval()"
    return None


class ContractLora:
    """Computes a PEFT LoRA wrapper around a bound linear: the base contract, then each active adapter's
    term."""

    def __init__(self, name: str, rule: LinearRule, wrapper: nn.Module, settings: Settings) -> None:
        self.name = name
        self.rule = rule
        self.wrapper: Any = wrapper
        self.settings = settings

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """y [..., N] of x [..., K]. PEFT's per-sample `adapter_names` are refused: a batch has one
        adapter."""
        wrapper = self.wrapper
        if args or kwargs:
            raise BoundModelError(f"{self.name}: strict LoRA takes x alone, got {[*args, *kwargs]}")
        if wrapper.disable_adapters and wrapper.merged:
            wrapper.unmerge()
        y: Tensor = wrapper.base_layer(x)
        if wrapper.disable_adapters or wrapper.merged:
            return y
        reason = wrapper_obstacle(wrapper)
        if reason is not None:
            raise BoundModelError(f"{self.name}: {reason}")
        for adapter in wrapper.active_adapters:
            if adapter in wrapper.lora_A:
                y = y + self._term(x, adapter)
        return y

    def _term(self, x: Tensor, adapter: str) -> Tensor:
        a = self.wrapper.lora_A[adapter].weight.to(x.dtype)
        b = self.wrapper.lora_B[adapter].weight.to(x.dtype) * self.wrapper.scaling[adapter]
        return lora_term(self.rule, self.settings, x, a, b)


def lora_term(rule: LinearRule, s: Settings, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`(x a^T) b^T` [..., N] of x [..., K], a [r, K], b [N, r] with the scale already in it; all one dtype.

    Around a column-parallel linear, a is whole and b this rank's rows; around a row-parallel one, a is this
    rank's K range and b whole. The shrunk activation is rounded to the dtype between the products.
    """
    keys = s.ring.keys.get(rule.rows)
    if rule.style is Style.ROW:
        shrunk = contract_linear(replace(rule, parts=(0,)), s, x, a, None)
        return projection(shrunk, b, provider=s.provider, logical_keys=keys)
    shrunk = projection(x, a, provider=s.provider, logical_keys=keys)
    return contract_linear(rule, s, shrunk, b, None)
