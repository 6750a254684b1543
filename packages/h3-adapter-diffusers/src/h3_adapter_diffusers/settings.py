"""What the parts of one install share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from h3_kernels.logical_keys import LogicalKeys
from h3_kernels.modes import InstallSettings


@dataclass(slots=True)
class KeyRing:
    """The logical keys in force, by row set; empty when rows are taken in the order given."""

    keys: Mapping[str, LogicalKeys] = field(default_factory=dict)
    depth: int = 0
    """Blocks of `using` that are open."""
    used: bool = False
    """Whether any forward had keys."""

    @contextmanager
    def using(self, keys: Mapping[str, LogicalKeys]) -> Iterator[None]:
        """Put `keys` in force for the duration of the block."""
        before, self.keys = self.keys, keys
        self.depth += 1
        self.used = self.used or bool(keys)
        try:
            yield
        finally:
            self.keys = before
            self.depth -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(InstallSettings):
    """Everything an install of this adapter knows: the rollout's settings and the logical keys of rows."""

    ring: KeyRing = field(default_factory=KeyRing)
