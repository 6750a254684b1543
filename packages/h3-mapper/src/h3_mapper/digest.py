"""Digest algorithms by name. Imported lazily: hashing libraries are not needed to plan."""

from __future__ import annotations

from enum import StrEnum
from typing import NoReturn, Protocol

from h3_mapper.errors import MapperError


class Hasher(Protocol):
    """What every streaming hash offers."""

    def update(self, data: memoryview, /) -> object:
        """Add bytes."""

    def hexdigest(self) -> str:
        """Lower-case hex of the digest so far."""


class _NoHasher:
    def update(self, data: memoryview, /) -> object:
        """Ignore the bytes."""
        return None

    def hexdigest(self) -> str:
        """Nothing."""
        return ""


class Digest(StrEnum):
    """How atoms are digested."""

    XXH3 = "xxh3"
    """xxh3_128: finds every accident, not an adversary; 20 GiB/s a core, so it hides behind the copy."""
    BLAKE3 = "blake3"
    """blake3, 256 bits: cryptographic; 4 GiB/s a core."""
    NONE = "none"
    """No digests and no manifest."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise MapperError(f"{value!r} is not a digest; expected {', '.join(cls)}")

    def hasher(self) -> Hasher:
        """A fresh hash state."""
        if self is Digest.XXH3:
            import xxhash

            return xxhash.xxh3_128()
        if self is Digest.BLAKE3:
            import blake3

            return blake3.blake3()
        return _NoHasher()
