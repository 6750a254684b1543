"""Errors of h3-adapter-diffusers. Each message says what is wrong, where, what was expected and what to
do."""

from h3_kernels.errors import BoundModelError, H3AdapterError, InstallError, RemoveError

__all__ = ["BoundModelError", "H3AdapterError", "InputError", "InstallError", "RemoveError", "ReplayError"]


class InputError(H3AdapterError, ValueError):
    """An argument of the transition does not fit: shape, dtype, range, or a combination that means
    nothing."""


class ReplayError(H3AdapterError, ValueError):
    """A rollout's record is incomplete, inconsistent, or does not describe the sequence it came with."""
