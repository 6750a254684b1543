"""Each engine's own arithmetic of every node of the graph, as overlays: what `divergence_h200` plants node by node.

Diffusers' is the adapter's (`h3_adapter_diffusers.provider_ops`). vLLM-Omni's are the engine's own modules and fused
kernels, called on the node's inputs; with every node planted the graph must give the engine's velocities bit for bit,
which the benchmark checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from h3_adapter_diffusers import provider_ops
from h3_adapter_diffusers.overlays import diffusers_arithmetic
from h3_adapter_diffusers.weights import weights_view
from h3_kernels.graph import DiTConfig, Node, PackedDiT, PackedInputs
from torch import Tensor, nn

Outputs = tuple[Tensor, ...]
Planted = Callable[..., Outputs]


def diffusers_nodes(dit: PackedDiT, model: Any, inputs: PackedInputs) -> dict[str, Planted]:
    """Diffusers' arithmetic for every node that computes something."""
    bounds = {"packed": inputs.cu_seqlens.tolist(), "text": inputs.text_cu_seqlens.tolist()}
    context = provider_ops.Context(dit.config, weights_view(model), bounds)
    nodes = (node for node in dit.nodes if node.op in provider_ops.OPERATIONS)
    planted = {node.name: diffusers_arithmetic(context, node) for node in nodes}
    return planted | heads_over_all_rows(inputs, {"video": model.proj_out, "audio": model.audio_proj_out})


def vllm_nodes(dit: PackedDiT, model: Any, inputs: PackedInputs) -> dict[str, Planted]:
    """vLLM-Omni's arithmetic for every node that computes something."""
    engine = VllmArithmetic(dit.config, model, inputs)
    planted = {node.name: engine.of(node) for node in dit.nodes if node.op in engine.operations}
    heads = {name: getattr(model.final_layer, f"{name}_out") for name in ("video", "audio")}
    return planted | heads_over_all_rows(inputs, heads)


def heads_over_all_rows(inputs: PackedInputs, heads: dict[str, Any]) -> dict[str, Planted]:
    """Output heads as both engines run them: over every packed row, the stream's rows selected behind them.

    A library's product of fewer rows has other bits.
    """
    rows: dict[str, Tensor] = {}

    def gather(strict: Planted, h: Tensor, *rest: Tensor) -> Outputs:
        rows["h"] = h.float()
        return strict(h, *rest)

    def head(name: str) -> Planted:
        def all_rows(strict: Planted, x: Tensor) -> Outputs:
            y = heads[name](rows["h"])
            y = y[0] if isinstance(y, tuple) else y
            return (y.index_select(0, getattr(inputs, f"{name}_positions")),)

        return all_rows

    return {"gather": gather, **{f"final_layer.{name}_out": head(name) for name in heads}}


class VllmArithmetic:
    """The engine's operations, by the node's operation."""

    def __init__(self, config: DiTConfig, model: Any, inputs: PackedInputs) -> None:
        from vllm_omni.diffusion.models.minimax_h3 import minimax_h3_transformer as own

        self.config, self.model, self.inputs, self.own = config, model, inputs, own
        self.branch: tuple[Tensor, ...] = ()
        self.operations: dict[str, Callable[..., Outputs]] = {
            "projection": self.linear,
            "row_parallel": self.linear,
            "rope_table": self.rope_table,
            "timestep_sinusoid": self.sinusoid,
            "silu": lambda node, x: (nn.functional.silu(x),),
            "rms_norm": lambda node, x: (self.module(node)(x),),
            "rms_norm_modulate": self.norm_modulate,
            "qk_norm_rope": self.qk_norm_rope,
            "attention": self.attention,
            "residual": lambda node, x, y: (x + y,),
            "gated_residual": self.gated_residual,
            "swiglu": lambda node, gate, value: (self.module(node)(torch.cat((gate, value), dim=-1)),),
        }

    def of(self, node: Node) -> Planted:
        """The overlay of ``node``."""
        operation = self.operations[node.op]

        def vllm_omni(strict: Planted, *inputs: Tensor) -> Outputs:
            return operation(node, *inputs)

        return vllm_omni

    def module(self, node: Node) -> Any:
        """The engine's module of that name."""
        return self.model.get_submodule(node.name)

    def linear(self, node: Node, x: Tensor) -> Outputs:
        """The layer, its result cut where the node's outputs are."""
        layer = self.module(node)
        y = layer(x.flatten(1).to(layer.weight.dtype))[0]
        return y.chunk(len(node.writes), dim=-1)

    def rope_table(self, node: Node, positions: Tensor) -> Outputs:
        """Angles in fp32, cosines and sines rounded to bf16."""
        table: Tensor = self.own._build_rope_table(self.model.rope(positions[None].float()))
        return (table,)

    def sinusoid(self, node: Node, timesteps: Tensor) -> Outputs:
        """As in `MiniMaxH3TimeEmbedder.forward`."""
        half = self.config.freq_dim // 2
        at = torch.arange(half, dtype=torch.float32, device=timesteps.device)
        angles = timesteps.float()[:, None] * torch.exp(-9.210340371976184 * at / half)[None]
        return (torch.cat((torch.cos(angles), torch.sin(angles)), dim=-1),)

    def norm_modulate(self, node: Node, x: Tensor, shift: Tensor, scale: Tensor, index: Tensor) -> Outputs:
        """One kernel; behind attention together with the gated residual; apart in the final layer."""
        norm = self.module(node)
        if node.name == "final_layer.norm":
            return (self.own.indexed_scale_shift_(norm(x), shift, scale, index),)
        tables = (norm.weight, shift, scale, index, norm.variance_epsilon)
        if not node.name.endswith("norm2"):
            return (self.own.rms_norm_indexed_scale_shift(x, *tables),)
        residual, gate, branch = self.branch
        _, h = self.own.indexed_gate_rms_norm_scale_shift(residual, gate, branch, *tables)
        return (h,)

    def gated_residual(self, node: Node, x: Tensor, gate: Tensor, branch: Tensor, index: Tensor) -> Outputs:
        """One kernel; its inputs are kept for the norm that the engine runs in the same launch."""
        self.branch = (x.clone(), gate, branch.clone())
        return (self.own.indexed_gate(x.clone(), gate, branch.clone(), index),)

    def qk_norm_rope(self, node: Node, q: Tensor, k: Tensor, table: Tensor | None = None) -> Outputs:
        """One kernel, or in the refiner the two norms."""
        attention = self.model.get_submodule(node.name.rpartition(".")[0])
        q, k = (x.view(x.shape[0], -1, self.config.head_dim) for x in (q, k))
        if table is None:
            return attention.q_norm(q), attention.k_norm(k)
        weights = (attention.q_norm.weight, attention.k_norm.weight)
        q, k = self.own.fused_qk_norm_rope(
            q.clone(), k.clone(), *weights, table, attention.q_norm.variance_epsilon
        )
        return q, k

    def attention(self, node: Node, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Outputs:
        """The engine's attention backend on the packed rows."""
        attention = self.model.get_submodule(node.name.rpartition(".")[0])
        longest = self.inputs.max_seqlen if node.rows == "packed" else self.inputs.text_max_seqlen
        v = v.reshape(v.shape[0], -1, self.config.head_dim)
        out = attention._run_packed_attention(
            q, k, v, cu_seqlens=bounds, max_seqlen=longest, packed_total=q.shape[0]
        )
        return (out,)
