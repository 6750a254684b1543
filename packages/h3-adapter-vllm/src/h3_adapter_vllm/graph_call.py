"""What the graph takes in the place of the engine's forward: which models, which calls, and the masks behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from h3_kernels.attention_providers import AttentionCall, choose
from h3_kernels.errors import ProviderError
from torch import Tensor

from h3_adapter_vllm.errors import BoundModelError
from h3_adapter_vllm.settings import Settings

OPTIONAL = frozenset({"update_audio_mask", "skip_mask_out_condition", "video_token_layout", "rope_table"})
"""Keywords of the engine's forward that may be absent."""


def graph_obstacles(model: Any, settings: Settings) -> Iterator[str]:
    """Reasons not to replace the model's forward, beside those of its linears."""
    if "forward" in vars(model):
        yield "the model's forward is patched on the instance (offload or another install); remove that first"
    if getattr(model, "vsa_gates_enabled", False):
        yield "VSA gates are on: the graph attends densely; use scope='projections'"
    parallel = model.parallel_config
    for kind in ("ring_degree", "allgather_degree"):
        if int(getattr(parallel, kind, 1)) != 1:
            yield f"{kind}={getattr(parallel, kind)}: the graph knows Ulysses; use ulysses_degree"
    try:
        attention_provider(model, settings, model.blocks[0].norm1.weight.device)
    except ProviderError as error:
        yield str(error)


def attention_provider(model: Any, settings: Settings, device: torch.device) -> str:
    """Name of what attends in the graph on ``device``. Raises ProviderError if nothing may."""
    if device.type == "cpu":
        return "written order"
    heads = model.arch.num_attention_heads // settings.tp // int(model.parallel_config.ulysses_degree)
    sample = torch.empty(0, heads, model.arch.attention_head_dim, dtype=torch.bfloat16, device=device)
    return choose(AttentionCall.of(sample), settings.attention, device).name


def check_call(kwargs: Mapping[str, Any]) -> None:
    """Raise what the engine's forward raises for its keywords, and BoundModelError for what the graph does not take."""
    from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import _FORWARD_SUPPORTED_KWARGS

    unexpected = sorted(set(kwargs) - _FORWARD_SUPPORTED_KWARGS)
    if unexpected:
        raise TypeError(f"MiniMaxH3DiTModel.forward received unexpected kwargs: {unexpected}")
    missing = sorted(name for name in _FORWARD_SUPPORTED_KWARGS - OPTIONAL if kwargs.get(name) is None)
    if missing:
        raise ValueError(f"MiniMaxH3DiTModel.forward requires kwargs {missing}")
    if kwargs.get("rope_table") is not None:
        raise BoundModelError("rope_table is given: the graph computes its own, in its written order")
    rows, wanted = (_positions(kwargs[name]) for name in ("img_pos_info", "img_pos_for_infer_output_info"))
    if rows.data_ptr() != wanted.data_ptr() or rows.shape != wanted.shape:
        raise BoundModelError(
            "img_pos_for_infer_output_info is not img_pos_info: the graph returns one velocity a row"
        )


def _positions(info: Any) -> Tensor:
    rows: Tensor = info["position_ids"] if isinstance(info, Mapping) else info.position_ids
    return rows


def masked(video: Tensor, audio: Tensor, kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Velocities with condition rows zeroed, as the engine does it."""
    if kwargs.get("skip_mask_out_condition"):
        return video, audio
    video = video * kwargs["update_mask"].view(-1).to(video.device).unsqueeze(-1)
    audio_mask = kwargs.get("update_audio_mask")
    return video, audio if audio_mask is None else audio * audio_mask.view(-1).unsqueeze(-1)
