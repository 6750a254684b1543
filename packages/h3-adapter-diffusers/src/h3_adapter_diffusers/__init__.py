"""The h3 contracts behind a Diffusers MiniMax-H3, for training.

Importing this package imports neither torch nor Diffusers; the names below do, on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from h3_adapter_diffusers.captured import CapturedSteps, capture_steps
    from h3_adapter_diffusers.cps import Transition, joint_log_prob, log_prob, transition
    from h3_adapter_diffusers.errors import (
        BoundModelError,
        H3AdapterError,
        InputError,
        InstallError,
        RemoveError,
        ReplayError,
    )
    from h3_adapter_diffusers.install import Handle, handle_of, install_h3_training
    from h3_adapter_diffusers.lora_gate import lora_gate
    from h3_adapter_diffusers.packing import PackedSequence
    from h3_adapter_diffusers.training import Replay, Step, replay, sigma_grid, velocity
    from h3_adapter_diffusers.weights import base_state

_HOME = {
    "BoundModelError": "errors",
    "CapturedSteps": "captured",
    "H3AdapterError": "errors",
    "Handle": "install",
    "InputError": "errors",
    "InstallError": "errors",
    "PackedSequence": "packing",
    "RemoveError": "errors",
    "Replay": "training",
    "ReplayError": "errors",
    "Step": "training",
    "Transition": "cps",
    "base_state": "weights",
    "capture_steps": "captured",
    "handle_of": "install",
    "install_h3_training": "install",
    "joint_log_prob": "cps",
    "log_prob": "cps",
    "lora_gate": "lora_gate",
    "replay": "training",
    "sigma_grid": "training",
    "transition": "cps",
    "velocity": "training",
}

__all__ = [
    "BoundModelError",
    "CapturedSteps",
    "H3AdapterError",
    "Handle",
    "InputError",
    "InstallError",
    "PackedSequence",
    "RemoveError",
    "Replay",
    "ReplayError",
    "Step",
    "Transition",
    "base_state",
    "capture_steps",
    "handle_of",
    "install_h3_training",
    "joint_log_prob",
    "log_prob",
    "lora_gate",
    "replay",
    "sigma_grid",
    "transition",
    "velocity",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
