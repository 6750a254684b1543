"""The real model, small enough for a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import Tensor

from h3_adapter_diffusers.packing import PackedSequence

# Eight heads and 8 x 16 | ffn allow every tp of the contract; hidden != heads * head_dim and 6 * rope_freq_dim <
# head_dim, so no two sizes can be confused. The numbers of h3_adapter_vllm.testing, which may not be imported here.
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


def build(
    config: Mapping[str, Any] = TINY,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> MiniMaxH3Transformer3DModel:
    """A `MiniMaxH3Transformer3DModel` of `config` with random weights, its fp32 modules fp32, in eval mode.

    `dtype` is the dtype of the other modules. `model.to(bfloat16)` would round the fp32 modules and the
    rotary frequencies too, so parameters are cast one by one.
    """
    with torch.device(device):
        model = MiniMaxH3Transformer3DModel(**config).eval()
    randomise(model, seed)
    keep = tuple(MiniMaxH3Transformer3DModel._keep_in_fp32_modules)
    for name, parameter in model.named_parameters():
        if not any(part in name for part in keep):
            parameter.data = parameter.data.to(dtype)
    return model


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
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


@dataclass(frozen=True)
class Request:
    """One packed request: its layout, all video rows [Nv, C], audio rows [Na, A] (condition rows first), text
    [Nt, E]."""

    name: str
    packed: PackedSequence
    video: Tensor
    audio: Tensor
    text: Tensor


def velocities(
    model: torch.nn.Module, request: Request, *, video_t: float = 0.7, audio_t: float = 0.3
) -> tuple[Tensor, Tensor]:
    """(video [Nv, C], audio [Na, A]) fp32 velocities of one forward without gradients."""
    from h3_adapter_diffusers.training import velocity

    with torch.no_grad():
        return velocity(model, request.packed, request.video, request.audio, request.text, video_t, audio_t)
