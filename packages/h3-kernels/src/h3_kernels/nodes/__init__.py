"""The nodes of the packed MiniMax-H3 DiT other than its linears, each with a written order.

Every node's value for a row depends on that row (and, for attention, on its document) alone: not on the
number of rows, their position, padding, other documents or the split of heads and channels over ranks. CPU
tensors take the order written in the node's module; CUDA tensors take ``h3_kernels.triton``. CPU and CUDA
bits are each invariant, not equal to each other (except ``rope_table``, ``timestep_sinusoid`` and ``silu``).
"""

from h3_kernels.nodes._op import NodeOp
from h3_kernels.nodes.adaln import MODALITIES, adaln_index, adaln_parts
from h3_kernels.nodes.angle_table import angle_table
from h3_kernels.nodes.attention import attention
from h3_kernels.nodes.gated_residual import gated_residual, gated_residual_norm, residual
from h3_kernels.nodes.packing import column_blocks, join_columns, scatter_rows, select_rows
from h3_kernels.nodes.qk_norm_rope import qk_norm_rope
from h3_kernels.nodes.rms_norm import rms_norm, rms_norm_modulate
from h3_kernels.nodes.rope_table import inverse_frequencies, rope_table
from h3_kernels.nodes.swiglu import swiglu
from h3_kernels.nodes.time_embedder import silu, sinusoid_frequencies, timestep_sinusoid

__all__ = [
    "MODALITIES",
    "NodeOp",
    "adaln_index",
    "adaln_parts",
    "angle_table",
    "attention",
    "column_blocks",
    "gated_residual",
    "gated_residual_norm",
    "inverse_frequencies",
    "join_columns",
    "qk_norm_rope",
    "residual",
    "rms_norm",
    "rms_norm_modulate",
    "rope_table",
    "scatter_rows",
    "select_rows",
    "silu",
    "sinusoid_frequencies",
    "swiglu",
    "timestep_sinusoid",
]
