"""Errors of h3-adapter-vllm. Each message says what is wrong, where, what was expected and what to do."""

from h3_kernels.errors import BoundModelError, H3AdapterError, InstallError, RemoveError

__all__ = ["BoundModelError", "H3AdapterError", "InstallError", "RemoveError", "WeightsError"]


class WeightsError(H3AdapterError, ValueError):
    """A weight source does not cover the model exactly, or a tensor has the wrong shape or dtype."""
