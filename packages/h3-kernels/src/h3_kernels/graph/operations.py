"""What each node does: one operation per kind of node, the same for both engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from h3_kernels import fc1_swiglu as one_launch
from h3_kernels import nodes
from h3_kernels.attention_providers import AttentionCall
from h3_kernels.attention_providers import choose as choose_attention
from h3_kernels.contract import UNITS, parse_parallel_id
from h3_kernels.errors import InputError
from h3_kernels.graph.config import DiTConfig
from h3_kernels.graph.inputs import PackedInputs
from h3_kernels.graph.parallel import gather_columns, sum_gradient
from h3_kernels.graph.settings import Results, Settings, requested_operator
from h3_kernels.graph.table import Node
from h3_kernels.graph.weights import Linear, WeightsView
from h3_kernels.logical_keys import LogicalKeys
from h3_kernels.projection import projection, projection_group
from h3_kernels.providers import GemmCall, choose
from h3_kernels.row_parallel import row_parallel


@dataclass(frozen=True, slots=True)
class Constants:
    """Tensors that follow from the configuration alone."""

    inv_freq: Tensor
    frequencies: Tensor

    def to(self, device: torch.device) -> Constants:
        """The same on another device."""
        return Constants(self.inv_freq.to(device), self.frequencies.to(device))


@dataclass(slots=True)
class Run:
    """One forward: what operations need beside their slots."""

    config: DiTConfig
    weights: WeightsView
    inputs: PackedInputs
    settings: Settings
    constants: Constants
    traced: set[str] = field(default_factory=set)
    _sharded_keys: LogicalKeys | None = None

    def keys(self, node: Node) -> LogicalKeys | None:
        """Logical keys of the node's rows on this rank; None without gradients, which alone need them."""
        if self.inputs.keys is None or not torch.is_grad_enabled():
            return None
        sequence = self.settings.sequence
        if sequence is None or node.rows != "packed":
            return self.inputs.row_keys(node.rows)
        if self._sharded_keys is None:
            self._sharded_keys = LogicalKeys(sequence.shard(self.inputs.keys.keys))
        return self._sharded_keys

    def order(self, node: Node) -> Tensor | None:
        """Positions of the node's active rows in ascending key order, or None for as they lie."""
        keys = self.keys(node)
        return None if keys is None else keys.order


def _products(run: Run, node: Node, linear: Linear, x: Tensor) -> tuple[Tensor, ...]:
    """x times each of the linear's weights, this rank's columns."""
    s, weights = run.settings, linear.weights
    sharded = _is_shard(node, "columns", sum(w.shape[0] for w in weights), node.width, s.tp)
    common: dict[str, Any] = {
        "provider": s.provider,
        "logical_keys": run.keys(node),
        "tp": s.tp if sharded else 1,
        "rank": s.rank if sharded else 0,
        "collective": s.collective if sharded else None,
    }
    x = x.to(weights[0].dtype)
    if len(weights) > 1 and len({w.shape for w in weights}) == 1:
        return projection_group(x, weights, linear.biases, **common)
    whole = zip(weights, linear.biases, linear.parts, strict=True)
    return tuple(projection(x, w, bias, parts=parts, **common) for w, bias, parts in whole)


