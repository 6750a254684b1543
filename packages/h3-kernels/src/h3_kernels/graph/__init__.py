"""The packed MiniMax-H3 DiT as one ordered list of named nodes, driven by both engines with their weights and
rows.
"""

from h3_kernels.graph.config import DiTConfig
from h3_kernels.graph.inputs import PackedInputs, diffusers_inputs, vllm_inputs
from h3_kernels.graph.parallel import SequenceParallel, Ulysses
from h3_kernels.graph.replay import Replays
from h3_kernels.graph.run import PackedDiT, Session
from h3_kernels.graph.settings import Replacement, Settings, Tracer
from h3_kernels.graph.steps import StepGraphs, TrainingStep
from h3_kernels.graph.table import Node, Stage
from h3_kernels.graph.weights import Linear, ModuleWeights, WeightsView

__all__ = [
    "DiTConfig",
    "Linear",
    "ModuleWeights",
    "Node",
    "PackedDiT",
    "PackedInputs",
    "Replacement",
    "Replays",
    "SequenceParallel",
    "Session",
    "Settings",
    "Stage",
    "StepGraphs",
    "Tracer",
    "TrainingStep",
    "Ulysses",
    "WeightsView",
    "diffusers_inputs",
    "vllm_inputs",
]
