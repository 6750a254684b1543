"""Running the stages: one operation per node, the same for both engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from h3_kernels import nodes
from h3_kernels.collectives.protocol import Collective
from h3_kernels.contract import PROJECTION, UNITS, parallel_id
from h3_kernels.errors import InputError
from h3_kernels.graph.config import DiTConfig
from h3_kernels.graph.inputs import PackedInputs
from h3_kernels.graph.table import INPUT_SLOTS, OUTPUT_SLOTS, Node, Stage, build_stages
from h3_kernels.graph.weights import Linear, WeightsView
from h3_kernels.logical_keys import LogicalKeys
from h3_kernels.projection import projection
from h3_kernels.row_parallel import row_parallel

Slots = dict[str, Tensor]
Results = tuple[Tensor, ...]
Strict = Callable[..., Results]
Replacement = Callable[..., Results]


class Tracer(Protocol):
    """What watches a run. Called after every node, once even when checkpointing runs it again."""

    def record(self, node: Node, requested: str, actual: str, outputs: Mapping[str, Tensor]) -> None:
        """``requested`` and ``actual`` name the contract and what computed it; ``outputs`` by slot."""
        ...


class SequenceParallel(Protocol):
    """Rows of the packed sequence spread over ranks, heads exchanged around attention (Ulysses). Copies only."""

    def shard(self, x: Tensor) -> Tensor:
        """This rank's rows of ``x`` [T, ...]."""
        ...

    def gather(self, x: Tensor, total: int) -> Tensor:
        """All ``total`` rows from every rank's."""
        ...

    def to_heads(self, x: Tensor, total: int) -> Tensor:
        """[T, heads / ranks, D] of this rank's heads, from its rows [t, heads, D]."""
        ...

    def to_rows(self, x: Tensor, total: int) -> Tensor:
        """The inverse of ``to_heads``."""
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run is computed. Nothing here changes a bit of the result, except ``contract`` and ``overlay``.

    ``overlay`` maps a node's name to a replacement ``f(strict, *inputs) -> outputs``: ``strict(*inputs)`` is
    the node's own computation. An adapter uses it to keep a node on provider arithmetic, to add a LoRA term,
    or to plant a deviation. ``fuse``: run gated residual and norm in one launch where the bits are the same.
    """

    tp: int = 1
    rank: int = 0
    collective: Collective | None = None
    contract: str = parallel_id(UNITS)
    provider: str = "auto"
    sequence: SequenceParallel | None = None
    overlay: Mapping[str, Replacement] = field(default_factory=dict)
    tracer: Tracer | None = None
    checkpoint: bool = False
    fuse: bool = True


@dataclass(slots=True)
class _Run:
    """One forward: what operations need beside their slots."""

    config: DiTConfig
    weights: WeightsView
    inputs: PackedInputs
    settings: Settings
    inv_freq: Tensor
    keys: dict[str, LogicalKeys | None]
    traced: set[str] = field(default_factory=set)

    def order(self, node: Node) -> Tensor | None:
        keys = self.keys[node.rows]
        return None if keys is None else keys.order


def _gather_columns(run: _Run, y: Tensor, width: int) -> Tensor:
    """All ``width`` columns of a column-parallel product; copies only."""
    if y.shape[1] == width:
        return y
    collective = run.settings.collective
    if collective is None or y.shape[1] * run.settings.tp != width:
        raise InputError(
            f"a linear gave {y.shape[1]} columns of {width} at tp={run.settings.tp}; check its shard"
        )
    return collective.all_gather_rows(y.t().contiguous(), width).t()


def _cut(linear: Linear, products: list[Tensor]) -> Results:
    return tuple(products[which][:, start:stop] for which, start, stop in linear.outputs)


def _projection(run: _Run, node: Node, x: Tensor) -> Results:
    s, linear = run.settings, run.weights.linear(node.name)
    sharded = sum(w.shape[0] for w in linear.weights) != node.width
    tp = s.tp if sharded else 1
    products = [
        projection(
            x.to(weight.dtype),
            weight,
            bias,
            provider=s.provider,
            logical_keys=run.keys[node.rows],
            parts=parts,
            tp=tp,
            rank=s.rank if sharded else 0,
            collective=s.collective if sharded else None,
        )
        for weight, bias, parts in zip(linear.weights, linear.biases, linear.parts, strict=True)
    ]
    outputs = _cut(linear, products)
    return tuple(_gather_columns(run, y, node.width) for y in outputs) if len(outputs) == 1 else outputs


def _row_parallel(run: _Run, node: Node, x: Tensor) -> Results:
    s, linear = run.settings, run.weights.linear(node.name)
    (weight,), (bias,) = linear.weights, linear.biases
    rows = x.flatten(1).to(weight.dtype)
    whole = s.tp == 1 or _whole_input(run.config, node) == weight.shape[1]
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
        logical_keys=run.keys[node.rows],
    )
    return (y,)


def _whole_input(config: DiTConfig, node: Node) -> int:
    widths = {"out_proj": config.inner, "fc2": config.ffn, "proj_out": config.time_hidden}
    return widths[node.name.rpartition(".")[2]]


def _rope_table(run: _Run, node: Node, positions: Tensor) -> Results:
    return (nodes.rope_table(positions, run.inv_freq),)


def _adaln_parts(run: _Run, node: Node, projected: Tensor) -> Results:
    return nodes.adaln_parts(projected, node.width, len(node.writes))


def _rms_norm(run: _Run, node: Node, x: Tensor) -> Results:
    weight = run.weights.parameter(node.parameters[0])
    return (nodes.rms_norm(x, weight, node.eps, order=run.order(node)),)


def _rms_norm_modulate(
    run: _Run, node: Node, x: Tensor, shift: Tensor, scale: Tensor, index: Tensor
) -> Results:
    weight = run.weights.parameter(node.parameters[0])
    return (nodes.rms_norm_modulate(x, weight, shift, scale, index, node.eps, order=run.order(node)),)


def _gated_residual(run: _Run, node: Node, x: Tensor, gate: Tensor, branch: Tensor, index: Tensor) -> Results:
    return (nodes.gated_residual(x, gate, branch, index, order=run.order(node)),)


def _qk_norm_rope(run: _Run, node: Node, q: Tensor, k: Tensor, table: Tensor | None = None) -> Results:
    q_weight, k_weight = (run.weights.parameter(name) for name in node.parameters)
    q, k = _heads(run, q), _heads(run, k)
    return nodes.qk_norm_rope(q, k, q_weight, k_weight, table, node.eps, order=run.order(node))


def _heads(run: _Run, x: Tensor) -> Tensor:
    """[T, heads, D] view of [T, heads * D]."""
    return x.view(x.shape[0], -1, run.config.head_dim)


def _attention(run: _Run, node: Node, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Results:
    scale = run.config.head_dim**-0.5
    v = _heads(run, v)
    packed = node.rows == "packed"
    longest = run.inputs.max_seqlen if packed else run.inputs.text_max_seqlen
    sequence = run.settings.sequence if packed else None
    if sequence is None:
        return (nodes.attention(q, k, v, cu_seqlens, longest, scale),)
    q, k, v = (sequence.to_heads(x, run.inputs.rows) for x in (q, k, v))
    return (sequence.to_rows(nodes.attention(q, k, v, cu_seqlens, longest, scale), run.inputs.rows),)


def _scatter_rows(run: _Run, node: Node, *slots: Tensor) -> Results:
    text, text_at, video, video_at, audio, audio_at, positions = slots
    parts = ((text, text_at), (video, video_at), (audio, audio_at))
    return (nodes.scatter_rows(positions.shape[0], text.dtype, *parts),)


def _shard_rows(run: _Run, node: Node, *slots: Tensor) -> Results:
    sequence = run.settings.sequence
    return slots if sequence is None else tuple(sequence.shard(x) for x in slots)


def _gather_rows(run: _Run, node: Node, x: Tensor, positions: Tensor) -> Results:
    sequence = run.settings.sequence
    return (x if sequence is None else sequence.gather(x, positions.shape[0]),)


OPERATIONS: dict[str, Callable[..., Results]] = {
    "projection": _projection,
    "row_parallel": _row_parallel,
    "rope_table": _rope_table,
    "adaln_index": lambda run, node, index, tags: (nodes.adaln_index(index, tags),),
    "adaln_parts": _adaln_parts,
    "timestep_sinusoid": lambda run, node, t: (nodes.timestep_sinusoid(t, node.width),),
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


class PackedDiT:
    """The packed DiT of one configuration: ``stages`` and ``nodes`` in order, and the functions that run
    them.
    """

    def __init__(self, config: DiTConfig) -> None:
        self.config = config
        self.stages = build_stages(config)
        self.nodes = tuple(node for stage in self.stages for node in stage.nodes)
        self._by_name = {stage.name: stage for stage in self.stages}
        self._inv_freq = nodes.inverse_frequencies(config.rope_freqs, config.rope_theta)

    def stage(self, name: str) -> Stage:
        """The stage called ``name``, e.g. ``blocks.3``. Raises InputError if there is none."""
        if name not in self._by_name:
            raise InputError(f"no stage {name!r}; stages are {', '.join(self._by_name)}")
        return self._by_name[name]

    def run(
        self, weights: WeightsView, inputs: PackedInputs, settings: Settings | None = None
    ) -> tuple[Tensor, Tensor]:
        """One forward: (video velocity [Nv, channels * patch], audio velocity [Na, channels]), both float32.

        Rows come in the order of ``inputs.video`` and ``inputs.audio``, condition rows included.
        Differentiable in the weights and in the latent and text rows. Raises InputError for an overlay of a
        node that does not exist, and what the nodes raise.
        """
        session = self.begin(weights, inputs, settings)
        slots = session.slots()
        for stage in self.stages:
            slots.update(session.run(stage, slots))
        return slots[OUTPUT_SLOTS[0]], slots[OUTPUT_SLOTS[1]]

    def begin(self, weights: WeightsView, inputs: PackedInputs, settings: Settings | None = None) -> Session:
        """A forward to be run stage by stage, for an engine whose own module hooks surround each block."""
        settings = settings or Settings()
        unknown = sorted(set(settings.overlay) - {node.name for node in self.nodes})
        if unknown:
            raise InputError(f"overlay names nodes that do not exist: {', '.join(unknown)}")
        device = inputs.positions.device
        if self._inv_freq.device != device:
            self._inv_freq = self._inv_freq.to(device)
        inputs = inputs.canonical()
        keys = {rows: inputs.row_keys(rows) for rows in ("packed", "text", "video", "audio", "time")}
        return Session(_Run(self.config, weights, inputs, settings, self._inv_freq, keys))


class Session:
    """One forward under way: the slots it starts from, and stages to run on slots."""

    def __init__(self, run: _Run) -> None:
        self._run = run

    def slots(self) -> Slots:
        """The input slots."""
        return {name: getattr(self._run.inputs, name) for name in INPUT_SLOTS}

    def run(self, stage: Stage, slots: Mapping[str, Tensor]) -> Slots:
        """Run ``stage`` on the slots it reads; returns the slots it writes for later stages."""
        reads = tuple(slots[name] for name in stage.reads)
        if self._run.settings.checkpoint and torch.is_grad_enabled():
            results = checkpoint(self._stage, stage, *reads, use_reentrant=False)
        else:
            results = self._stage(stage, *reads)
        return dict(zip(stage.writes, results, strict=True))

    def _stage(self, stage: Stage, *reads: Tensor) -> Results:
        slots = dict(zip(stage.reads, reads, strict=True))
        for node in stage.nodes:
            outputs = self._node(node, *(slots[name] for name in node.reads))
            slots.update(zip(node.writes, outputs, strict=True))
        return tuple(slots[name] for name in stage.writes)

    def _node(self, node: Node, *reads: Tensor) -> Results:
        run, operation = self._run, OPERATIONS[node.op]
        replacement = run.settings.overlay.get(node.name)
        if replacement is None:
            outputs = operation(run, node, *reads)
        else:
            outputs = replacement(lambda *x: operation(run, node, *x), *reads)
        tracer = run.settings.tracer
        if tracer is not None and node.name not in run.traced:
            run.traced.add(node.name)
            requested = requested_operator(node, run.settings)
            actual = requested if replacement is None else f"overlay:{_name(replacement)}"
            tracer.record(node, requested, actual, dict(zip(node.writes, outputs, strict=True)))
        return outputs


def requested_operator(node: Node, settings: Settings) -> str:
    """The contract a node computes: a linear's id, or ``h3-node-v1:`` and the operation."""
    if node.op == "projection":
        return PROJECTION
    return settings.contract if node.op == "row_parallel" else f"h3-node-v1:{node.op}"


def _name(replacement: Any) -> str:
    return str(getattr(replacement, "__qualname__", type(replacement).__qualname__))
