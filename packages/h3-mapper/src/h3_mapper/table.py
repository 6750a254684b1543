"""The H3 rules as data: which atoms each tensor holds in each layout. The only file a model expert edits.

One `Rule` is one native tensor. `parts` names its atoms, all of one shape; the three layout columns say
which tensors hold them and in what row order. Dimensions are attributes of `H3Config`.

Sources: names, shapes and precision from `MiniMaxH3DiTModel` (vllm-omni 0.30.0) and
`MiniMaxH3Transformer3DModel` (diffusers 0.42.1); row orders from `_reorder_grouped_qkv_to_qkv` there and
`convert_minimax_h3_transformer_checkpoint_to_diffusers` here, `qkv_layout="interleaved"` being `release`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from h3_mapper.spec import Layout, Parallel, Part

COLUMN, ROW, WHOLE = Parallel.COLUMN, Parallel.ROW, Parallel.WHOLE
QKV: Final = (Part.Q, Part.K, Part.V)
GATED: Final = (Part.GATE, Part.VALUE)
PLAIN: Final = (Part.PLAIN,)


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of a layout and the parts in it, in row order.

    turn: the parts take turns of this many rows (a dimension's name); None puts each part down whole.
    """

    name: str
    parts: tuple[Part, ...]
    turn: str | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One native tensor: its atoms (`parts`, each of `shape`) and the tensors that hold them in each layout.

    derived: no atom; its value follows from the configuration (H3Config attribute of that name).
    flag: the rule holds only if this boolean of H3Config is set.
    """

    name: str
    shape: tuple[str, ...]
    diffusers: tuple[Slot, ...]
    release: tuple[Slot, ...]
    module: tuple[Slot, ...]
    parts: tuple[Part, ...] = PLAIN
    dtype: str = "BF16"
    parallel: Parallel = WHOLE
    derived: str | None = None
    flag: str | None = None

    def slots(self, layout: Layout) -> tuple[Slot, ...]:
        """The tensors of `layout` that hold this rule's atoms."""
        return {"diffusers": self.diffusers, "release": self.release, "module": self.module}[layout]


@dataclass(frozen=True, slots=True)
class Section:
    """Rules under one prefix. A prefix with `{n}` repeats `count` times (a dimension's name)."""

    native: str
    diffusers: str
    rules: tuple[Rule, ...]
    count: str | None = None

    def prefix(self, layout: Layout) -> str:
        """The prefix in `layout`, `{n}` unfilled."""
        return self.native if layout.native else self.diffusers


def _rule(native: str, diffusers: str, *shape: str, dtype: str = "BF16", parallel: Parallel = WHOLE) -> Rule:
    """A tensor that is only renamed."""
    slot = (Slot(native, PLAIN),)
    return Rule(native, shape, (Slot(diffusers, PLAIN),), slot, slot, dtype=dtype, parallel=parallel)


def _linear(
    native: str, diffusers: str, out: str, inner: str, dtype: str = "BF16", parallel: Parallel = COLUMN
) -> tuple[Rule, Rule]:
    """Weight and bias of a linear that is only renamed; a row-parallel linear's bias stays whole."""
    bias = COLUMN if parallel is COLUMN else WHOLE
    return (
        _rule(f"{native}.weight", f"{diffusers}.weight", out, inner, dtype=dtype, parallel=parallel),
        _rule(f"{native}.bias", f"{diffusers}.bias", out, dtype=dtype, parallel=bias),
    )


QKV_RULE = Rule(
    "attn.qkv_proj.weight",
    ("inner_size", "hidden_size"),
    diffusers=tuple(Slot(f"attn.to_{part}.weight", (part,)) for part in QKV),
    release=(Slot("attn.qkv_proj.weight", QKV, turn="attention_head_dim"),),
    module=(Slot("attn.qkv_proj.weight", QKV),),
    parts=QKV,
    parallel=COLUMN,
)

FC1_RULE = Rule(
    "mlp.fc1.weight",
    ("ffn_dim", "hidden_size"),
    diffusers=(Slot("ff.net.0.proj.weight", (Part.VALUE, Part.GATE)),),
    release=(Slot("mlp.fc1.weight", GATED),),
    module=(Slot("mlp.fc1.weight", GATED),),
    parts=GATED,
    parallel=COLUMN,
)

