"""Errors of h3-adapter-vllm. Each message says what is wrong, where, what was expected and what to do."""

from collections.abc import Sequence


class H3AdapterError(Exception):
    """Base class of every error this package raises on purpose."""


class InstallError(H3AdapterError, ValueError):
    """The contracts cannot be put behind this model; nothing was changed.

    Attributes:
        reasons: One line per obstacle, in module order.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        shown = [*self.reasons[:8], f"and {len(reasons) - 8} more"] if len(reasons) > 8 else self.reasons
        super().__init__("cannot install the h3 contracts: " + "; ".join(shown))


class RemoveError(H3AdapterError, RuntimeError):
    """Somebody else changed a bound linear after the install; everything still ours was restored."""


class BoundModelError(H3AdapterError, RuntimeError):
    """A bound model was called in a way its binding cannot serve; nothing was computed."""


class WeightsError(H3AdapterError, ValueError):
    """A weight source does not cover the model exactly, or a tensor has the wrong shape or dtype."""
