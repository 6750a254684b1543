"""Modes and scopes: what an installed adapter does, and with how much of a model. Importing it imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NoReturn, ParamSpec, TypeVar

from h3_kernels.errors import ModeError

if TYPE_CHECKING:
    import torch

    from h3_kernels.collectives import Collective

P = ParamSpec("P")
R = TypeVar("R")

ENVIRONMENT_VARIABLE = "H3_MODE"


class Mode(StrEnum):
    """How a bound node computes its result."""

    OFF = "off"
    """The engine's own provider only."""
    STRICT = "strict"
    """The contract, or an error. Never a fallback."""
    AUDIT = "audit"
    """The engine's own result is returned; the contract is computed beside it and differences are recorded."""


class Scope(StrEnum):
    """How much of a model is bound; each contains the one before. Trainer and rollout must be bound to the same."""

    LINEARS = "linears"
    """The linears of attention and feed-forward of every block."""
    PROJECTIONS = "projections"
    """Every linear: also the patch, text, time, AdaLN and output projections."""
    MODEL = "model"
    """Every node: ``h3_kernels.graph`` runs in the place of the engine's forward."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ValueError(f"{value!r} is not a scope; expected {', '.join(cls)}")


DEFAULT_SCOPE = Scope.MODEL
"""Of both adapters: the only scope in which two engines with the same weights give the same velocities anywhere."""


@dataclass(slots=True)
class Clock:
    """Forwards of a model since its install; bound linears stamp it when they run."""

    forwards: int = 0
    inside: int = 0
    """Forwards that have begun and not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallSettings:
    """How everything bound in one model computes."""

    mode: Mode
    scope: Scope
    contract: str
    """Row-parallel contract id."""
    provider: str
    """Of the linears."""
    attention: str
    """Of the attention forward, in scope ``model``."""
    tp: int
    rank: int
    collective: Collective | None
    clock: Clock = field(default_factory=Clock)

    def describe(self) -> str:
        """One line: what every rank of the group must state, and the other engine too, but for tp and collective."""
        parts = [f"mode {self.mode}", f"scope {self.scope}", self.contract, f"provider {self.provider}"]
        parts += [f"attention {self.attention}"] if self.scope is Scope.MODEL else []
        parts.append(f"tp={self.tp}")
        if self.collective is not None:
            form = getattr(self.collective, "form", "")
            parts.append(f"{form} {type(self.collective).__name__}".lstrip())
        return ", ".join(parts)

    def obstacles(self) -> list[str]:
        """Names that no model could be installed with, one line each; empty if there is none."""
        from h3_kernels.attention_providers import registered
        from h3_kernels.contract import parse_parallel_id

        reasons = []
        try:
            parse_parallel_id(self.contract)
        except ValueError as error:
            reasons.append(str(error))
        known = ("auto", *(provider.name for provider in registered()))
        if self.attention not in known:
            reasons.append(f"no attention provider is named {self.attention!r}; known: {', '.join(known)}")
        return reasons

    def title(self, what: str) -> str:
        """First line of a report on ``what``."""
        rank = f", rank {self.rank}" if self.tp > 1 else ""
        return f"h3 {what}, {self.describe()}{rank}, {self.clock.forwards} forwards"


def eager(method: Callable[P, R]) -> Callable[P, R]:
    """Keep ``method`` out of torch.compile graphs, with its signature. Imports torch."""
    import torch

    kept: Callable[P, R] = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
    return kept


def capturing(device: torch.device) -> bool:
    """Whether the current stream of ``device`` is being captured into a graph, so nothing may be read back. Imports
    torch."""
    import torch

    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def resolve_mode(argument: Mode | str | None = None) -> Mode:
    """Mode to use: the argument if given, else the environment variable ``H3_MODE``, else strict.

    Raises ModeError for any other word, saying where the word came from.
    """
    word, origin = argument, "argument"
    if word is None:
        word, origin = os.environ.get(ENVIRONMENT_VARIABLE) or Mode.STRICT, ENVIRONMENT_VARIABLE
    try:
        return Mode(word)
    except ValueError:
        raise ModeError(f"{origin} mode {word!r} is not one of {', '.join(Mode)}") from None
