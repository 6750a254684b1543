"""H3Config: the dimensions of a MiniMax-H3 transformer, read from either spelling of config.json.

Fields carry the Diffusers names (`MiniMaxH3Transformer3DModel`, diffusers 0.42) and the released model's
values as defaults; `NATIVE_KEYS` gives the native spelling (`MiniMaxH3DiTArchConfig`, vllm-omni 0.30).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from h3_mapper.errors import ConfigError, listed

DIFFUSERS_CLASS = "MiniMaxH3Transformer3DModel"

NATIVE_KEYS = {
    "num_refiner_layers": "token_refiner_num_layers",
    "ffn_dim": "ffn_hidden_size",
    "in_channels": "latents_dim",
    "audio_in_channels": "audio_latents_dim",
    "freq_dim": "timestep_input_dim",
    "time_embed_hidden_dim": "time_embed_hidden_size",
    "rope_freq_dim": "rope_inv_freq_len",
}
"""Diffusers key -> native key, where they differ."""

DERIVED_NATIVE_KEYS = {"adaln_out_features": "adaln_dim", "final_adaln_out_features": "final_adaln_dim"}
"""Native keys that Diffusers derives itself -> the H3Config property that gives their value."""

_MOST = {"num_layers": 4096, "num_refiner_layers": 4096, "num_attention_heads": 4096, "rope_freq_dim": 4096}
"""Bounds on what plans iterate over, so a hostile config.json cannot exhaust memory."""

_ANY = 2**31 - 1
"""Bound on every other size."""


@dataclass(frozen=True, slots=True)
class H3Config:
    """Dimensions of an H3 transformer; the defaults are the released 33B model's.

    vsa_gates: the checkpoint has `attn.to_gate_compress` in each main block (not a config.json key: it is
    read off the tensor names).
    """

    num_attention_heads: int = 56
    attention_head_dim: int = 128
    hidden_size: int = 5376
    num_layers: int = 50
    num_refiner_layers: int = 2
    ffn_dim: int = 14336
    in_channels: int = 24
    audio_in_channels: int = 32
    patch_size: tuple[int, int, int] = (1, 2, 2)
    text_dim: int = 5120
    freq_dim: int = 256
    time_embed_hidden_dim: int = 5376
    time_embed_dim: int = 2688
    rope_freq_dim: int = 16
    rope_theta: float = 10000.0
    vsa_gates: bool = False

    @property
    def inner_size(self) -> int:
        """Rows of q: heads * head_dim (7168; not hidden_size)."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def video_patch_dim(self) -> int:
        """Width of a video row: channels times patch volume (96)."""
        return self.in_channels * math.prod(self.patch_size)

    @property
    def adaln_dim(self) -> int:
        """Rows of a block's AdaLN: 3 modalities x 6 vectors x hidden_size (96768)."""
        return 18 * self.hidden_size

    @property
    def final_adaln_dim(self) -> int:
        """Rows of the final AdaLN: shift and scale (10752)."""
        return 2 * self.hidden_size

    def __post_init__(self) -> None:
        """Raises ConfigError for a value no model has: a size that is no positive integer, a theta not above 1."""
        for field in fields(self):
            if field.name != "vsa_gates":
                object.__setattr__(
                    self, field.name, _typed(field.name, getattr(self, field.name), "H3Config")
                )
        if not isinstance(self.vsa_gates, bool):
            raise ConfigError(f"H3Config: vsa_gates is {self.vsa_gates!r}; expected True or False")

    def with_gates(self, gates: bool) -> H3Config:
        """The same dimensions with or without VSA gates."""
        return replace(self, vsa_gates=gates)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], where: str = "config.json") -> H3Config:
        """Read a config.json object in Diffusers or native spelling; absent keys keep the release's value.

        where: what messages call it. Raises ConfigError for a value of the wrong type, both spellings at odds, another
        model's class, or AdaLN widths that contradict hidden_size.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(
                f"the configuration is {_kind(mapping)}; expected an H3Config or config.json's object (a mapping)"
            )
        refuse_other_model(mapping, where)
        if not _own_keys() - {"_class_name"} & mapping.keys():
            raise ConfigError(
                f"{where}: names none of H3's dimensions; expected keys such as "
                f"{listed(['num_layers', 'hidden_size', 'num_attention_heads'])}"
            )
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.name == "vsa_gates":
                continue
            value = _spelled(mapping, field.name, where)
            if value is not None:
                values[field.name] = _typed(field.name, value, where)
        config = cls(**values)
        for key, attribute in DERIVED_NATIVE_KEYS.items():
            expected = getattr(config, attribute)
            if key in mapping and mapping[key] != expected:
                raise ConfigError(
                    f"{where}: {key} is {mapping[key]!r}, but hidden_size {config.hidden_size} gives "
                    f"{expected}; this is not the full H3 model"
                )
        return config

    def to_json(self, native: bool, original: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The config.json object in one spelling, keeping unrelated keys of `original` as they are."""
        result = {k: v for k, v in (original or {}).items() if k not in _own_keys()}
        if not native:
            result = {"_class_name": DIFFUSERS_CLASS, **result}
        for field in fields(self):
            if field.name != "vsa_gates":
                value = getattr(self, field.name)
                key = NATIVE_KEYS.get(field.name, field.name) if native else field.name
                result[key] = list(value) if isinstance(value, tuple) else value
        if native:
            result |= {key: getattr(self, attribute) for key, attribute in DERIVED_NATIVE_KEYS.items()}
        return result

    def inv_freq(self) -> bytes:
        """rope.inv_freq as little-endian fp32: `1 / theta**(2i / 2n)`, rounded to fp32 at each step.

        Not `theta**-x`: that differs in 4 of the 16 released values. The bits equal what torch computes in
        fp32 for theta 1e4 and n up to 32 (H3 has 16; 6n must fit in head_dim).
        """
        n = self.rope_freq_dim
        powers = (_f32(self.rope_theta ** _f32(2 * i / (2 * n))) for i in range(n))
        return struct.pack(f"<{n}f", *(_f32(1.0 / p) for p in powers))


