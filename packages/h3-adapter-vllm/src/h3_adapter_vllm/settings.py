"""What the parts of one install share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
from h3_kernels.collectives import Collective
from h3_kernels.modes import Mode
from torch import Tensor

from h3_adapter_vllm.bindings import Scope

P = ParamSpec("P")
R = TypeVar("R")


def eager(method: Callable[P, R]) -> Callable[P, R]:
    """Keep ``method`` out of torch.compile graphs, with its signature."""
    kept: Callable[P, R] = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
    return kept


def plain(parameter: Tensor) -> Tensor:
    """The same tensor without vLLM's parameter class.

    That class intercepts every attribute that is read: a contract call on it took 54 us of host time instead of 28.
    """
    return parameter.as_subclass(Tensor)


@dataclass(slots=True)
class Clock:
    """Forwards of the model since the install; linears stamp it when they run."""

    forwards: int = 0


@dataclass(frozen=True, slots=True)
class Settings:
    """How everything bound in one model computes."""

    mode: Mode
    contract: str
    """Row-parallel contract id."""
    tp: int
    rank: int
    collective: Collective | None
    provider: str
    scope: Scope
    clock: Clock

    def describe(self) -> str:
        """One line."""
        text = f"mode {self.mode}, scope {self.scope}, {self.contract}, tp={self.tp} rank {self.rank}"
        if self.collective is None:
            return text
        form = getattr(self.collective, "form", "")
        return f"{text}, {form} {type(self.collective).__name__}".replace(",  ", ", ")


@dataclass(frozen=True, slots=True)
class Ran:
    """The last call of a bound linear, as read back by the report."""

    forward: int
    rows: int
    device: torch.device
    k_contiguous: bool
