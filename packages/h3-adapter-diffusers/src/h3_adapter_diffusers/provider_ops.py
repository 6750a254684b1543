"""Diffusers' own arithmetic of every node of the graph: what an overlay or audit mode runs in a node's place.

One function per operation of `h3_kernels.graph`, in the operations and roundings of diffusers 0.40 to 0.42
(`transformer_minimax_h3.py`, `FeedForward`, `TimestepEmbedding`): on a CPU, a model with every node replaced
gives the bits of the model before the install. Operations that only copy have no arithmetic of their own and
are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from h3_kernels.graph import DiTConfig, Linear, Node, WeightsView
from h3_kernels.nodes import inverse_frequencies
from torch import Tensor
from torch.nn import functional

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Context:
    """What an operation reads beside its inputs. `bounds` are the documents of the packed and of the text
    rows."""

    config: DiTConfig
    weights: WeightsView
    bounds: dict[str, Sequence[int]]


def linear(context: Context, node: Node, x: Tensor) -> Outputs:
    """Diffusers aligns the activation with the parameter's dtype, then `nn.Linear`."""
    held: Linear = context.weights.linear(node.name)
    products = [
        functional.linear(x.flatten(1).to(w.dtype), w, b)
        for w, b in zip(held.weights, held.biases, strict=True)
    ]
    return tuple(products[which][:, start:stop] for which, start, stop in held.outputs)


def rope_table(context: Context, node: Node, positions: Tensor) -> Outputs:
    """fp32 angles; cos and sin are cast to the activation's dtype where they are used."""
    c = context.config
    freqs = inverse_frequencies(c.rope_freqs, c.rope_theta).to(positions.device)
    angles = (positions.float().unsqueeze(-1) * freqs.view(1, 1, -1)).flatten(1)
    return (torch.cat((angles.cos(), angles.sin()), dim=-1).to(torch.bfloat16),)


def timestep_sinusoid(context: Context, node: Node, timesteps: Tensor) -> Outputs:
    """`Timesteps(flip_sin_to_cos=True, downscale_freq_shift=0)`."""
    from diffusers.models.embeddings import get_timestep_embedding

    embedding: Tensor = get_timestep_embedding(
        timesteps, context.config.freq_dim, flip_sin_to_cos=True, downscale_freq_shift=0
    )
    return (embedding,)


def silu(context: Context, node: Node, x: Tensor) -> Outputs:
    """`nn.SiLU`."""
    return (functional.silu(x),)


def rms_norm(context: Context, node: Node, x: Tensor) -> Outputs:
    """`nn.RMSNorm`."""
    return (_norm(context, node.parameters[0], x, node.eps),)


def rms_norm_modulate(
    context: Context, node: Node, x: Tensor, shift: Tensor, scale: Tensor, index: Tensor
) -> Outputs:
    """Norm, `1 + scale`, product and sum, each rounded to the activation's dtype."""
    normed = _norm(context, node.parameters[0], x, node.eps)
    return (normed * (1.0 + scale.index_select(0, index)) + shift.index_select(0, index),)


def qk_norm_rope(context: Context, node: Node, q: Tensor, k: Tensor, table: Tensor | None = None) -> Outputs:
    """`nn.RMSNorm` per head, then the rotation of the leading channels, products and sum rounded."""
    dim = context.config.head_dim
    normed = (
        _norm(context, name, x.view(x.shape[0], -1, dim), node.eps)
        for name, x in zip(node.parameters, (q, k), strict=True)
    )
    return tuple(x if table is None else _rotate(x, table) for x in normed)


def attention(context: Context, node: Node, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Outputs:
    """torch SDPA, one call per document."""
    v = v.view(v.shape[0], -1, context.config.head_dim)
    bounds = context.bounds["packed" if node.rows == "packed" else "text"]
    documents = []
    for start, stop in pairwise(bounds):
        heads = [t[start:stop].transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
        out = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        documents.append(out[0].transpose(0, 1))
    return (torch.cat(documents),)


def residual(context: Context, node: Node, x: Tensor, y: Tensor) -> Outputs:
    """A sum."""
    return (x + y,)


def gated_residual(
    context: Context, node: Node, x: Tensor, gate: Tensor, y: Tensor, index: Tensor
) -> Outputs:
    """A product and a sum, each rounded."""
    return (x + gate.index_select(0, index) * y,)


def swiglu(context: Context, node: Node, gate: Tensor, value: Tensor) -> Outputs:
    """SiLU and product, each rounded."""
    return (value * functional.silu(gate),)


OPERATIONS: dict[str, Callable[..., Outputs]] = {
    "projection": linear,
    "row_parallel": linear,
    **{
        f.__name__: f
        for f in (
            rope_table,
            timestep_sinusoid,
            silu,
            rms_norm,
            rms_norm_modulate,
            qk_norm_rope,
            attention,
            residual,
            gated_residual,
            swiglu,
        )
    },
}
"""Operation of a graph node -> Diffusers' arithmetic."""


def _norm(context: Context, name: str, x: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), context.weights.parameter(name), eps)


def _rotate(x: Tensor, table: Tensor) -> Tensor:
    cos, sin = (half.to(x.dtype)[:, None, :].repeat(1, 1, 2) for half in table.chunk(2, dim=-1))
    width = cos.shape[-1]
    turned, kept = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, kept), dim=-1)
