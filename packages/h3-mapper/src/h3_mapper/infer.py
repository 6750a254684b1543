"""H3Config from tensor shapes, for checkpoints without a config.json (single files).

Only what shapes determine is read; patch size and rope_theta are the release's, and the number of
frequencies is `rope.inv_freq`'s length where that is stored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from h3_mapper.check import Seen
from h3_mapper.config import H3Config
from h3_mapper.errors import ConfigError, MissingTensorError
from h3_mapper.spec import Layout

_PROBES: Mapping[str, tuple[str, str, int]] = {
    "hidden_size": ("proj_in.weight", "video_patch_proj.weight", 0),
    "in_channels": ("proj_in.weight", "video_patch_proj.weight", 1),
    "audio_in_channels": ("audio_proj_in.weight", "audio_patch_proj.weight", 1),
    "text_dim": ("context_embedder.weight", "condition_proj.weight", 1),
    "freq_dim": ("time_embedder.linear_1.weight", "time_embedder.proj_in.weight", 1),
    "time_embed_hidden_dim": ("time_embedder.linear_1.weight", "time_embedder.proj_in.weight", 0),
    "time_embed_dim": ("time_embedder.linear_2.weight", "time_embedder.proj_out.weight", 0),
    "attention_head_dim": ("transformer_blocks.0.attn.norm_q.weight", "blocks.0.attn.q_norm.weight", 0),
    "num_attention_heads": ("transformer_blocks.0.attn.to_out.0.weight", "blocks.0.attn.out_proj.weight", 1),
    "ffn_dim": ("transformer_blocks.0.ff.net.2.weight", "blocks.0.mlp.fc2.weight", 1),
}
"""Field -> (Diffusers tensor, native tensor, dim)."""


def infer_config(seen: Seen, layout: Layout, where: str = "checkpoint") -> H3Config:
    """The dimensions these shapes have. Raises MissingTensorError or ConfigError if they do not say."""
    values = {name: _probe(seen, layout, name, where) for name in _PROBES}
    default = H3Config()
    heads, odd = divmod(values["num_attention_heads"], values["attention_head_dim"])
    channels, odd_patch = divmod(values["in_channels"], math.prod(default.patch_size))
    if odd or odd_patch:
        raise ConfigError(
            f"{where}: no config.json, and shapes do not give whole heads or patches; add config.json"
        )
    values |= {"num_attention_heads": heads, "in_channels": channels}
    values["num_layers"] = _count(seen, r"(?:transformer_)?blocks\.(\d+)\.")
    values["num_refiner_layers"] = _count(seen, r"token_refiner\.(?:refiner_)?blocks\.(\d+)\.")
    values["rope_freq_dim"] = (
        seen["rope.inv_freq"][0][0] if "rope.inv_freq" in seen else default.rope_freq_dim
    )
    return H3Config.from_mapping(values)


def _probe(seen: Seen, layout: Layout, field: str, where: str) -> int:
    diffusers, native, dim = _PROBES[field]
    name = native if layout.native else diffusers
    if name not in seen:
        raise MissingTensorError(f"{where}: no config.json, and {name} (which tells {field}) is absent")
    shape = seen[name][0]
    rank = 1 if "norm" in name else 2
    if len(shape) != rank:
        raise ConfigError(
            f"{where}: {name} has shape {list(shape)}; expected {rank} dimensions, never reshaped"
        )
    return shape[dim]


def _count(seen: Seen, pattern: str) -> int:
    numbers = {int(m[1]) for name in seen if (m := re.match(pattern, name))}
    return max(numbers, default=-1) + 1
