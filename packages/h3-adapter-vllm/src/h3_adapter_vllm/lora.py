"""LoRA on bound linears: the terms vLLM-Omni's wrappers hold, and the seam that routes the wrappers to us.

A wrapper replaces the linear in the module tree, calls its quant method, and adds ``(x A^T) B^T`` for each active
slice with the platform's own matrix products; around a row-parallel linear those partial terms are summed by the
engine's all-reduce together with the base result. A bound row-parallel linear already returns the sum, so the terms
must be summed by themselves, in tree order. The seam therefore replaces the wrappers' class-level ``apply`` while any
model is bound, and looks at each call: wrappers around other linears, made before or after the install, are untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm_omni.diffusion.lora.layers import DiffusionBaseLinearLayerWithLoRA

Apply = Callable[[Any, Tensor, Tensor | None], Tensor]

ENGINE_APPLY: Apply = DiffusionBaseLinearLayerWithLoRA.apply


@dataclass(frozen=True, slots=True)
class LoraTerm:
    """One active slice: y[:, columns] += (x A^T) B^T. The engine multiplied the scale into B when it uploaded it.

    a is [r, K] (this rank's K range in a row-parallel linear), b [columns, r], both in the adapter's dtype; r is the
    engine's buffer rank, zero-padded above the adapter's.
    """

    columns: slice
    a: Tensor
    b: Tensor


def active_terms(wrapper: Any) -> Iterator[LoraTerm]:
    """The slices a wrapper would apply now, in output order; none while no adapter is set or it is suspended."""
    slices_a, slices_b = getattr(wrapper, "lora_a_stacked", ()), getattr(wrapper, "lora_b_stacked", ())
    active = getattr(wrapper, "_diffusion_lora_active_slices", (True,) * len(slices_a))
    start = 0
    for width, a, b, on in zip(wrapper.output_slices, slices_a, slices_b, active, strict=True):
        if on and a.numel() and b.numel():
            yield LoraTerm(slice(start, start + width), a[0, 0], b[0, 0])
        start += width


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
