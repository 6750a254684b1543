"""The two real engines, small enough for a CPU, with the same weights and the same requests.

vLLM-Omni 0.30 has no CPU platform, so its SDPA attention is selected by hand and its linears run torch's ``linear``.
Requests are laid out by each engine's own packing code; nothing of either model is replaced.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")  # vLLM asks the network for an address otherwise

import numpy as np
import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3AudioReference, MiniMaxH3ImageReference
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3Ref2VAPrepareLayoutStep,
)
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.linear import LinearBase
from vllm_omni.diffusion.attention.backends.sdpa import SDPAImpl
from vllm_omni.diffusion.models.minimax_h3.denoise_loop import MiniMaxH3DenoiseBranch
from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3DiTModel
from vllm_omni.diffusion.models.minimax_h3.packed_sequence import (
    minimax_h3_packed_sequence,
    minimax_h3_packed_sequence_ref2va_blocks,
)
from vllm_omni.platforms.interface import UnspecifiedOmniPlatform

# Row widths are the released model's (96 and 32): vLLM-Omni's packing code has them as constants.
SIZES: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "attention_head_dim": 32,
    "hidden_size": 96,
    "num_layers": 2,
    "num_refiner_layers": 2,
    "ffn_dim": 192,
    "in_channels": 24,
    "audio_in_channels": 32,
    "patch_size": (1, 2, 2),
    "text_dim": 48,
    "freq_dim": 16,
    "time_embed_hidden_dim": 80,
    "time_embed_dim": 40,
    "rope_freq_dim": 4,
    "rope_theta": 10000.0,
}
_FLOAT32 = ("proj_in", "time_embedder", "proj_out")
_SDPA = "vllm_omni.diffusion.attention.backends.sdpa.SDPABackend"
TEXT, FRAMES, HEIGHT, WIDTH, AUDIO = 5, 2, 4, 6, 3
CONDITION_TIMES = {"video": 0.999, "audio": 1.0}


def diffusers_model() -> MiniMaxH3Transformer3DModel:
    """Random weights, none near zero, norms away from 1; bf16 but for the modules Diffusers keeps in fp32."""
    torch.manual_seed(0)
    model = MiniMaxH3Transformer3DModel(**SIZES).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            norm = "norm" in name and p.ndim == 1 and "linear" not in name
            p.copy_(
                1 + 0.3 * torch.randn_like(p)
                if norm
                else torch.randn_like(p) * (p.shape[-1] ** -0.5 if p.ndim > 1 else 0.3)
            )
            if not any(part in name for part in _FLOAT32):
                p.data = p.data.bfloat16()
    return model


@contextlib.contextmanager
def vllm_model(weights: Mapping[str, Tensor]) -> Iterator[MiniMaxH3DiTModel]:
    """vLLM-Omni's model with the tensors of a Diffusers state dict, loaded by its own loader."""
    sizes = dict(
        SIZES, adaln_out_features=18 * SIZES["hidden_size"], final_adaln_out_features=2 * SIZES["hidden_size"]
    )
    options = SimpleNamespace(
        tf_model_config=sizes,
        cache_config={"minimax_h3_adaln_cache": False},
        parallel_config=SimpleNamespace(ulysses_degree=1),
    )
    backend = classmethod(lambda *_, **__: _SDPA)
    with (
        mock.patch.object(UnspecifiedOmniPlatform, "get_diffusion_attn_backend_cls", backend),
        mock.patch.object(SDPAImpl, "forward", SDPAImpl.forward_cuda),
        set_current_vllm_config(VllmConfig()),
    ):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/rendezvous", 0, "gloo")
            initialize_model_parallel(1, 1)
        model = MiniMaxH3DiTModel(options, diffusers_weights=True).eval()
        model.load_weights(weights.items())
        for module in model.modules():
            if isinstance(module, LinearBase):
                module.cpu_linear = torch.nn.functional.linear
        yield model


@dataclass(frozen=True)
class Task:
    """One request in both engines' layouts. ``*_generated``: which video and audio rows are not conditions."""

    name: str
    branch: MiniMaxH3DenoiseBranch
    layout: tuple[Any, ...]
    text: Tensor
    video_generated: Tensor
    audio_generated: Tensor

    def noise(self) -> tuple[Tensor, Tensor]:
        """Latent rows (video, audio), conditions included."""
        g = torch.Generator().manual_seed(7)
        return (
            torch.randn(len(self.video_generated), 96, generator=g),
            torch.randn(len(self.audio_generated), 32, generator=g),
        )

    def vllm(self, video: Tensor, audio: Tensor, t_video: float, t_audio: float) -> dict[str, Any]:
        """Keyword arguments of vLLM-Omni's forward, as its own denoising loop makes them."""
        return self.branch.forward_kwargs(
            video_rows=video,
            audio_rows=audio,
            t_video=t_video,
            t_audio=t_audio,
            imgvid_cond_timestep=max(t_video, CONDITION_TIMES["video"]),
            audio_ref_cond_timestep=CONDITION_TIMES["audio"],
        )

    def diffusers(self, video: Tensor, audio: Tensor, t_video: float, t_audio: float) -> dict[str, Any]:
        """Keyword arguments of Diffusers' forward; timesteps in another order than vLLM's sorted ones."""
        positions, tags, video_at, audio_at, text_at, *_ = self.layout
        times = torch.full((len(tags),), t_video)
        times[audio_at[self.audio_generated]] = t_audio
        times[video_at[~self.video_generated]] = max(t_video, CONDITION_TIMES["video"])
        times[audio_at[~self.audio_generated]] = CONDITION_TIMES["audio"]
        levels, index = torch.unique(times, return_inverse=True)
        return {
            "hidden_states": video[None],
            "audio_hidden_states": audio[None],
            "encoder_hidden_states": self.text[None],
            "timestep": levels.flip(0),
            "timestep_indices": len(levels) - 1 - index,
            "token_tags": tags,
            "position_ids": positions.float(),
            "video_indices": video_at,
            "audio_indices": audio_at,
            "text_indices": text_at,
        }


