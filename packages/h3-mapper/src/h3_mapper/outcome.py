"""What a subcommand is and what it returns. Shared by all of them; imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from h3_mapper.stream import Progress

OK, DIFFERENT, BAD_INPUT = 0, 1, 2
"""Exit codes: fine; `verify` found a difference; bad input (nothing written)."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a handler found: an exit code, lines for people, an object for --json."""

    text: str
    data: dict[str, Any] = field(default_factory=dict)
    code: int = OK


def one_of(kind: type[StrEnum]) -> Callable[[str], StrEnum]:
    """An argparse type whose refusal names the values there are."""

    def parse(text: str) -> StrEnum:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(kind)}") from None

    return parse


Argument = tuple[tuple[str, ...], dict[str, Any]]
Handler = Callable[[argparse.Namespace, Progress | None], Outcome]


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand. arguments: (flags, keywords) for argparse."""

    name: str
    help: str
    run: Handler
    arguments: tuple[Argument, ...]


def argument(*flags: str, **keywords: Any) -> Argument:
    """One argument, written as argparse's add_argument takes it."""
    return flags, keywords
