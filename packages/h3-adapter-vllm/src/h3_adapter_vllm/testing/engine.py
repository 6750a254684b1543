"""The real engine, small enough for a CPU: configuration, process groups, weights and packed inputs.

Everything here drives ``vllm_omni``'s own ``MiniMaxH3DiTModel``; nothing of the model is replaced. vLLM-Omni 0.30 has
no CPU platform, so :func:`engine` selects its SDPA attention by hand, and :func:`build` lets its linears run torch's
``linear`` instead of packing the weights for oneDNN (which would drop them).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")  # vLLM asks the network for an address otherwise

import torch
from h3_kernels.testing import tiny
from h3_kernels.testing.tiny import TINY
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase
from vllm_omni.diffusion.attention.backends.sdpa import SDPAImpl
from vllm_omni.diffusion.distributed.parallel_state import (
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3DiTModel
from vllm_omni.platforms.interface import UnspecifiedOmniPlatform

# Modality tags of token_tags; -1 is padding.
TAGS = {"video": 0, "text": 1, "audio": 2}

SDPA = "vllm_omni.diffusion.attention.backends.sdpa.SDPABackend"


@contextlib.contextmanager
def engine(
    *, tp: int = 1, sequence: int = 1, rank: int = 0, world: int = 1, init_method: str | None = None
) -> Iterator[None]:
    """vLLM's configuration, the engine's gloo groups, and SDPA attention, for the duration of the block.

    ``world`` processes call this together, each with its ``rank``. ``tp`` ranks share a tensor-parallel group and
    ``sequence`` of those a Ulysses group; ``world`` is a multiple of both together. The default process group stays up
    after the block (it belongs to the process); the others do not.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(
                UnspecifiedOmniPlatform, "get_diffusion_attn_backend_cls", classmethod(lambda *_, **__: SDPA)
            )
        )
        stack.enter_context(mock.patch.object(SDPAImpl, "forward", SDPAImpl.forward_cuda))
        stack.enter_context(set_current_vllm_config(VllmConfig()))
        init_method = init_method or f"file://{tempfile.mkdtemp()}/rendezvous"
        if not torch.distributed.is_initialized():  # the engine's own call wants a device to set
            torch.distributed.init_process_group("gloo", init_method, world_size=world, rank=rank)
        init_distributed_environment(world, rank, init_method, rank, "gloo")
        initialize_model_parallel(
            sequence_parallel_size=sequence, ulysses_degree=sequence, tensor_parallel_size=tp, backend="gloo"
        )
        stack.callback(destroy_model_parallel)
        yield


def build(
    config: Mapping[str, Any] = TINY,
    *,
    adaln_cache: bool = False,
    ulysses_degree: int = 1,
    device: str = "cpu",
    plain_linears: bool = True,
) -> MiniMaxH3DiTModel:
    """A ``MiniMaxH3DiTModel`` for the current tp group, weights not yet set; sizes ``config`` lacks are the release's.

    ``plain_linears=False`` leaves the linears as their constructor does: on a CPU they then run only after
    ``quant_method.process_weights_after_loading``.
    """
    hidden = config.get("hidden_size", 5376)
    sizes = {**config, "adaln_out_features": 18 * hidden, "final_adaln_out_features": 2 * hidden}
    od_config = SimpleNamespace(
        tf_model_config=sizes,
        cache_config={"minimax_h3_adaln_cache": adaln_cache},
        parallel_config=SimpleNamespace(ulysses_degree=ulysses_degree),
    )
    with torch.device(device):
        model = MiniMaxH3DiTModel(od_config, diffusers_weights=False).eval()
    if plain_linears and device == "cpu":
        run_plain(model)
    return model


def run_plain(model: nn.Module) -> None:
    """Let every linear run torch's own on a CPU, its weight as it is; needed again for linears added later."""
    for module in model.modules():
        if isinstance(module, LinearBase):
            module.cpu_linear = torch.nn.functional.linear


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Fill every parameter of a tp=1 model with ``h3_kernels.testing.tiny.randomise``, and the rotary frequencies."""
    tiny.randomise(model, seed)
    with torch.no_grad():
        rope = model.get_buffer("rope.inv_freq")
        width = rope.shape[0]
        rope.copy_(1.0 / 10000.0 ** (torch.arange(0, 2 * width, 2, dtype=torch.float32) / (2 * width)))


def release_state(model: MiniMaxH3DiTModel) -> dict[str, Tensor]:
    """The tp=1 model's tensors in the release layout (qkv rows per head), as ``load_weights`` expects them."""
    heads, head_dim = model.arch.num_attention_heads, model.arch.attention_head_dim
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if name.endswith("attn.qkv_proj.weight"):
            thirds = tensor.view(3, heads, head_dim, -1)
            state[name] = thirds.transpose(0, 1).reshape(tensor.shape).contiguous()
    return state


