"""What the parts of one install share."""

from __future__ import annotations

from h3_kernels.modes import InstallSettings
from torch import Tensor

Settings = InstallSettings
"""Everything an install of this adapter knows; the trainer's adds the logical keys of rows."""


def plain(parameter: Tensor) -> Tensor:
    """The same tensor without vLLM's parameter class.

    That class intercepts every attribute that is read: a contract call on it took 54 us of host time instead of 28.
    """
    return parameter.as_subclass(Tensor)
