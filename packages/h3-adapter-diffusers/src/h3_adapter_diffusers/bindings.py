"""What of a Diffusers `MiniMaxH3Transformer3DModel` is bound to which contract, and what stays Diffusers'.
Data only.

Module names and operators are those of diffusers 0.40 to 0.42
(`diffusers/models/transformers/transformer_minimax_h3.py`); every other module of this package reads these
tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from h3_kernels.binding import Style


class Rows(StrEnum):
    """Which rows a linear sees; logical keys are given per row set (`PackedSequence.keys`)."""

    PACKED = "packed"
    TEXT = "text"
    VIDEO = "video"
    AUDIO = "audio"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class LinearRule:
    """One kind of bound linear: its name below its owner, how it is cut, and the rows it sees.

    `parts` are the equal row blocks of the weight, in the order its input gradient consumes them: (1, 0) for
    [value; gate], so that it has the bits of the rollout's [gate; value]. `boundary` linears are those
    outside attention and feed-forward; tensor parallelism leaves them whole on every rank.
    """

    suffix: str
    style: Style
    rows: Rows = Rows.PACKED
    parts: tuple[int, ...] = (0,)
    boundary: bool = False

    def contract(self, row_parallel: str) -> str:
        """Contract id of this linear when row-parallel linears use `row_parallel`."""
        return self.style.contract(row_parallel)


BLOCK_LISTS: Final = {"token_refiner.refiner_blocks": Rows.TEXT, "transformer_blocks": Rows.PACKED}
"""Module lists whose members hold the linears of `IN_BLOCK`, in forward order, and the rows they see."""

QKV: Final = ("attn.to_q", "attn.to_k", "attn.to_v")
IN_BLOCK: Final = (
    *(LinearRule(name, Style.COLUMN) for name in QKV),
    LinearRule("attn.to_out.0", Style.ROW),
    LinearRule("ff.net.0.proj", Style.COLUMN, parts=(1, 0)),
    LinearRule("ff.net.2", Style.ROW),
)
"""The linears of every block of both lists; `BLOCK_LISTS` says which rows they see."""

FUSED: Final = LinearRule("attn.to_qkv", Style.COLUMN, parts=(0, 1, 2))
"""What `fuse_qkv_projections` runs instead of to_q, to_k and to_v."""

ADALN: Final = LinearRule("adaln_proj.linear", Style.COLUMN, Rows.TIME, boundary=True)
"""The modulation projection of every block of `transformer_blocks`; the refiner has none."""

BEFORE_BLOCKS: Final = (
    LinearRule("proj_in", Style.COLUMN, Rows.VIDEO, boundary=True),
    LinearRule("audio_proj_in", Style.COLUMN, Rows.AUDIO, boundary=True),
    LinearRule("context_embedder", Style.COLUMN, Rows.TEXT, boundary=True),
    LinearRule("time_embedder.linear_1", Style.COLUMN, Rows.TIME, boundary=True),
    LinearRule("time_embedder.linear_2", Style.ROW, Rows.TIME, boundary=True),
)
AFTER_BLOCKS: Final = (
    LinearRule("norm_out.linear", Style.COLUMN, Rows.TIME, boundary=True),
    LinearRule("proj_out", Style.COLUMN, Rows.PACKED, boundary=True),
    LinearRule("audio_proj_out", Style.COLUMN, Rows.PACKED, boundary=True),
)

# Nodes that stay Diffusers' when only the linears are bound. {attention} is the backend its dispatcher uses.
EXTERNAL_IN_REFINER: Final = {
    "norm1": "torch RMSNorm",
    "attn.qk_norm": "torch RMSNorm per head",
    "attn.attention": "{attention}",
    "norm2": "residual add, torch RMSNorm",
    "ff.act": "SwiGLU: value * silu(gate), each rounded to the activation's dtype",
    "residual": "residual add",
}
EXTERNAL_IN_BLOCK: Final = {
    "adaln_proj.silu": "fp32 SiLU, cast",
    "norm1": "torch RMSNorm, scale and shift, each operation rounded",
    "attn.qk_norm": "torch RMSNorm per head",
    "attn.rope": "_apply_rotary_emb, cos and sin in the activation's dtype",
    "attn.attention": "{attention}",
    "norm2": "gated residual, torch RMSNorm, scale and shift, each operation rounded",
    "ff.act": "SwiGLU: value * silu(gate), each rounded to the activation's dtype",
    "residual": "gated residual",
}
EXTERNAL_BEFORE: Final = {
    "time_proj": "Timesteps, fp32",
    "time_embedder.act": "fp32 SiLU",
    "rope": "fp32 table",
}
EXTERNAL_AFTER: Final = {"norm_out.norm": "torch RMSNorm, scale and shift, each operation rounded"}
