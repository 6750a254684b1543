"""Errors of h3-kernels, and those both adapters raise. Each message is one line: what is wrong, where, what was
expected, what to do."""

from collections.abc import Sequence


class H3KernelsError(Exception):
    """Base class of every error this package raises on purpose."""


class ContractError(H3KernelsError, ValueError):
    """An unknown contract id, or a shape, unit count or tensor-parallel degree the contract does not cover."""


class InputError(H3KernelsError, ValueError):
    """A tensor on the wrong device, of the wrong dtype, or of the wrong shape."""


class ProviderError(H3KernelsError, RuntimeError):
    """No provider may serve a call; the message lists every candidate and why it was refused."""


class CollectiveError(H3KernelsError, RuntimeError):
    """A collective that is missing, or does not match the tensor-parallel degree and rank stated."""


class LogicalKeysError(H3KernelsError, ValueError):
    """Logical keys of the wrong shape or dtype, or an active key that occurs twice."""


class SessionError(H3KernelsError, RuntimeError):
    """A backward session that is nested, incomplete, already finished, or met by a call it cannot record."""


class CaptureError(H3KernelsError, RuntimeError):
    """A training step that cannot be captured in CUDA graphs, or a backward whose replay would read something else."""


class ModeError(H3KernelsError, ValueError):
    """A mode that is not one of off, strict and audit."""


class H3AdapterError(Exception):
    """Base class of every error an adapter raises on purpose."""


class InstallError(H3AdapterError, ValueError):
    """The contracts cannot be put behind this model; nothing was changed.

    Attributes:
        reasons: One line per obstacle, in module order.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        shown = _grouped(self.reasons)
        more = [f"and {len(shown) - 8} more"] if len(shown) > 8 else []
        super().__init__("cannot install the h3 contracts: " + "; ".join([*shown[:8], *more]))


def _grouped(reasons: Sequence[str]) -> list[str]:
    """Lines ``module: reason``, the modules of one reason together: ``a, b, c and 7 more: reason``."""
    modules: dict[str, list[str]] = {}
    for line in reasons:
        module, _, reason = line.partition(": ")
        if not reason or " " in module:
            module, reason = "", line
        modules.setdefault(reason, []).append(module)
    return [f"{listed(names)}: {reason}" if names[0] else reason for reason, names in modules.items()]


def listed(names: Sequence[str], limit: int = 4) -> str:
    """Names for a message, cut after ``limit``: ``a, b and 7 more``."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


class RemoveError(H3AdapterError, RuntimeError):
    """Something else was put over what an install had bound; everything still ours was restored."""


class BoundModelError(H3AdapterError, RuntimeError):
    """An installed model was changed, or called, in a way its binding does not cover; nothing was computed."""