INV_FREQ_RULE = Rule(
    "rope.inv_freq",
    ("rope_freq_dim",),
    diffusers=(),  # recomputed from config.json by the model
    release=(Slot("rope.inv_freq", PLAIN),),
    module=(Slot("rope.inv_freq", PLAIN),),
    dtype="F32",
    derived="inv_freq",
)

GATE_COMPRESS_RULE = Rule(
    "attn.to_gate_compress.weight",
    ("inner_size", "hidden_size"),
    diffusers=(Slot("attn.to_gate_compress.weight", PLAIN),),
    release=(Slot("attn.to_gate_compress.weight", PLAIN),),
    module=(Slot("attn.to_gate_compress.weight", PLAIN),),
    parallel=COLUMN,
    flag="vsa_gates",
)

_TRANSFORMER_BLOCK: Final = (
    _rule("norm1.weight", "norm1.weight", "hidden_size"),
    _rule("norm2.weight", "norm2.weight", "hidden_size"),
    QKV_RULE,
    _rule("attn.q_norm.weight", "attn.norm_q.weight", "attention_head_dim"),
    _rule("attn.k_norm.weight", "attn.norm_k.weight", "attention_head_dim"),
    _rule("attn.out_proj.weight", "attn.to_out.0.weight", "hidden_size", "inner_size", parallel=ROW),
)
_FEED_FORWARD: Final = (
    FC1_RULE,
    _rule("mlp.fc2.weight", "ff.net.2.weight", "hidden_size", "ffn_dim", parallel=ROW),
)

STEM: Final = (
    *_linear("video_patch_proj", "proj_in", "hidden_size", "video_patch_dim", "F32"),
    *_linear("audio_patch_proj", "audio_proj_in", "hidden_size", "audio_in_channels", "F32"),
    *_linear("condition_proj", "context_embedder", "hidden_size", "text_dim"),
    *_linear("time_embedder.proj_in", "time_embedder.linear_1", "time_embed_hidden_dim", "freq_dim", "F32"),
    *_linear(
        "time_embedder.proj_out",
        "time_embedder.linear_2",
        "time_embed_dim",
        "time_embed_hidden_dim",
        "F32",
        ROW,
    ),
    INV_FREQ_RULE,
)
REFINER_BLOCK: Final = (*_TRANSFORMER_BLOCK, *_FEED_FORWARD)
BLOCK: Final = (
    *_TRANSFORMER_BLOCK,
    GATE_COMPRESS_RULE,
    *_FEED_FORWARD,
    *_linear("adaln_proj.linear", "adaln_proj.linear", "adaln_dim", "time_embed_dim"),
)
HEAD: Final = (
    _rule("final_layer.norm.weight", "norm_out.norm.weight", "hidden_size"),
    *_linear("final_layer.adaln_proj.linear", "norm_out.linear", "final_adaln_dim", "time_embed_dim"),
    *_linear("final_layer.video_out", "proj_out", "video_patch_dim", "hidden_size", "F32"),
    *_linear("final_layer.audio_out", "audio_proj_out", "audio_in_channels", "hidden_size", "F32"),
)

TABLE: Final = (
    Section("", "", STEM),
    Section(
        "token_refiner.blocks.{n}.", "token_refiner.refiner_blocks.{n}.", REFINER_BLOCK, "num_refiner_layers"
    ),
    Section(
        "", "", (_rule("token_refiner.final_norm.weight", "token_refiner.final_norm.weight", "hidden_size"),)
    ),
    Section("blocks.{n}.", "transformer_blocks.{n}.", BLOCK, "num_layers"),
    Section("", "", HEAD),
)
"""In the native module's state_dict order."""

DIFFUSERS_CHILDREN: Final = ("norm1.", "attn.", "norm2.", "ff.", "adaln_proj.")
"""Order of a Diffusers block's child modules; the native order has norm2 before attn."""

MODEL_GROUP: Final = "model"
"""The group of every tensor outside a block."""
