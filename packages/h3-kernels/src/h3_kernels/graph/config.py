"""Sizes of a MiniMax-H3 DiT, read from either set of configuration keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from h3_kernels.errors import InputError


@dataclass(frozen=True, slots=True)
class DiTConfig:
    """Architecture sizes; the defaults are the released 33B model. Rows of the video latents are patches."""

    hidden: int = 5376
    heads: int = 56
    head_dim: int = 128
    layers: int = 50
    refiner_layers: int = 2
    ffn: int = 14336
    video_channels: int = 24
    audio_channels: int = 32
    patch: tuple[int, int, int] = (1, 2, 2)
    text_dim: int = 5120
    freq_dim: int = 256
    time_hidden: int = 5376
    time_dim: int = 2688
    rope_freqs: int = 16
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qk_norm_eps: float = 1e-5
    final_norm_eps: float = 1e-5

    @property
    def video_width(self) -> int:
        """Columns of a video row: channels times patch volume (96 in the released model)."""
        return self.video_channels * math.prod(self.patch)

    @property
    def inner(self) -> int:
        """Columns of q, of k and of v."""
        return self.heads * self.head_dim

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> DiTConfig:
        """Read a Diffusers ``config.json`` or a vLLM-Omni ``tf_model_config``; unknown keys are ignored.

        Absent keys take the released model's value. Raises InputError if two spellings of one size disagree.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            found = {config[key] for key in _SPELLINGS[field.name] if key in config and key != "patch_size"}
            if field.name == "patch" and "patch_size" in config:
                found = {tuple(config["patch_size"])}
            if len(found) > 1:
                raise InputError(f"configuration gives {field.name} as {sorted(found)}; expected one value")
            if found:
                values[field.name] = found.pop()
        return cls(**values)

    def to_mapping(self) -> dict[str, Any]:
        """The sizes as plain JSON values, sorted by name."""
        return dict(sorted((asdict(self) | {"patch": list(self.patch)}).items()))


# Diffusers 0.42 (MiniMaxH3Transformer3DModel) first, vLLM-Omni 0.30 (MiniMaxH3DiTArchConfig) where it
# differs.
_SPELLINGS: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "head_dim": ("attention_head_dim",),
    "layers": ("num_layers",),
    "refiner_layers": ("num_refiner_layers", "token_refiner_num_layers"),
    "ffn": ("ffn_dim", "ffn_hidden_size"),
    "video_channels": ("in_channels", "latents_dim"),
    "audio_channels": ("audio_in_channels", "audio_latents_dim"),
    "patch": ("patch_size",),
    "text_dim": ("text_dim",),
    "freq_dim": ("freq_dim", "timestep_input_dim"),
    "time_hidden": ("time_embed_hidden_dim", "time_embed_hidden_size"),
    "time_dim": ("time_embed_dim",),
    "rope_freqs": ("rope_freq_dim", "rope_inv_freq_len"),
    "rope_theta": ("rope_theta",),
    "norm_eps": ("norm_eps",),
    "qk_norm_eps": ("qk_norm_eps",),
    "final_norm_eps": ("final_norm_eps",),
}
