"""The callable that computes a contract in the place of a linear's `forward`.

It is set on the instance, so the class, the parameters and their names stay Diffusers' own: checkpoints,
FSDP2, PEFT and gradient checkpointing see the modules they know. A PEFT wrapper calls its base layer, so it
composes; a hook installed later wraps this callable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from h3_kernels.audit import Auditor, sampled_rows
from h3_kernels.collectives import Collective
from h3_kernels.logical_keys import LogicalKeys
from h3_kernels.modes import Mode
from h3_kernels.projection import projection
from h3_kernels.row_parallel import row_parallel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from h3_adapter_diffusers.bindings import LinearRule, Scope, Style
from h3_adapter_diffusers.errors import BoundModelError


@dataclass(slots=True)
class Clock:
    """Forwards of the model since the install; linears stamp it when they run."""

    forwards: int = 0
    inside: int = 0
    """Forwards of the model that have begun and not ended."""


@dataclass(slots=True)
class KeyRing:
    """The logical keys in force, by row set; empty when rows are taken in the order given."""

    keys: Mapping[str, LogicalKeys] = field(default_factory=dict)
    depth: int = 0
    """Blocks of `using` that are open."""
    used: bool = False
    """Whether any forward had keys."""

    @contextmanager
    def using(self, keys: Mapping[str, LogicalKeys]) -> Iterator[None]:
        """Put `keys` in force for the duration of the block."""
        before, self.keys = self.keys, keys
        self.depth += 1
        self.used = self.used or bool(keys)
        try:
            yield
        finally:
            self.keys = before
            self.depth -= 1


@dataclass(frozen=True, slots=True)
class Settings:
    """What all bound linears of a model share."""

    mode: Mode
    contract: str
    """Row-parallel contract id."""
    tp: int
    rank: int
    collective: Collective | None
    provider: str
    attention: str
    """Provider of the attention forward, in scope `model`."""
    scope: Scope
    clock: Clock
    ring: KeyRing

    def describe(self) -> str:
        """The arguments of the install, for messages."""
        return (
            f"mode={self.mode}, scope={self.scope}, contract={self.contract}, tp={self.tp},"
            f" provider={self.provider}, attention={self.attention}"
        )


@dataclass(frozen=True, slots=True)
class Ran:
    """The last call of a bound linear, as read back by the report."""

    forward: int
    rows: int
    device: torch.device
    k_contiguous: bool


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

    # The ops are opaque to the compiler anyway; traced, `ran` would be written only once.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
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
