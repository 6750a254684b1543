"""What of a vLLM-Omni ``MiniMaxH3DiTModel`` is bound to which contract, and what stays the engine's. Data only.

Module names, classes, dtypes and operators are those of vllm-omni 0.30.0 (``vllm_omni/diffusion/models/minimax_h3/
minimax_h3_transformer.py``). Every other module of this package reads these tables.
"""

from dataclasses import dataclass
from typing import Final

from h3_kernels.binding import Style
from h3_kernels.modes import Scope


@dataclass(frozen=True, slots=True)
class LinearRule:
    """One kind of linear: where it is, what the engine makes of it, how it is cut, from which scope it is bound."""

    suffix: str
    style: Style
    engine_class: str
    parts: int = 1
    """Equal row blocks of the fused weight, each sharded by itself: q, k, v or gate, value."""
    dtype: str = "bfloat16"
    scope: Scope = Scope.LINEARS

    def contract(self, row_parallel: str) -> str:
        """Contract id of this linear when row-parallel linears use ``row_parallel``."""
        return self.style.contract(row_parallel)

    def within(self, scope: Scope) -> bool:
        """Whether ``scope`` binds it."""
        return scope is not Scope.LINEARS or self.scope is Scope.LINEARS

    @property
    def operator(self) -> str:
        """What the engine runs."""
        return f"{self.dtype} {self.engine_class}"


@dataclass(frozen=True, slots=True)
class EngineNode:
    """A node that stays the engine's. ``{attention}`` stands for the backend its platform resolved."""

    suffix: str
    operator: str
    optional: bool = False
    """Whether a model may lack the module."""


Node = LinearRule | EngineNode


def _projection(suffix: str, dtype: str) -> LinearRule:
    return LinearRule(suffix, Style.COLUMN, "ColumnParallelLinear", dtype=dtype, scope=Scope.PROJECTIONS)


QKV: Final = LinearRule("attn.qkv_proj", Style.COLUMN, "QKVParallelLinear", parts=3)
OUT: Final = LinearRule("attn.out_proj", Style.ROW, "RowParallelLinear")
FC1: Final = LinearRule("mlp.fc1", Style.COLUMN, "MergedColumnParallelLinear", parts=2)
FC2: Final = LinearRule("mlp.fc2", Style.ROW, "RowParallelLinear")
TIME_OUT: Final = LinearRule(
    "time_embedder.proj_out", Style.ROW, "RowParallelLinear", dtype="float32", scope=Scope.PROJECTIONS
)

EMBED: Final[tuple[Node, ...]] = (
    _projection("video_patch_proj", "float32"),
    _projection("audio_patch_proj", "float32"),
    _projection("condition_proj", "bfloat16"),
)
REFINER_BLOCK: Final[tuple[Node, ...]] = (
    EngineNode("norm1", "RMSNorm"),
    QKV,
    EngineNode("attn.qk_norm", "RMSNorm per head"),
    EngineNode("attn.attention", "{attention}"),
    OUT,
    EngineNode("norm2", "residual add, RMSNorm"),
    FC1,
    EngineNode("mlp.act_fn", "SiluAndMul"),
    FC2,
)
CONDITION: Final[tuple[Node, ...]] = (
    EngineNode("token_refiner.final_norm", "residual add, RMSNorm"),
    EngineNode("time_embedder.sinusoid", "fp32 cos and sin"),
    _projection("time_embedder.proj_in", "float32"),
    EngineNode("time_embedder.silu", "fp32 SiLU"),
    TIME_OUT,
    EngineNode("rope", "fp32 angles, bf16 table"),
)
BLOCK: Final[tuple[Node, ...]] = (
    EngineNode("adaln_proj.silu", "fp32 SiLU, cast to bf16"),
    _projection("adaln_proj.linear", "bfloat16"),
    EngineNode("norm1", "rms_norm_indexed_scale_shift"),
    QKV,
    EngineNode("attn.qk_norm_rope", "fused_qk_norm_rope"),
    EngineNode("attn.to_gate_compress", "bf16 ColumnParallelLinear", optional=True),
    EngineNode("attn.attention", "{attention}"),
    OUT,
    EngineNode("norm2", "indexed_gate_rms_norm_scale_shift"),
    FC1,
    EngineNode("mlp.act_fn", "SiluAndMul"),
    FC2,
    EngineNode("residual", "indexed_gate"),
)
FINAL: Final[tuple[Node, ...]] = (
    EngineNode("final_layer.adaln_proj.silu", "fp32 SiLU, cast to bf16"),
    _projection("final_layer.adaln_proj.linear", "bfloat16"),
    EngineNode("final_layer.norm", "RMSNorm, indexed_scale_shift_"),
    _projection("final_layer.video_out", "float32"),
    _projection("final_layer.audio_out", "float32"),
)
FORWARD: Final[tuple[tuple[str | None, tuple[Node, ...]], ...]] = (
    (None, EMBED),
    ("token_refiner.blocks", REFINER_BLOCK),
    (None, CONDITION),
    ("blocks", BLOCK),
    (None, FINAL),
)
"""The whole forward, in order: nodes of the model (None), or of each member of a block list."""
