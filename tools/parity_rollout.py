"""The rollout half of parity.py. It runs in worker processes, which import this file by its path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from h3_adapter_diffusers.testing import fl2va, ref2va, t2va
from h3_adapter_diffusers.testing.native import native_inputs
from torch import Tensor

RANK = 8
REQUESTS = {
    "t2va": [t2va()],
    "fl2va": [fl2va()],
    "ref2va": [ref2va()],
    "3 packed": [t2va(), fl2va(), ref2va()],
}


def rollout(path: str, requests: str, padding: int, lora: bool, scope: str | None) -> list[Any] | str:
    """Velocities of all video and all audio rows from vLLM-Omni, bound to `scope` or as shipped (None).

    `path` holds the weights in the release layout and the adapters of `native_adapters`. Returns the engine's
    message if it refuses the packing.
    """
    from h3_adapter_vllm import install_h3_rollout
    from h3_adapter_vllm.testing import engine

    model = engine.build()
    state, adapters = torch.load(path, weights_only=True)
    model.load_weights(state.items())
    if scope is not None:
        install_h3_rollout(model, scope=scope)
    if lora:
        wrap(model, adapters)
    try:
        with torch.no_grad():
            outputs = model(**native_inputs(REQUESTS[requests], padding=padding))
    except ValueError as error:
        return str(error)
    return [rows.numpy() for rows in outputs]


def wrap(model: Any, adapters: Sequence[tuple[str, list[Tensor], list[Tensor]]]) -> None:
    """vLLM-Omni's own LoRA wrappers, as its manager puts them, with one adapter active."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.utils import replace_submodule
    from vllm_omni.diffusion.lora.utils import from_layer_diffusion

    config = LoRAConfig(max_lora_rank=RANK, max_loras=1, max_cpu_loras=1, lora_dtype=torch.bfloat16)
    for name, a, b in adapters:
        packed = [str(i) for i in range(len(a))] if len(a) > 1 else []
        wrapper = from_layer_diffusion(model.get_submodule(name), 1, config, packed)
        replace_submodule(model, name, wrapper)
        wrapper.set_lora(0, a if packed else a[0], b if packed else b[0])
