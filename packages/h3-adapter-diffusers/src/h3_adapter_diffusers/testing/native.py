"""The same requests and adapters in the words of vLLM-Omni's `MiniMaxH3DiTModel`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from h3_adapter_diffusers.bindings import QKV
from h3_adapter_diffusers.lora import active_terms, is_wrapper
from h3_adapter_diffusers.survey import find_sites
from h3_adapter_diffusers.testing.tiny import Request
from h3_adapter_diffusers.weights import native_names


def native_inputs(
    requests: Sequence[Request],
    *,
    video_t: float = 0.7,
    audio_t: float = 0.3,
    padding: int = 0,
    device: str = "cpu",
) -> dict[str, Any]:
    """Keyword arguments of one native forward over `requests` packed in order, then `padding` empty rows.

    Padding rows carry tag -1 and are a document of their own, as `vllm_omni...batched_packing` lays them out.
    Condition rows are returned unmasked, as Diffusers returns them.
    """
    requests = [request.to("cpu") for request in requests]
    starts = [0]
    for request in requests:
        starts.append(starts[-1] + len(request.packed))
    total = starts[-1] + padding
    tags = torch.full((total,), -1)
    positions = torch.zeros(1, total, 3)
    timesteps = torch.full((total,), video_t)
    x = torch.zeros(1, total, requests[0].video.shape[1])
    audio_x = torch.zeros(1, total, requests[0].audio.shape[1])
    places: dict[str, list[Tensor]] = {"text": [], "video": [], "audio": []}
    for start, request in zip(starts, requests, strict=False):
        packed, rows = request.packed, slice(start, start + len(request.packed))
        tags[rows], positions[0, rows] = packed.token_tags, packed.position_ids.float()
        values, index = packed.row_timesteps(video_t, audio_t)
        timesteps[rows] = values[index]
        for name, at in places.items():
            at.append(getattr(packed, f"{name}_indices") + start)
        x[0, places["video"][-1]], audio_x[0, places["audio"][-1]] = request.video, request.audio
    unique, inverse = torch.unique(timesteps, sorted=True, return_inverse=True)
    where = {name: {"position_ids": torch.cat(rows)} for name, rows in places.items()}
    inputs = {
        "x": x,
        "audio_x": audio_x,
        "img_position_ids": positions,
        "unique_timesteps": unique,
        "inverse_indices": inverse,
        "update_mask": torch.ones(len(where["video"]["position_ids"])),
        "skip_mask_out_condition": True,
        "token_tags": tags,
        "prompt_embeds": torch.cat([request.text for request in requests]),
        "img_pos_info": where["video"],
        "audio_pos_info": where["audio"],
        "text_pos_info": where["text"],
        "img_pos_for_infer_output_info": where["video"],
        "packed_seq_params": {
            **_documents(starts + ([total] if padding else []), len(requests)),
            "num_requests": len(requests),
        },
        "refiner_packed_seq_params": _documents(_bounds(places["text"]), len(requests)),
    }
    return _moved(inputs, device, {})


def _moved(inputs: dict[str, Any], device: str, seen: dict[int, Tensor]) -> dict[str, Any]:
    """The same nesting on `device`; a tensor that stands twice stays one tensor, as the engine passes it."""

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return _moved(value, device, seen)
        return seen.setdefault(id(value), value.to(device)) if isinstance(value, Tensor) else value

    return {name: moved(value) for name, value in inputs.items()}


def native_adapters(model: nn.Module) -> Iterator[tuple[str, list[Tensor], list[Tensor]]]:
    """(native linear, A of each slice, B of each slice with the scale in it) of a model's active LoRA, bf16.

    q, k, v and gate, value are the slices of `attn.qkv_proj` and `mlp.fc1`, in native order, as the rollout
    engine receives them from a weight sync: B of ff.net.0.proj is [value; gate], so its halves change places.
    """
    names = native_names(model)
    slices: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
    for site in find_sites(model):
        if not is_wrapper(site.module):
            continue
        for term in active_terms(site.name, site.module, torch.bfloat16):
            a, b = term.a.detach(), (term.b * term.scaling).detach()
            found = slices.setdefault(names[site.name], {})
            if site.rule.parts == (1, 0):
                value, gate = b.chunk(2)
                found |= {0: (a, gate.contiguous()), 1: (a, value.contiguous())}
            else:
                order = [name.rpartition(".")[2] for name in QKV]
                found[order.index(site.attribute) if site.attribute in order else 0] = a, b
    for name, found in slices.items():
        ordered = [found[i] for i in sorted(found)]
        yield name, [a for a, _ in ordered], [b for _, b in ordered]


def engine_lora(
    model: nn.Module, adapters: Iterable[tuple[str, list[Tensor], list[Tensor]]], *, rank: int
) -> None:
    """Give a vLLM-Omni model the `adapters` of `native_adapters`, in the engine's own wrappers of buffer rank
    `rank`.

    Linears are wrapped as the engine's LoRA manager does it; those wrapped already only take the new weights.
    """
    from vllm.config.lora import LoRAConfig
    from vllm.lora.utils import replace_submodule
    from vllm_omni.diffusion.lora.utils import from_layer_diffusion

    config = LoRAConfig(max_lora_rank=rank, max_loras=1, max_cpu_loras=1, lora_dtype=torch.bfloat16)
    for name, a, b in adapters:
        wrapper: Any = model.get_submodule(name)
        if not hasattr(wrapper, "base_layer"):
            packed = [str(i) for i in range(len(a))] if len(a) > 1 else []
            wrapper = from_layer_diffusion(wrapper, 1, config, packed)
            replace_submodule(model, name, wrapper)
        wrapper.set_lora(0, a if len(a) > 1 else a[0], b if len(b) > 1 else b[0])


def _bounds(rows: list[Tensor]) -> list[int]:
    bounds = [0]
    for part in rows:
        bounds.append(bounds[-1] + len(part))
    return bounds


def _documents(bounds: list[int], documents: int) -> dict[str, Any]:
    longest = max([stop - start for start, stop in pairwise(bounds)][:documents])
    return {"cu_seqlens_q": torch.tensor(bounds, dtype=torch.int32), "max_seqlen_q": longest}
