"""What the stock engines run where h3 runs its nodes: Diffusers' expressions in torch, vLLM-Omni's fused kernels.

Diffusers 0.42.1 (`transformer_minimax_h3.py`): bf16 tensors, one rounding after every operation. vLLM-Omni 0.30.0
(`diffusion/layers`): Triton kernels with fp32 inside; used only where that package is installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

EPS = 1e-5


def norm_modulate(x: Tensor, weight: Tensor, shift: Tensor, scale: Tensor, index: Tensor) -> Tensor:
    """Diffusers: norm, then two gathers, a product and a sum."""
    h = rms_norm(x, (x.shape[-1],), weight, EPS)
    return h * (1.0 + scale.index_select(0, index)) + shift.index_select(0, index)


def gated_residual(x: Tensor, gate: Tensor, branch: Tensor, index: Tensor) -> Tensor:
    """Diffusers: gather, product, sum."""
    return x + gate.index_select(0, index) * branch


def gated_residual_norm(
    x: Tensor, gate: Tensor, branch: Tensor, weight: Tensor, shift: Tensor, scale: Tensor, index: Tensor
) -> tuple[Tensor, Tensor]:
    """Diffusers: the two above, one after the other."""
    y = gated_residual(x, gate, branch, index)
    return y, norm_modulate(y, weight, shift, scale, index)


def swiglu(gate: Tensor, value: Tensor) -> Tensor:
    """Diffusers: silu rounded, then the product."""
    return value * silu(gate)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary = cos.shape[-1]
    rotating, passing = x[..., :rotary], x[..., rotary:]
    first, second = rotating.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return torch.cat((rotating * cos + turned * sin, passing), dim=-1).contiguous()


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, table: Tensor
) -> tuple[Tensor, Tensor]:
    """Diffusers: two norms, and for each a rotation with two concatenations."""
    half = table.shape[-1] // 2
    cos, sin = (t.repeat(1, 2)[:, None] for t in (table[:, :half], table[:, half:]))
    dims = (q.shape[-1],)
    return (
        _rotate(rms_norm(q, dims, q_weight, EPS), cos, sin),
        _rotate(rms_norm(k, dims, k_weight, EPS), cos, sin),
    )


def fused() -> dict[str, Callable[..., Any]]:
    """vLLM-Omni's fused forward for each node it has one for, empty without that package."""
    try:
        modulation = importlib.import_module("vllm_omni.diffusion.layers.indexed_modulation")
        rope = importlib.import_module("vllm_omni.diffusion.layers.fused_qk_norm_rope")
    except ImportError:
        return {}
    return {
        "rms_norm_modulate": lambda x, w, shift, scale, i: modulation.rms_norm_indexed_scale_shift(
            x, w, shift, scale, i, EPS
        ),
        "gated_residual": modulation.indexed_gate,
        "gated_residual_norm": lambda x, gate, branch, w, shift, scale, i: (
            modulation.indexed_gate_rms_norm_scale_shift(x, gate, branch, w, shift, scale, i, EPS)
        ),
        "qk_norm_rope": lambda q, k, wq, wk, table: rope.fused_qk_norm_rope(q, k, wq, wk, table, EPS),
    }
