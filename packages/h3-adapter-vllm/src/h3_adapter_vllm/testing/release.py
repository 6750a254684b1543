"""A MiniMax-H3 release in miniature, for vLLM-Omni's own pipeline, loader and workers.

The transformer is a small ``MiniMaxH3DiTModel`` in the release layout. The release ships its VAEs' code with the
checkpoint, so stand-ins that decode by repetition are written in their place. There is no text encoder: the pipeline
then takes text rows with the request, as the diffusion stage of a deployment in two stages does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from h3_kernels.testing.tiny import TINY
from safetensors.torch import save_file
from torch import Tensor

CONFIG: Mapping[str, Any] = {**TINY, "in_channels": 24, "audio_in_channels": 32, "text_dim": 5120}
"""The pipeline fixes the width of video, audio and text rows; the rest is the small model's."""

_INDEX = {
    "_class_name": "MiniMaxH3Pipeline",
    "_minimax_h3": {
        "partition": "fl2va",
        "tasks": ["t2va", "fl2va"],
        "sigma_shift_scales": {"video": 12.0, "audio": 3.0},
    },
}
_VAE = """
from torch import nn

from .parallel import get_parallel_state  # noqa: F401


class _Processor:
    def revert_tensor(self, frames):
        return frames.clamp(0, 1)


class _Model(nn.Module):
    vae_ratio = 16

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.quant_conv = nn.Identity(), nn.Identity(), nn.Identity()
        self.pre_block, self.mean_proj = nn.Identity(), nn.Identity()
        self.processor = _Processor()

    def split_tiles(self, size, *_):
        return [size], None, None

    def decode_base(self, z):
        frames = (z.shape[2] - 2) // 5 * 17 + 5
        z = z[:, :3].repeat_interleave(16, dim=3).repeat_interleave(16, dim=4)
        return z.sigmoid().repeat_interleave(-(-frames // z.shape[2]), dim=2)[:, :, :frames]


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = _Model()

    @classmethod
    def from_pretrained(cls, path):
        return cls()

    def decode(self, z):
        return z.mean(dim=1, keepdim=True).tanh().repeat_interleave(800, dim=2)
"""


_PARALLEL = """
_STATE = {}


def get_parallel_state():
    return _STATE
"""


def write_release(folder: Path, state: Mapping[str, Tensor]) -> Path:
    """Write the miniature with the transformer weights ``state`` (release layout, of ``CONFIG``); its FL2VA folder."""
    root = folder / "FL2VA"
    for name in ("transformer", "video_vae", "audio_vae"):
        (root / name).mkdir(parents=True)
    _json(root / "model_index.json", _INDEX)
    hidden = CONFIG["hidden_size"]
    sizes = {**CONFIG, "adaln_out_features": 18 * hidden, "final_adaln_out_features": 2 * hidden}
    _json(root / "transformer" / "config.json", {**sizes, "patch_size": list(CONFIG["patch_size"])})
    save_file(dict(state), root / "transformer" / "model.safetensors")
    for name, channels in (("video_vae", 24), ("audio_vae", 32)):
        config = {
            "latent_channels": channels,
            "latents_mean": [0.0] * channels,
            "latents_std": [1.0] * channels,
            "sample_rate": 32000,
            "auto_map": {"AutoModel": "modeling.VAE"},
        }
        _json(root / name / "config.json", config)
        (root / name / "modeling.py").write_text(_VAE)
        (root / name / "parallel.py").write_text(_PARALLEL)
    return root


def _json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2))