def _task(name: str, packed: dict[str, Any], layout: tuple[Any, ...]) -> Task:
    text = torch.randn(TEXT, SIZES["text_dim"], generator=torch.Generator().manual_seed(3)).bfloat16()
    branch = MiniMaxH3DenoiseBranch(
        packed=packed, text_embeddings=text, token_tags=packed["token_tags"], device=torch.device("cpu")
    )
    return Task(name, branch, layout, text, branch.update_mask, branch.audio_update_mask)


def _keyframes(name: str, frames: tuple[int, ...], anchors: tuple[str, ...]) -> Task:
    packed = minimax_h3_packed_sequence(
        text_len=TEXT,
        latent_t=FRAMES,
        latent_h=HEIGHT,
        latent_w=WIDTH,
        audio_t=AUDIO,
        include_keyframe_cond=bool(frames),
        keyframe_frame_indices=frames or None,
        frame_count=5 if frames else None,
    )
    layout = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.full((TEXT,), 1), FRAMES, HEIGHT, WIDTH, AUDIO, SIZES["patch_size"], 2, 2, 0, anchors
    )
    return _task(name, packed, layout)


def t2va() -> Task:
    """Text, audio and video rows."""
    return _keyframes("T2VA", (), ())


def fl2va() -> Task:
    """First and last frame as condition rows of the video."""
    return _keyframes("FL2VA", (0, -1), ("first", "last"))


def ref2va() -> Task:
    """An image and an audio reference: condition rows in both streams."""
    packed = minimax_h3_packed_sequence_ref2va_blocks(
        text_len=TEXT,
        latent_t=FRAMES,
        latent_h=HEIGHT,
        latent_w=WIDTH,
        audio_t=AUDIO,
        ref_blocks=[{"kind": "image", "latent_h": 4, "latent_w": 2}, {"kind": "audio", "ref_audio_t": 2}],
    )
    references = [
        MiniMaxH3ImageReference(image=np.zeros((1, 1, 3), dtype="uint8")),
        MiniMaxH3AudioReference(audio=torch.zeros(1, 1), sample_rate=1),
    ]
    layout = MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
        torch.full((TEXT,), 1),
        references,
        [torch.zeros(1, SIZES["in_channels"], 1, 4, 2)],
        [torch.zeros(4, SIZES["audio_in_channels"])],
        FRAMES,
        HEIGHT,
        WIDTH,
        AUDIO,
        SIZES["patch_size"],
        2,
        2,
        0,
    )
    return _task("Ref2VA", packed, layout)


_TOP = {
    "proj_in": "video_patch_proj",
    "audio_proj_in": "audio_patch_proj",
    "context_embedder": "condition_proj",
    "time_embedder.linear_1": "time_embedder.proj_in",
    "time_embedder.linear_2": "time_embedder.proj_out",
    "token_refiner.final_norm": "token_refiner.final_norm",
    "norm_out.norm": "final_layer.norm",
    "norm_out.linear": "final_layer.adaln_proj.linear",
    "proj_out": "final_layer.video_out",
    "audio_proj_out": "final_layer.audio_out",
}
_IN_BLOCK = {
    "attn.to_q": "attn.qkv_proj.q",
    "attn.to_k": "attn.qkv_proj.k",
    "attn.to_v": "attn.qkv_proj.v",
    "attn.to_out.0": "attn.out_proj",
    "attn.norm_q": "attn.q_norm",
    "attn.norm_k": "attn.k_norm",
    "ff.net.0.proj": "mlp.fc1.value_gate",
    "ff.net.2": "mlp.fc2",
}


def graph_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A Diffusers state dict under the names of ``ModuleWeights``, every tensor as it is."""
    out = {}
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        if module not in _TOP:
            stack, _, rest = module.replace("token_refiner.refiner_blocks", "token_refiner#blocks").partition(
                "."
            )
            index, _, suffix = rest.partition(".")
            stack = stack.replace("transformer_blocks", "blocks").replace("#", ".")
            module = f"{stack}.{index}.{_IN_BLOCK.get(suffix, suffix)}"
        out[f"{_TOP.get(module, module)}.{kind}"] = tensor
    return out
