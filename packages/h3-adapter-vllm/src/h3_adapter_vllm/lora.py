"""LoRA on bound linears: the terms vLLM-Omni's wrappers hold, and the seam that routes the wrappers to us.

A wrapper replaces the linear in the module tree, calls its quant method, and adds ``(x A^T) B^T`` for each active
slice with the platform's own matrix products; around a row-parallel linear those partial terms are summed by the
engine's all-reduce together with the base result. A bound row-parallel linear already returns the sum, so the terms
must be summed by themselves, in tree order. The seam therefore replaces the wrappers' class-level ``apply`` while any
model is bound, and looks at each call: wrappers around other linears, made before or after the install, are untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from h3_kernels.binding import Style
from h3_kernels.lora import ColumnStyle, LoraSlice, LoraStyle, RowStyle
from torch import Tensor
from vllm_omni.diffusion.lora.layers import DiffusionBaseLinearLayerWithLoRA

from h3_adapter_vllm.bindings import LinearRule
from h3_adapter_vllm.errors import BoundModelError
from h3_adapter_vllm.settings import Settings

Apply = Callable[[Any, Tensor, Tensor | None], Tensor]

ENGINE_APPLY: Apply = DiffusionBaseLinearLayerWithLoRA.apply


def active_slices(wrapper: Any) -> list[LoraSlice]:
    """The slices a wrapper would apply now, in output order; none while no adapter is set or it is suspended.

    a is [r, K] (this rank's K range in a row-parallel linear), b [columns, r]; r is the engine's buffer rank, padded
    with zeros above the adapter's. The engine multiplies the scale into b when it uploads an adapter, so ``scaling``
    is 1; that equals PEFT's own scaling bit for bit when the scale is a power of two.

    Raises BoundModelError for a fully sharded adapter at tp > 1.
    """
    if wrapper.lora_config.fully_sharded_loras and wrapper.tp_size > 1:
        raise BoundModelError(
            f"{wrapper.base_layer.prefix}: fully sharded LoRA at tp > 1; vLLM-Omni does not run it either"
        )
    slices_a, slices_b = getattr(wrapper, "lora_a_stacked", ()), getattr(wrapper, "lora_b_stacked", ())
    active = getattr(wrapper, "_diffusion_lora_active_slices", (True,) * len(slices_a))
    found, start = [], 0
    for width, a, b, on in zip(wrapper.output_slices, slices_a, slices_b, active, strict=True):
        if on and a.numel() and b.numel():
            found.append(LoraSlice(a[0, 0], b[0, 0], start, scaling=1.0))
        start += width
    return found


def lora_style(rule: LinearRule, settings: Settings) -> LoraStyle:
    """How the term of a linear of ``rule`` is sharded and summed."""
    s = settings
    if rule.style is Style.COLUMN:
        return ColumnStyle(s.tp, s.rank, s.collective)
    return RowStyle(s.contract, s.tp, s.rank, s.collective)


class Seam:
    """The class-level ``apply`` of vLLM-Omni's LoRA wrappers, replaced while it has holders."""

    def __init__(self) -> None:
        self._holders = 0

    def acquire(self) -> None:
        """Put the replacement in place."""
        self._holders += 1
        DiffusionBaseLinearLayerWithLoRA.apply = _routed

    def release(self) -> None:
        """Restore the engine's own with the last holder."""
        self._holders -= 1
        if self._holders == 0 and DiffusionBaseLinearLayerWithLoRA.apply is _routed:
            DiffusionBaseLinearLayerWithLoRA.apply = ENGINE_APPLY


SEAM = Seam()


def _routed(wrapper: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    bound = getattr(wrapper.base_layer.quant_method, "apply_with_lora", None)
    output: Tensor = ENGINE_APPLY(wrapper, x, bias) if bound is None else bound(wrapper, x, bias)
    return output
