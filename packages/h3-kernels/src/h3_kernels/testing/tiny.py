"""Sizes of the small models both adapters test with, and random weights for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

# Diffusers' spelling, which both engines' configurations take. Eight heads and 8 x 16 | ffn allow every tp of the
# contract; hidden != heads * head_dim and 6 * rope_freq_dim < head_dim, so no two sizes can be confused.
TINY: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "attention_head_dim": 32,
    "hidden_size": 80,
    "num_layers": 2,
    "num_refiner_layers": 2,
    "ffn_dim": 384,
    "in_channels": 4,
    "audio_in_channels": 8,
    "patch_size": (1, 2, 2),
    "text_dim": 48,
    "freq_dim": 16,
    "time_embed_hidden_dim": 64,
    "time_embed_dim": 32,
    "rope_freq_dim": 4,
    "rope_theta": 10000.0,
}
"""For a CPU."""

SMALL: Mapping[str, Any] = {
    **TINY,
    "attention_head_dim": 128,
    "hidden_size": 768,
    "ffn_dim": 2048,
    "in_channels": 24,
    "audio_in_channels": 32,
    "text_dim": 256,
    "freq_dim": 256,
    "time_embed_hidden_dim": 768,
    "time_embed_dim": 384,
    "rope_freq_dim": 16,
}
"""For a GPU: heads of 128, of which 96 channels rotate, and latent rows as in the release, so that an engine takes its
fused paths."""


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Fill every parameter: rows of unit gain, biases and norms away from 0 and 1."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.ndim == 1 and "linear" not in name:
                parameter.normal_(1.0, 0.3, generator=generator)
            elif parameter.ndim == 1:
                parameter.normal_(0.0, 0.3, generator=generator)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
