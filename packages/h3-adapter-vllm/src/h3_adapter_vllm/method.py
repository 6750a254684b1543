"""The quant method that computes a contract in the engine's place.

vLLM's linears and its LoRA wrappers both compute by ``layer.quant_method.apply(layer, x, bias)``, so replacing that one
object binds a linear whether or not a wrapper is put around it later; patching ``forward`` would be bypassed there.

A row-parallel ``apply`` returns the finished sum over all ranks, so the layer's own all-reduce is switched off
(``reduce_results``) while it is bound.
"""

from __future__ import annotations

from typing import Any

import torch
from h3_kernels.audit import Auditor, sampled_rows
from h3_kernels.binding import Ran, Style
from h3_kernels.lora import lora_slices
from h3_kernels.modes import Mode, eager
from h3_kernels.projection import projection
from h3_kernels.row_parallel import row_parallel
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import LinearMethodBase

from h3_adapter_vllm.bindings import LinearRule
from h3_adapter_vllm.lora import ENGINE_APPLY, active_slices, lora_style
from h3_adapter_vllm.settings import Settings, plain


class ContractMethod(LinearMethodBase):  # type: ignore[misc]  # vLLM has no type stubs
    """Computes ``rule``'s contract for one linear; hands everything else to the engine's method it replaces."""

    def __init__(self, rule: LinearRule, provided: LinearMethodBase, settings: Settings) -> None:
        self.rule = rule
        self.provided = provided
        self.settings = settings
        self.auditor = Auditor() if settings.mode is Mode.AUDIT else None
        self.ran: Ran | None = None
        self._inside_lora = False
        self._unprocessed = False
        self.supports_pre_processed_weights = provided.supports_pre_processed_weights

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        """The engine's own."""
        self.provided.create_weights(*args, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """The engine's own; on a CPU only once :meth:`detach` is called, because it packs the weights away there."""
        if layer.weight.device.type == "cpu":
            layer.cpu_linear = torch.nn.functional.linear
            self._unprocessed = True
        else:
            self.provided.process_weights_after_loading(layer)

    def detach(self, layer: Any) -> None:
        """Give ``layer`` its own method back, and do what was put off for it."""
        layer.quant_method = self.provided
        if self._unprocessed:
            self.provided.process_weights_after_loading(layer)

    def __getattr__(self, name: str) -> Any:
        if name == "provided":  # not set yet: copying or unpickling
            raise AttributeError(name)
        return getattr(self.provided, name)

    @eager  # the ops are opaque to the compiler anyway; traced, `ran` would be written only once
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """y [..., N] of x [..., K], a new tensor summed over ranks: the contract's (strict) or the engine's (audit)."""
        self._stamp(x)
        if self.settings.mode is Mode.STRICT:
            return self._contract(layer, x)
        partial = self.provided.apply(layer, x, bias)
        y = self._reduce(partial.clone() if self._inside_lora else partial)  # the engine may reduce in place
        self._compare(layer, x, y)
        return partial if self._inside_lora else y

    @eager
    def apply_with_lora(self, wrapper: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """As :meth:`apply` for a LoRA wrapper around the layer, with the wrapper's active terms added."""
        if self.settings.mode is Mode.STRICT:
            y = self.apply(wrapper.base_layer, x, bias)
            return lora_slices(
                x,
                y,
                active_slices(wrapper),
                style=lora_style(self.rule, self.settings),
                provider=self.settings.provider,
            )
        self._inside_lora = True
        try:
            return self._reduce(ENGINE_APPLY(wrapper, x, bias))
        finally:
            self._inside_lora = False

    def _contract(self, layer: Any, x: Tensor) -> Tensor:
        s, bias = self.settings, None if layer.skip_bias_add else layer.bias
        weight = plain(layer.weight)
        if self.rule.style is Style.COLUMN:
            return projection(x, weight, bias, provider=s.provider)
        return row_parallel(
            x,
            weight,
            bias,
            contract=s.contract,
            tp=s.tp,
            rank=s.rank,
            collective=s.collective,
            provider=s.provider,
        )

    def _reduce(self, partial: Tensor) -> Tensor:
        """The engine's own sum over ranks, which its layer no longer does."""
        if self.rule.style is Style.COLUMN or self.settings.tp == 1:
            return partial
        total: Tensor = tensor_model_parallel_all_reduce(partial)
        return total

    def _stamp(self, x: Tensor) -> None:
        rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
        self.ran = Ran(self.settings.clock.forwards, rows, x.device, x.stride(-1) == 1)

    def _compare(self, layer: Any, x: Tensor, y: Tensor) -> None:
        assert self.auditor is not None
        x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        rows = sampled_rows(x)
        self.auditor.compare(y[rows], self._contract(layer, x[rows]), rows)
