"""One adapter tensor's name -> module, role and partition, or the reason it has none."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from h3_mapper.errors import MapperError
from h3_mapper.lora.errors import UnmappedModuleError, UnsupportedAdapterError
from h3_mapper.lora.formats import UNSUPPORTED_SUFFIXES
from h3_mapper.wrappers import unwrap

FLAT_PREFIX = "lora_unet_"


class Role(StrEnum):
    """What one tensor is to its module."""

    A = "A"
    B = "B"
    ALPHA = "alpha"
    MAGNITUDE = "magnitude"
    DIFF = "diff"
    DIFF_BIAS = "diff_b"
    SET = "set_weight"


_NAMED = r"(?:\.(?P<adapter>[A-Za-z0-9_-]+))?"
_SUFFIXES: tuple[tuple[Role, re.Pattern[str]], ...] = tuple(
    (role, re.compile(pattern + "$"))
    for role, pattern in (
        (Role.A, rf"\.lora_A{_NAMED}\.weight"),
        (Role.B, rf"\.lora_B{_NAMED}\.weight"),
        (Role.A, r"\.lora_down\.weight"),
        (Role.B, r"\.lora_up\.weight"),
        (Role.ALPHA, r"\.alpha"),
        (Role.MAGNITUDE, rf"\.lora_magnitude_vector(?:{_NAMED}\.weight)?"),
        (Role.MAGNITUDE, r"\.dora_scale"),
        (Role.DIFF_BIAS, r"\.diff_b"),
        (Role.DIFF, r"\.diff"),
        (Role.SET, r"\.set_weight"),
    )
)


@dataclass(frozen=True, slots=True)
class Key:
    """A parsed name. `adapter` is PEFT's adapter name where the producer kept it (usually `default`)."""

    name: str
    module: str
    role: Role
    adapter: str | None
    component: str | None
    flat: bool


def parse(name: str) -> Key:
    """Parse one name.

    Raises UnsupportedAdapterError for other adapter kinds and UnmappedModuleError for names of no adapter tensor.
    """
    for suffix, reason in UNSUPPORTED_SUFFIXES.items():
        if name.endswith(suffix):
            raise UnsupportedAdapterError(f"{name}: {suffix} is refused: {reason}")
    for role, pattern in _SUFFIXES:
        match = pattern.search(name)
        if match is None:
            continue
        bare = unwrap(name[: match.start()])
        flat = bare.name.startswith(FLAT_PREFIX)
        module = bare.name.removeprefix(FLAT_PREFIX)
        return Key(name, module, role, match.groupdict().get("adapter"), bare.component, flat)
    raise UnmappedModuleError(
        f"{name}: not an adapter tensor; expected lora_A/lora_B, lora_down/lora_up, alpha, a DoRA magnitude, "
        "diff, diff_b or set_weight"
    )


def is_adapter_name(name: str) -> bool:
    """Whether a name belongs to an adapter rather than to a model."""
    try:
        parse(name)
    except MapperError:
        return False
    return True
