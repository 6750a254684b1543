"""The h3 contracts behind a vLLM-Omni MiniMax-H3.

Importing this package imports no engine; the names below do, on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from h3_adapter_vllm.errors import (
        BoundModelError,
        H3AdapterError,
        InstallError,
        RemoveError,
        WeightsError,
    )
    from h3_adapter_vllm.install import Handle, handle_of, install_h3_rollout
    from h3_adapter_vllm.weights import load_h3_weights

_HOME = {
    "BoundModelError": "errors",
    "H3AdapterError": "errors",
    "Handle": "install",
    "InstallError": "errors",
    "RemoveError": "errors",
    "WeightsError": "errors",
    "handle_of": "install",
    "install_h3_rollout": "install",
    "load_h3_weights": "weights",
}

__all__ = [
    "BoundModelError",
    "H3AdapterError",
    "Handle",
    "InstallError",
    "RemoveError",
    "WeightsError",
    "handle_of",
    "install_h3_rollout",
    "load_h3_weights",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
