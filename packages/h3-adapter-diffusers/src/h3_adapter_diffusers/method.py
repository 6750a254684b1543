"""The callable that computes a contract in the place of a linear's `forward`.

It is set on the instance, so the class, the parameters and their names stay Diffusers' own: checkpoints,
FSDP2, PEFT and gradient checkpointing see the modules they know. A PEFT wrapper calls its base layer, so it
composes; a hook installed later wraps this callable.
"""

from __future__ import annotations

from typing import Any

import torch
from h3_kernels.audit import Auditor, sampled_rows
from h3_kernels.binding import Ran, Style
from h3_kernels.modes import Mode, eager
from h3_kernels.projection import projection
from h3_kernels.row_parallel import row_parallel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from h3_adapter_diffusers.bindings import LinearRule
from h3_adapter_diffusers.errors import BoundModelError
from h3_adapter_diffusers.settings import Settings


class ContractForward:
    """Computes `rule`'s contract for one linear."""

    def __init__(self, name: str, rule: LinearRule, linear: nn.Module, settings: Settings) -> None:
        self.name = name
        self.rule = rule
        self.linear: Any = linear
        self.settings = settings
        self.dtype: Any = self.linear.weight.dtype
        self.auditor = Auditor() if settings.mode is Mode.AUDIT else None
        self.ran: Ran | None = None

    @eager  # the ops are opaque to the compiler anyway; traced, `ran` would be written only once
    def __call__(self, x: Tensor) -> Tensor:
        """y [..., N] of x [..., K]: the contract's (strict) or Diffusers' (audit)."""
        weight, bias = self._parameters()
        self._refuse_lost_keys()
        rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
        self.ran = Ran(self.settings.clock.forwards, rows, x.device, x.stride(-1) == 1)
        if self.auditor is None:
            return contract_linear(self.rule, self.settings, x, weight, bias)
        y = linear(x, weight, bias)
        self._compare(x, y, weight, bias)
        return y

    def _parameters(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = self.linear.weight, self.linear.bias
        if isinstance(weight, DTensor):
            raise BoundModelError(
                f"{self.name}: weight is a sharded DTensor at the call; FSDP2 gathers it only when the module"
                " it was applied to is called (call the model, not a submodule)"
            )
        if weight.dtype != self.dtype:
            raise BoundModelError(cast_message(self.name, weight.dtype, self.dtype))
        return weight, bias

    def _refuse_lost_keys(self) -> None:
        """Recomputation by a checkpoint we did not wrap has no keys, and its gradients another order."""
        s = self.settings
        if s.ring.used and not s.ring.depth and not s.clock.inside and torch.is_grad_enabled():
            raise BoundModelError(
                f"{self.name}: called outside its model's forward, so the logical keys of its rows are lost; checkpoint"
                " by model.enable_gradient_checkpointing(), whose recomputation keeps them"
            )

    def _compare(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        assert self.auditor is not None
        with torch.no_grad():
            x, y = x.detach().reshape(-1, x.shape[-1]), y.detach().reshape(-1, y.shape[-1])
            rows = sampled_rows(x)
            with self.settings.ring.using({}):
                self.auditor.compare(
                    y[rows], contract_linear(self.rule, self.settings, x[rows], weight, bias), rows
                )


def cast_message(name: str, now: torch.dtype, before: torch.dtype | None) -> str:
    """What to say of a parameter whose dtype changed under an installed model."""
    return (
        f"{name}: weight is {now}, was {before} at install; an FSDP2 param_dtype policy or a .to() changed it, and with"
        " it the bits: leave mixed precision to the checkpoint"
    )


def contract_linear(rule: LinearRule, s: Settings, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x` [..., K] through `weight` [N, K] (this rank's shard) by the contract `rule` names."""
    keys = s.ring.keys.get(rule.rows)
    tp, rank, collective = (1, 0, None) if rule.boundary else (s.tp, s.rank, s.collective)
    if rule.style is Style.ROW:
        return row_parallel(
            x,
            weight,
            bias,
            contract=s.contract,
            tp=tp,
            rank=rank,
            collective=collective,
            provider=s.provider,
            logical_keys=keys,
        )
    return projection(
        x,
        weight,
        bias,
        provider=s.provider,
        logical_keys=keys,
        parts=rule.parts,
        tp=tp,
        rank=rank,
        collective=collective,
    )
