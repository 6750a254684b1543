"""Errors of h3-adapter-diffusers. Each message says what is wrong, where, what was expected and what to
do."""

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
    """An installed model was changed, or called, in a way the contracts do not cover."""


class InputError(H3AdapterError, ValueError):
    """An argument of the transition does not fit: shape, dtype, range, or a combination that means
    nothing."""


class ReplayError(H3AdapterError, ValueError):
    """A rollout's record is incomplete, inconsistent, or does not describe the sequence it came with."""