@dataclass(frozen=True)
class Request:
    """One packed document: its text rows [Nt, E], video rows [Nv, C], audio rows [Na, A] and positions [S, 3]."""

    text: Tensor
    video: Tensor
    audio: Tensor
    positions: Tensor
    timesteps: tuple[float, float] = (0.7, 0.3)  # video, audio; in [0, 1]

    @property
    def tags(self) -> Tensor:
        """Modality of each packed row [S]: text, then video, then audio."""
        counts = torch.tensor([len(self.text), len(self.video), len(self.audio)])
        return torch.tensor([TAGS["text"], TAGS["video"], TAGS["audio"]]).repeat_interleave(counts)

    @property
    def row_timesteps(self) -> Tensor:
        """Timestep of each packed row [S]; text rows take the video's, as the engine packs them."""
        return torch.where(self.tags == TAGS["audio"], self.timesteps[1], self.timesteps[0])


def request(
    seed: int = 1, *, text: int = 5, video: int = 8, audio: int = 7, config: Mapping[str, Any] = TINY
) -> Request:
    """A random request of ``text`` + ``video`` + ``audio`` rows."""
    generator = torch.Generator().manual_seed(seed)
    return Request(
        text=torch.randn(text, config["text_dim"], generator=generator),
        video=torch.randn(video, config["in_channels"] * 4, generator=generator),
        audio=torch.randn(audio, config["audio_in_channels"], generator=generator),
        positions=torch.randint(0, 9, (text + video + audio, 3), generator=generator).float(),
    )


def forward_inputs(requests: Sequence[Request], *, padding: int = 0, device: str = "cpu") -> dict[str, Any]:
    """Keyword arguments of ``MiniMaxH3DiTModel.forward``: ``requests`` packed in order, then ``padding`` empty rows.

    Padding rows carry tag -1 and form a document of their own, as vLLM-Omni's batched packing lays them out.
    """
    tags = torch.cat([*(r.tags for r in requests), torch.full((padding,), -1)])
    timesteps = torch.cat(
        [*(r.row_timesteps for r in requests), torch.full((padding,), requests[-1].timesteps[0])]
    )
    unique, inverse = torch.unique(timesteps, sorted=True, return_inverse=True)
    at = {kind: (tags == tag).nonzero().flatten() for kind, tag in TAGS.items()}
    x = torch.zeros(1, len(tags), requests[0].video.shape[1])
    x[0, at["video"]] = torch.cat([r.video for r in requests])
    audio_x = torch.zeros(1, len(tags), requests[0].audio.shape[1])
    audio_x[0, at["audio"]] = torch.cat([r.audio for r in requests])
    positions = torch.cat([*(r.positions for r in requests), torch.zeros(padding, 3)])
    places = {kind: {"position_ids": rows.to(device)} for kind, rows in at.items()}
    lengths = [len(r.tags) for r in requests]
    tail = [padding] if padding else []
    return {
        "x": x.to(device),
        "audio_x": audio_x.to(device),
        "img_position_ids": positions[None].to(device),
        "unique_timesteps": unique.to(device),
        "inverse_indices": inverse.to(device),
        "update_mask": torch.ones(len(at["video"]), device=device),
        "token_tags": tags.to(device),
        "prompt_embeds": torch.cat([r.text for r in requests]).to(device),
        "img_pos_info": places["video"],
        "audio_pos_info": places["audio"],
        "text_pos_info": places["text"],
        "img_pos_for_infer_output_info": places["video"],
        "packed_seq_params": {**_documents(lengths, tail, device), "num_requests": len(requests)},
        "refiner_packed_seq_params": _documents([len(r.text) for r in requests], [], device),
    }


def _documents(lengths: list[int], tail: list[int], device: str) -> dict[str, Any]:
    bounds = torch.tensor([0, *itertools.accumulate(lengths + tail)], dtype=torch.int32, device=device)
    return {"cu_seqlens_q": bounds, "max_seqlen_q": max(lengths)}


def velocities(model: nn.Module, requests: Sequence[Request], *, padding: int = 0) -> tuple[Tensor, Tensor]:
    """(video [sum Nv, C], audio [sum Na, A]) fp32 velocities of one forward without gradients."""
    device = str(next(model.parameters()).device)
    with torch.no_grad():
        video, audio = model(**forward_inputs(requests, padding=padding, device=device))
    return video, audio


def save_state(state: Mapping[str, Tensor], path: Path) -> None:
    """Write ``state`` for worker processes to load."""
    torch.save(dict(state), path)
