"""The packed DiT as data: stages of named nodes, each reading and writing named slots.

A node that holds parameters has the ``module`` name of the module that holds them, so a trace, a report, an
overlay and a weights view all speak of the same thing. Slots are tensors; a stage is what gradient
checkpointing recomputes and what an adapter may run on its own (a block is a stage).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from h3_kernels.graph.config import DiTConfig
from h3_kernels.nodes import MODALITIES

INPUT_SLOTS = (
    "video",
    "audio",
    "text",
    "video_positions",
    "audio_positions",
    "text_positions",
    "positions",
    "tags",
    "timesteps",
    "timestep_index",
    "cu_seqlens",
    "text_cu_seqlens",
)
OUTPUT_SLOTS = ("video_velocity", "audio_velocity")
MODULATION = ("shift_msa", "scale_msa", "gate_msa", "shift_mlp", "scale_mlp", "gate_mlp")


@dataclass(frozen=True, slots=True)
class Node:
    """One node: its name, the operation, the slots it reads and writes, and the parameters it uses by name.

    ``width``: columns of a linear's whole output (0 for other nodes); ``rows``: which rows it runs over
    (``packed``, ``text``, ``video``, ``audio`` or ``time``), that is, which logical keys order its weight
    gradients.
    """

    name: str
    op: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    eps: float = 0.0
    width: int = 0
    rows: str = "packed"


@dataclass(frozen=True, slots=True)
class Stage:
    """A run of nodes. ``reads``: slots from before it; ``writes``: slots that later stages or the caller need."""

    name: str
    nodes: tuple[Node, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    steps: tuple[Step, ...] = field(init=False, repr=False)
    """Nodes in the order they run, together if one launch may do them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(_steps(self.nodes, self.writes)))


Step = tuple[tuple[Node, tuple[str, ...]], ...]
"""Nodes that one launch may do, each with the slots that no later node needs."""


def _steps(nodes: tuple[Node, ...], kept: tuple[str, ...]) -> list[Step]:
    needed, frees = set(kept), []
    for node in reversed(nodes):
        frees.append(tuple(sorted({*node.reads, *node.writes} - needed)))
        needed = (needed - set(node.writes)) | set(node.reads)
    steps: list[Step] = []
    for node, unused in zip(nodes, reversed(frees), strict=True):
        if steps and _one_launch(steps[-1][-1][0], node):
            steps[-1] = (*steps[-1], (node, unused))
        else:
            steps.append(((node, unused),))
    return steps


def _one_launch(first: Node, second: Node) -> bool:
    if (first.op, second.op) == ("projection", "swiglu"):
        return first.writes == second.reads
    return (
        (first.op, second.op) == ("gated_residual", "rms_norm_modulate")
        and first.writes[0] == second.reads[0]
        and first.reads[3] == second.reads[3]
    )


def build_stages(config: DiTConfig) -> tuple[Stage, ...]:
    """All stages in order: inputs, token refiner, packing, blocks, final layer."""
    groups: list[tuple[str, list[Node]]] = [("inputs", _inputs(config))]
    groups += [(f"token_refiner.blocks.{i}", _refiner_block(config, i)) for i in range(config.refiner_layers)]
    groups.append(("pack", _pack(config)))
    groups += [(f"blocks.{i}", _block(config, i)) for i in range(config.layers)]
    groups.append(("final_layer", _final(config)))
    return tuple(_close(groups))


def _close(groups: list[tuple[str, list[Node]]]) -> Iterable[Stage]:
    needed = set(OUTPUT_SLOTS)
    stages: list[Stage] = []
    for name, nodes in reversed(groups):
        written = {slot for node in nodes for slot in node.writes}
        reads: list[str] = []
        seen: set[str] = set()
        for node in nodes:
            reads += [slot for slot in node.reads if slot not in seen and slot not in reads]
            seen.update(node.writes)
        stages.append(Stage(name, tuple(nodes), tuple(reads), tuple(sorted(written & needed))))
        needed = (needed - written) | set(reads)
    return reversed(stages)


def _linear(
    name: str, reads: str, writes: tuple[str, ...], width: int, rows: str = "packed", op: str = "projection"
) -> Node:
    return Node(name, op, (reads,), writes, (f"{name}.weight", f"{name}.bias"), width=width, rows=rows)


def _inputs(c: DiTConfig) -> list[Node]:
    t = "time_embedder"
    return [
        Node("rope", "rope_table", ("positions",), ("rope",)),
        Node("adaln_index", "adaln_index", ("timestep_index", "tags"), ("adaln_index",)),
        Node(
            f"{t}.sinusoid", "timestep_sinusoid", ("timesteps",), ("sinusoid",), width=c.freq_dim, rows="time"
        ),
        _linear(f"{t}.proj_in", "sinusoid", ("time_hidden",), c.time_hidden, "time"),
        Node(f"{t}.act", "silu", ("time_hidden",), ("time_hidden",), rows="time"),
        _linear(f"{t}.proj_out", "time_hidden", ("time",), c.time_dim, "time", "row_parallel"),
        Node(f"{t}.out_act", "silu", ("time",), ("time",), rows="time"),
        _linear("condition_proj", "text", ("t",), c.hidden, "text"),
    ]


