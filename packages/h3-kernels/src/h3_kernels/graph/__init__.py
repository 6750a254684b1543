"""The packed MiniMax-H3 DiT as one ordered list of named nodes, driven by both engines with their weights and
rows.
"""

from h3_kernels.graph.config import DiTConfig
from h3_kernels.graph.inputs import PackedInputs, diffusers_inputs, vllm_inputs
from h3_kernels.graph.run import PackedDiT, SequenceParallel, Session, Settings, Tracer
from h3_kernels.graph.table import Node, Stage
from h3_kernels.graph.weights import Linear, ModuleWeights, WeightsView

__all__ = [
    "DiTConfig",
    "Linear",
    "ModuleWeights",
    "Node",
    "PackedDiT",
    "PackedInputs",
    "SequenceParallel",
    "Session",
    "Settings",
    "Stage",
    "Tracer",
    "WeightsView",
    "diffusers_inputs",
    "vllm_inputs",
]
