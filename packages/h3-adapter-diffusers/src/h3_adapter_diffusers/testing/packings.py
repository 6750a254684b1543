"""Packed requests of the three H3 tasks, laid out by Diffusers' own pipeline blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from diffusers.modular_pipelines.minimax_h3 import (
    MiniMaxH3AudioReference,
    MiniMaxH3ImageReference,
)
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3Ref2VAPrepareLayoutStep,
)
from h3_kernels.testing.tiny import TINY
from torch import Tensor

from h3_adapter_diffusers.packing import PackedSequence
from h3_adapter_diffusers.testing.tiny import Request

_VIDEO, _TEXT, _AUDIO = 0, 1, 2  # modality tags of the checkpoint
_CHANNELS = 2  # stereo: two channel-major blocks of audio rows


def t2va(config: Mapping[str, Any] = TINY, **sizes: int) -> Request:
    """Text to video and audio: text, audio, video rows; nothing is conditioned on a frame."""
    return _keyframes("t2va", (), config, **sizes)


def fl2va(
    config: Mapping[str, Any] = TINY, *, anchors: tuple[str, ...] = ("first", "last"), **sizes: int
) -> Request:
    """First and last frame to video and audio: two blocks of condition rows before the generated ones."""
    return _keyframes("fl2va", anchors, config, **sizes)


def ref2va(config: Mapping[str, Any] = TINY, *, seed: int = 3, text: int = 6, frames: int = 2) -> Request:
    """An image and an audio reference to video and audio: condition rows in both streams."""
    generator = torch.Generator().manual_seed(seed)
    references = [
        MiniMaxH3ImageReference(image=np.zeros((1, 1, 3), dtype="uint8")),
        MiniMaxH3AudioReference(audio=torch.zeros(1, 1), sample_rate=1),
    ]
    layout = MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
        torch.full((text,), _TEXT),
        references,
        [torch.zeros(1, config["in_channels"], 1, 4, 2)],
        [torch.zeros(2 * _CHANNELS, config["audio_in_channels"])],
        frames,
        4,
        4,
        3,
        config["patch_size"],
        _CHANNELS,
        _AUDIO,
        _VIDEO,
    )
    return _request("ref2va", layout, config, generator)


def packings(config: Mapping[str, Any] = TINY) -> tuple[Request, ...]:
    """One request of each task, of different lengths."""
    return t2va(config), fl2va(config), ref2va(config)


def _keyframes(
    name: str,
    anchors: tuple[str, ...],
    config: Mapping[str, Any],
    *,
    seed: int = 1,
    text: int = 5,
    frames: int = 2,
    height: int = 4,
    width: int = 6,
    audio: int = 3,
) -> Request:
    generator = torch.Generator().manual_seed(seed)
    layout = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.full((text,), _TEXT),
        frames,
        height,
        width,
        audio,
        config["patch_size"],
        _CHANNELS,
        _AUDIO,
        _VIDEO,
        anchors,
    )
    return _request(name, layout, config, generator)


def _request(name: str, layout: Any, config: Mapping[str, Any], generator: torch.Generator) -> Request:
    packed = PackedSequence.from_layout(layout)
    patch = config["in_channels"] * int(np.prod(config["patch_size"]))

    def rows(count: int, width: int) -> Tensor:
        return torch.randn(count, width, generator=generator)

    return Request(
        name,
        packed,
        video=rows(len(packed.video_indices), patch),
        audio=rows(len(packed.audio_indices), config["audio_in_channels"]),
        text=rows(len(packed.text_indices), config["text_dim"]).to(torch.bfloat16),
    )