def _projection(run: Run, node: Node, x: Tensor) -> Results:
    linear = run.weights.linear(node.name)
    products = _products(run, node, linear, x)
    if len(linear.outputs) == 1:
        return (gather_columns(products[0], node.width, run.settings.tp, run.settings.collective),)
    width = linear.outputs[0][2] - linear.outputs[0][1]
    blocks = [nodes.column_blocks(product, product.shape[1] // width) for product in products]
    return tuple(blocks[which][start // width] for which, start, _ in linear.outputs)


def fc1_swiglu(run: Run, node: Node, x: Tensor) -> Tensor | None:
    """SwiGLU's output of ``node`` (an fc1) and the SwiGLU behind it in one launch.

    None where the two run apart: with gradients, for a provider asked for by name, a linear in pieces or with a bias,
    and what `h3_kernels.fc1_swiglu` does not serve.
    """
    if torch.is_grad_enabled() or run.settings.provider != "auto":
        return None
    linear = run.weights.linear(node.name)
    weight, gate = linear.weights[0], linear.outputs[0]
    if len(linear.weights) > 1 or linear.biases[0] is not None:
        return None
    _is_shard(node, "columns", weight.shape[0], node.width, run.settings.tp)
    x, gate_first = x.to(weight.dtype), gate[1] == 0
    if not one_launch.served(x, weight, gate_first=gate_first):
        return None
    return one_launch.fc1_swiglu(x, weight, gate_first=gate_first)


def _row_parallel(run: Run, node: Node, x: Tensor) -> Results:
    s, linear = run.settings, run.weights.linear(node.name)
    (weight,), (bias,) = linear.weights, linear.biases
    rows = x.flatten(1).to(weight.dtype)
    whole = not _is_shard(node, "input columns", weight.shape[1], _whole_input(run.config, node), s.tp)
    if not whole and rows.shape[1] != weight.shape[1]:
        rows = rows.narrow(1, s.rank * weight.shape[1], weight.shape[1])
    y = row_parallel(
        rows,
        weight,
        bias,
        contract=s.contract,
        tp=1 if whole else s.tp,
        rank=0 if whole else s.rank,
        collective=None if whole else s.collective,
        provider=s.provider,
        logical_keys=run.keys(node),
    )
    return (y,)


def _is_shard(node: Node, what: str, held: int, whole: int, tp: int) -> bool:
    """Whether a linear holds a rank's 1/tp of ``whole``, and not all. Raises InputError if it holds neither."""
    if held != whole and held * tp != whole:
        raise InputError(
            f"{node.name} holds {held} {what} of {whole} at tp={tp}; check the weight's shard, and tp in the settings"
        )
    return held != whole


def _whole_input(config: DiTConfig, node: Node) -> int:
    widths = {"out_proj": config.inner, "fc2": config.ffn, "proj_out": config.time_hidden}
    return widths[node.name.rpartition(".")[2]]


def _rope_table(run: Run, node: Node, positions: Tensor) -> Results:
    given = run.inputs.rope
    return (nodes.rope_table(positions, run.constants.inv_freq) if given is None else given,)


def _adaln_parts(run: Run, node: Node, projected: Tensor) -> Results:
    return nodes.adaln_parts(projected, node.width, len(node.writes))


def _rms_norm(run: Run, node: Node, x: Tensor) -> Results:
    weight = run.weights.parameter(node.parameters[0])
    return (nodes.rms_norm(x, weight, node.eps, order=run.order(node)),)


def _rms_norm_modulate(
    run: Run, node: Node, x: Tensor, shift: Tensor, scale: Tensor, index: Tensor
) -> Results:
    weight = run.weights.parameter(node.parameters[0])
    return (nodes.rms_norm_modulate(x, weight, shift, scale, index, node.eps, order=run.order(node)),)


def _gated_residual(run: Run, node: Node, x: Tensor, gate: Tensor, branch: Tensor, index: Tensor) -> Results:
    return (nodes.gated_residual(x, gate, branch, index, order=run.order(node)),)


def gated_residual_norm(run: Run, first: Node, second: Node, *reads: Tensor) -> Results:
    """Both nodes in one launch: reads of the first, then shift and scale of the second; returns (x, h)."""
    x, gate, branch, index, shift, scale = reads
    weight, order = run.weights.parameter(second.parameters[0]), run.order(second)
    return nodes.gated_residual_norm(x, gate, branch, weight, shift, scale, index, second.eps, order=order)


def _qk_norm_rope(run: Run, node: Node, q: Tensor, k: Tensor, table: Tensor | None = None) -> Results:
    q, k = _heads(run, q), _heads(run, k)
    config, settings = run.config, run.settings
    tp = config.heads // q.shape[1]
    q_weight, k_weight = (
        sum_gradient(run.weights.parameter(name), tp, settings.collective) for name in node.parameters
    )
    groups = max(1, math.gcd(config.heads, UNITS) // tp)
    order = run.order(node)
    return nodes.qk_norm_rope(q, k, q_weight, k_weight, table, node.eps, order=order, groups=groups)


def _heads(run: Run, x: Tensor) -> Tensor:
    """[T, heads, D] view of [T, heads * D]."""
    return x.view(x.shape[0], -1, run.config.head_dim)


def _attention(run: Run, node: Node, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Results:
    scale = run.config.head_dim**-0.5
    v = _heads(run, v)
    packed = node.rows == "packed"
    longest = run.inputs.max_seqlen if packed else run.inputs.text_max_seqlen
    sequence = run.settings.sequence if packed else None
    if sequence is not None:
        q, k, v = (sequence.to_heads(x, run.inputs.rows) for x in (q, k, v))
    a = nodes.attention(q, k, v, cu_seqlens, longest, scale, provider=run.settings.attention)
    return (a if sequence is None else sequence.to_rows(a, run.inputs.rows),)


def _scatter_rows(run: Run, node: Node, *slots: Tensor) -> Results:
    text, text_at, video, video_at, audio, audio_at, positions = slots
    parts = ((text, text_at), (video, video_at), (audio, audio_at))
    return (nodes.scatter_rows(positions.shape[0], text.dtype, *parts),)


def _shard_rows(run: Run, node: Node, *slots: Tensor) -> Results:
    sequence = run.settings.sequence
    return slots if sequence is None else tuple(sequence.shard(x) for x in slots)


def _gather_rows(run: Run, node: Node, x: Tensor, positions: Tensor) -> Results:
    sequence = run.settings.sequence
    return (x if sequence is None else sequence.gather(x, positions.shape[0]),)


OPERATIONS: dict[str, Callable[..., Results]] = {
    "projection": _projection,
    "row_parallel": _row_parallel,
    "rope_table": _rope_table,
    "adaln_index": lambda run, node, index, tags: (nodes.adaln_index(index, tags),),
    "adaln_parts": _adaln_parts,
    "timestep_sinusoid": lambda run, node, t: (nodes.timestep_sinusoid(t, run.constants.frequencies),),
    "silu": lambda run, node, x: (nodes.silu(x),),
    "rms_norm": _rms_norm,
    "rms_norm_modulate": _rms_norm_modulate,
    "qk_norm_rope": _qk_norm_rope,
    "attention": _attention,
    "residual": lambda run, node, x, y: (nodes.residual(x, y),),
    "gated_residual": _gated_residual,
    "swiglu": lambda run, node, gate, value: (nodes.swiglu(gate, value),),
    "scatter_rows": _scatter_rows,
    "select_rows": lambda run, node, x, at: (nodes.select_rows(x, at),),
    "shard_rows": _shard_rows,
    "gather_rows": _gather_rows,
}


def actual_operator(run: Run, node: Node, output: Tensor) -> str:
    """What computed a node whose first output is ``output``: its contract, and the provider that was chosen for it."""
    requested = requested_operator(node, run.settings)
    if not output.is_cuda:
        return f"{requested} by reference"
    if node.op == "attention":
        call = AttentionCall.of(output)
        return f"{requested} by {choose_attention(call, run.settings.attention, output.device).name}"
    if node.op not in ("projection", "row_parallel"):
        return f"{requested} by triton"
    providers = {
        choose(call, run.settings.provider, output.device).name for call in _gemm_calls(run, node, output)
    }
    return f"{requested} by {', '.join(sorted(providers))}"


def _gemm_calls(run: Run, node: Node, output: Tensor) -> Iterator[GemmCall]:
    """The products a linear's providers were asked for, on this rank, from contiguous rows."""
    s, linear = run.settings, run.weights.linear(node.name)
    for weight, bias in zip(linear.weights, linear.biases, strict=True):
        reduced = node.op == "row_parallel" and weight.shape[1] != _whole_input(run.config, node)
        units = parse_parallel_id(s.contract) // (s.tp if reduced else 1) if node.op == "row_parallel" else 1
        yield GemmCall(
            m=output.shape[0],
            n=weight.shape[0],
            k=weight.shape[1],
            units=units,
            a_dtype=weight.dtype,
            out_dtype=torch.float32 if reduced else weight.dtype,
            a_layout="k",
            b_layout="k",
            has_bias=bias is not None and not reduced,
            device_type="cuda",
            capability=torch.cuda.get_device_capability(output.device),
        )
