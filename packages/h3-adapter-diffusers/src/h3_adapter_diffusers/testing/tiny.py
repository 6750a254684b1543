"""The real model, small enough for a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel
from h3_kernels.testing.tiny import TINY, randomise
from torch import Tensor

from h3_adapter_diffusers.packing import PackedSequence


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


@dataclass(frozen=True)
class Request:
    """One packed request: its layout, all video rows [Nv, C], audio rows [Na, A] (condition rows first), text
    [Nt, E]."""

    name: str
    packed: PackedSequence
    video: Tensor
    audio: Tensor
    text: Tensor

    def to(self, device: str) -> Request:
        """The same rows on another device; the layout stays on the CPU."""
        return replace(
            self, video=self.video.to(device), audio=self.audio.to(device), text=self.text.to(device)
        )


def velocities(
    model: torch.nn.Module, request: Request, *, video_t: float = 0.7, audio_t: float = 0.3
) -> tuple[Tensor, Tensor]:
    """(video [Nv, C], audio [Na, A]) fp32 velocities of one forward without gradients."""
    from h3_adapter_diffusers.training import velocity

    with torch.no_grad():
        return velocity(model, request.packed, request.video, request.audio, request.text, video_t, audio_t)
