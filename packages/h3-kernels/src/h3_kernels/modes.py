"""Modes: what an installed adapter does with a node. Needs no torch."""

import os
from enum import StrEnum

from h3_kernels.errors import ModeError

ENVIRONMENT_VARIABLE = "H3_MODE"


class Mode(StrEnum):
    """How a bound node computes its result."""

    OFF = "off"
    """The engine's own provider only."""
    STRICT = "strict"
    """The contract, or an error. Never a fallback."""
    AUDIT = "audit"
    """The engine's own result is returned; the contract is computed beside it and differences are recorded."""


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
