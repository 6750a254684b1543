"""The two real engines on CPU at toy size: diffusers 0.42 and vllm-omni 0.30, in this process, tp 1.

vLLM-Omni has no CPU platform of its own, so its attention backend is pointed at SDPA; CPU linears are
left unpacked (`cpu_linear`), because packing drops `.weight`. Everything else is the engines' own code.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from h3_mapper import H3Config, Layout, tensors
from mapper_testkit import TINY
from torch.nn.functional import linear

TORCH = {"F32": torch.float32, "BF16": torch.bfloat16}
TEXT, AUDIO, VIDEO = 5, 7, 8


@contextlib.contextmanager
def vllm_engine() -> Iterator[None]:
    """vLLM's configuration and a gloo group of one, taken down again at the end."""
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_HOST_IP": "127.0.0.1"}
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm_omni.diffusion.attention.backends import sdpa
    from vllm_omni.platforms.interface import UnspecifiedOmniPlatform

    backend = "vllm_omni.diffusion.attention.backends.sdpa.SDPABackend"
    UnspecifiedOmniPlatform.get_diffusion_attn_backend_cls = classmethod(lambda *_, **__: backend)
    sdpa.SDPAImpl.forward = lambda self, q, k, v, attn_metadata=None: self._forward_impl(
        q, k, v, attn_metadata
    )
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield
        destroy_model_parallel()
        destroy_distributed_environment()


def native_model(config: H3Config = TINY, device: str = "cpu") -> Any:
    """vLLM-Omni's module, memory filled with NaN so that a tensor nobody loaded shows."""
    from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3DiTModel

    od_config = SimpleNamespace(
        tf_model_config=config.to_json(native=True),
        cache_config={"minimax_h3_adaln_cache": False},
        parallel_config=SimpleNamespace(ulysses_degree=1),
    )
    with torch.device(device):
        model = MiniMaxH3DiTModel(od_config, diffusers_weights=False).eval()
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(float("nan"))
    return model


def ready(model: Any) -> Any:
    """After loading: linears compute with their own weights."""
    from vllm.model_executor.layers.linear import LinearBase

    for module in model.modules():
        if isinstance(module, LinearBase):
            module.cpu_linear = linear
    return model


def diffusers_model(config: H3Config = TINY, seed: int = 0) -> Any:
    """Diffusers' module with weights far from zero and norms away from 1, in the released precision."""
    from diffusers import MiniMaxH3Transformer3DModel

    keys = config.to_json(native=False)
    keys.pop("_class_name")
    model = MiniMaxH3Transformer3DModel(**keys).eval()
    kinds = {spec.name: TORCH[spec.dtype] for spec in tensors(config, Layout.DIFFUSERS)}
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in name and parameter.ndim == 1 and "linear" not in name:
            values = 1 + 0.3 * values
        else:
            values *= 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
        parameter.data = values.to(kinds[name])
    return model


def request(config: H3Config = TINY, seed: int = 1) -> dict[str, torch.Tensor]:
    """One packed request; rows of the three modalities are scattered, which catches position faults."""
    generator = torch.Generator().manual_seed(seed)
    count = TEXT + AUDIO + VIDEO
    order = torch.randperm(count, generator=generator)
    text, audio, video = (
        order[:TEXT].sort()[0],
        order[TEXT : TEXT + AUDIO].sort()[0],
        order[TEXT + AUDIO :].sort()[0],
    )
    tags, steps = torch.zeros(count, dtype=torch.long), torch.zeros(count, dtype=torch.long)
    tags[text], tags[audio], steps[audio] = 1, 2, 1
    return {
        "video": torch.randn(1, VIDEO, config.video_patch_dim, generator=generator),
        "audio": torch.randn(1, AUDIO, config.audio_in_channels, generator=generator),
        "text": torch.randn(1, TEXT, config.text_dim, generator=generator),
        "text_rows": text,
        "audio_rows": audio,
        "video_rows": video,
        "tags": tags,
        "steps": steps,
        "positions": torch.randint(0, 9, (count, 3), generator=generator).float(),
        "timesteps": torch.tensor([0.7, 0.3]),
    }


@torch.no_grad()
def diffusers_velocities(model: Any, r: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(video, audio) velocities of Diffusers' module."""
    out = model(
        hidden_states=r["video"],
        audio_hidden_states=r["audio"],
        encoder_hidden_states=r["text"],
        timestep=r["timesteps"],
        timestep_indices=r["steps"],
        token_tags=r["tags"],
        position_ids=r["positions"],
        video_indices=r["video_rows"],
        audio_indices=r["audio_rows"],
        text_indices=r["text_rows"],
    )
    return out.sample[0], out.audio_sample[0]


@torch.no_grad()
def native_velocities(model: Any, r: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(video, audio) velocities of vLLM-Omni's module for the same request."""
    count = len(r["tags"])
    x = torch.zeros(1, count, r["video"].shape[-1])
    audio = torch.zeros(1, count, r["audio"].shape[-1])
    x[0, r["video_rows"]], audio[0, r["audio_rows"]] = r["video"][0], r["audio"][0]
    video, sound = model(
        x=x,
        audio_x=audio,
        img_position_ids=r["positions"][None],
        unique_timesteps=r["timesteps"],
        inverse_indices=r["steps"],
        update_mask=torch.ones(VIDEO),
        token_tags=r["tags"],
        prompt_embeds=r["text"][0],
        img_pos_info={"position_ids": r["video_rows"]},
        audio_pos_info={"position_ids": r["audio_rows"]},
        text_pos_info={"position_ids": r["text_rows"]},
        img_pos_for_infer_output_info={"position_ids": r["video_rows"]},
        packed_seq_params={"cu_seqlens_q": torch.tensor([0, count]), "max_seqlen_q": count},
        refiner_packed_seq_params={"cu_seqlens_q": torch.tensor([0, TEXT]), "max_seqlen_q": TEXT},
    )
    return video, sound


def same_bits(a: Iterable[torch.Tensor], b: Iterable[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal in dtype, shape and every bit, and hold no NaN."""
    pairs = list(zip(a, b, strict=True))
    return all(
        x.dtype == y.dtype
        and x.shape == y.shape
        and not x.isnan().any()
        and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in pairs
    )