def _f32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _own_keys() -> frozenset[str]:
    names = {field.name for field in fields(H3Config)}
    return frozenset(names | set(NATIVE_KEYS.values()) | set(DERIVED_NATIVE_KEYS) | {"_class_name"})


def refuse_other_model(mapping: Mapping[str, Any], where: str = "config.json") -> None:
    """Raise ConfigError if a config.json object names another model's class or type."""
    for key in ("_class_name", "model_type"):
        value = mapping.get(key)
        if value is not None and "minimaxh3" not in str(value).lower().replace("_", "").replace("-", ""):
            raise ConfigError(
                f"{where}: {key} is {value!r}; expected a MiniMax-H3 transformer ({DIFFUSERS_CLASS}): point at its "
                "folder, not at a text encoder's, a VAE's or another model's"
            )


def _spelled(mapping: Mapping[str, Any], name: str, where: str) -> Any:
    found = {key: mapping[key] for key in (name, NATIVE_KEYS.get(name, name)) if key in mapping}
    values = list(found.values())
    if len(values) == 2 and values[0] != values[1]:
        raise ConfigError(
            f"{where}: {listed(found)} say the same dimension and differ: {values}; keep the one that the weights have"
        )
    return values[0] if values else None


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def _typed(name: str, value: Any, where: str) -> Any:
    if name == "patch_size":
        if isinstance(value, list | tuple) and len(value) == 3 and all(_positive(v) for v in value):
            return tuple(value)
        raise ConfigError(f"{where}: patch_size is {value!r}; expected three positive integers")
    if name == "rope_theta":
        if isinstance(value, int | float) and not isinstance(value, bool) and 1 < value < math.inf:
            return float(value)
        raise ConfigError(f"{where}: rope_theta is {value!r}; expected a number above 1")
    if not _positive(value) or value > _MOST.get(name, value):
        raise ConfigError(
            f"{where}: {name} is {value!r}; expected a positive integer up to {_MOST.get(name, _ANY):,}"
        )
    return value


def _positive(value: Any) -> bool:
    """A positive integer small enough that no product of dimensions is absurd."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _ANY