def _attention(c: DiTConfig, prefix: str, rows: str, rotary: bool) -> list[Node]:
    norms = (f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight")
    documents = "cu_seqlens" if rows == "packed" else "text_cu_seqlens"
    turn = Node(
        f"{prefix}.qk_norm_rope" if rotary else f"{prefix}.qk_norm",
        "qk_norm_rope",
        ("q", "k", "rope") if rotary else ("q", "k"),
        ("q", "k"),
        norms,
        c.qk_norm_eps,
        rows=rows,
    )
    return [
        _linear(f"{prefix}.qkv_proj", "h", ("q", "k", "v"), 3 * c.inner, rows),
        turn,
        Node(f"{prefix}.attention", "attention", ("q", "k", "v", documents), ("a",), rows=rows),
        _linear(f"{prefix}.out_proj", "a", ("y",), c.hidden, rows, "row_parallel"),
    ]


def _mlp(c: DiTConfig, prefix: str, rows: str) -> list[Node]:
    return [
        _linear(f"{prefix}.fc1", "h", ("gate", "value"), 2 * c.ffn, rows),
        Node(f"{prefix}.act_fn", "swiglu", ("gate", "value"), ("f",), rows=rows),
        _linear(f"{prefix}.fc2", "f", ("y",), c.hidden, rows, "row_parallel"),
    ]


def _norm(name: str, x: str, eps: float, rows: str) -> Node:
    return Node(name, "rms_norm", (x,), ("h",), (f"{name}.weight",), eps, rows=rows)


def _refiner_block(c: DiTConfig, index: int) -> list[Node]:
    p, rows = f"token_refiner.blocks.{index}", "text"
    return [
        _norm(f"{p}.norm1", "t", c.norm_eps, rows),
        *_attention(c, f"{p}.attn", rows, rotary=False),
        Node(f"{p}.attn_residual", "residual", ("t", "y"), ("t",), rows=rows),
        _norm(f"{p}.norm2", "t", c.norm_eps, rows),
        *_mlp(c, f"{p}.mlp", rows),
        Node(f"{p}.mlp_residual", "residual", ("t", "y"), ("t",), rows=rows),
    ]


def _pack(c: DiTConfig) -> list[Node]:
    final = "token_refiner.final_norm"
    parts = ("h", "text_positions", "video_rows", "video_positions", "audio_rows", "audio_positions")
    return [
        _norm(final, "t", c.final_norm_eps, "text"),
        _linear("video_patch_proj", "video", ("video_rows",), c.hidden, "video"),
        _linear("audio_patch_proj", "audio", ("audio_rows",), c.hidden, "audio"),
        Node("pack", "scatter_rows", (*parts, "positions"), ("x",)),
        Node("shard", "shard_rows", _SHARDED, _SHARDED),
    ]


_SHARDED = ("x", "rope", "adaln_index", "timestep_index")


def _modulated(name: str, shift: str, scale: str, index: str, eps: float) -> Node:
    reads = ("x", shift, scale, index)
    return Node(name, "rms_norm_modulate", reads, ("h",), (f"{name}.weight",), eps)


def _block(c: DiTConfig, index: int) -> list[Node]:
    p = f"blocks.{index}"
    table = f"{p}.adaln_proj.linear"
    return [
        _linear(table, "time", ("adaln",), MODALITIES * len(MODULATION) * c.hidden, "time"),
        Node(f"{p}.adaln_proj", "adaln_parts", ("adaln",), MODULATION, width=MODALITIES, rows="time"),
        _modulated(f"{p}.norm1", "shift_msa", "scale_msa", "adaln_index", c.norm_eps),
        *_attention(c, f"{p}.attn", "packed", rotary=True),
        Node(f"{p}.attn_residual", "gated_residual", ("x", "gate_msa", "y", "adaln_index"), ("x",)),
        _modulated(f"{p}.norm2", "shift_mlp", "scale_mlp", "adaln_index", c.norm_eps),
        *_mlp(c, f"{p}.mlp", "packed"),
        Node(f"{p}.mlp_residual", "gated_residual", ("x", "gate_mlp", "y", "adaln_index"), ("x",)),
    ]


def _final(c: DiTConfig) -> list[Node]:
    p = "final_layer"
    return [
        _linear(f"{p}.adaln_proj.linear", "time", ("adaln",), 2 * c.hidden, "time"),
        Node(f"{p}.adaln_proj", "adaln_parts", ("adaln",), ("shift", "scale"), width=1, rows="time"),
        _modulated(f"{p}.norm", "shift", "scale", "timestep_index", c.final_norm_eps),
        Node("gather", "gather_rows", ("h", "positions"), ("h",)),
        Node(f"{p}.video_rows", "select_rows", ("h", "video_positions"), ("video_h",), rows="video"),
        _linear(f"{p}.video_out", "video_h", ("video_velocity",), c.video_width, "video"),
        Node(f"{p}.audio_rows", "select_rows", ("h", "audio_positions"), ("audio_h",), rows="audio"),
        _linear(f"{p}.audio_out", "audio_h", ("audio_velocity",), c.audio_channels, "audio"),
    ]
