"""Gradient checkpointing that takes the logical keys of a forward along to its recomputation.

Diffusers calls `module._gradient_checkpointing_func(block, *args)` for every checkpointed block.
Recomputation happens during backward, after other forwards may have put other keys in force, so the keys of
the first run are captured and put back around the second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from h3_adapter_diffusers.settings import KeyRing

_ATTRIBUTE = "_gradient_checkpointing_func"


class KeyedCheckpointing:
    """Wraps the checkpointing functions of a model's modules; `refresh` follows later calls of Diffusers'
    switch."""

    def __init__(self, model: nn.Module, ring: KeyRing) -> None:
        self._modules = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self._ring = ring

    def refresh(self) -> None:
        """Wrap every checkpointing function that is not wrapped yet."""
        for module in self._modules:
            function = vars(module).get(_ATTRIBUTE)
            if function is not None and not isinstance(function, _Keyed):
                setattr(module, _ATTRIBUTE, _Keyed(function, self._ring))

    def remove(self) -> None:
        """Restore the functions that were wrapped."""
        for module in self._modules:
            function = vars(module).get(_ATTRIBUTE)
            if isinstance(function, _Keyed):
                setattr(module, _ATTRIBUTE, function.function)


class _Keyed:
    def __init__(self, function: Callable[..., Any], ring: KeyRing) -> None:
        self.function = function
        self.ring = ring

    def __call__(self, block: Callable[..., Any], *args: Any) -> Any:
        keys = self.ring.keys

        def with_keys(*inputs: Any) -> Any:
            with self.ring.using(keys):
                return block(*inputs)

        return self.function(with_keys, *args)
