"""The rollout half of parity.py. It runs in worker processes, which import this file by its path."""

from __future__ import annotations

from typing import Any

import torch
from h3_adapter_diffusers.testing.native import engine_lora, native_inputs
from h3_adapter_diffusers.testing.packings import fl2va, ref2va, t2va

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
        engine_lora(model, adapters, rank=RANK)
    try:
        with torch.no_grad():
            outputs = model(**native_inputs(REQUESTS[requests], padding=padding))
    except ValueError as error:
        return str(error)
    return [rows.numpy() for rows in outputs]
