"""What each engine as shipped computes otherwise than the graph, node by node, and where its run first parts from it.

    python benchmarks/divergence_h200.py [--out results/divergence_h200.json] [--rows 925] [--blocks 2]
    python benchmarks/divergence_h200.py --smoke     # tiny engines on a CPU

A record for each engine and kind of node: the engine's arithmetic on the inputs of the strict run, how many values
differ from the node's and by how much (relative norm). `first` marks the node at which a run with every node planted
parts from the strict run, `row` the first row that differs there; the last record of an engine holds the share of rows
that differ at each output of that run. With every node planted the graph must give the shipped model's velocities bit
for bit (`planted_differing` 0): so the table is about the engine itself.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engine_models import Engines, differing
from h3_adapter_diffusers.weights import weights_view
from h3_adapter_vllm.graph_binding import LiveTensors
from h3_adapter_vllm.testing import engine
from h3_kernels.graph import (
    DiTConfig,
    ModuleWeights,
    PackedDiT,
    PackedInputs,
    Settings,
    diffusers_inputs,
    vllm_inputs,
)
from h3_kernels.testing import count_differing
from h3_kernels.testing.tiny import TINY
from h3_kernels.trace import Recorder, divergences, first_divergence
from records import Writer
from released_sizes import RELEASE
from stock_nodes import Outputs, Planted, diffusers_nodes, vllm_nodes
from torch import Tensor


class Comparison:
    """Counts, by kind of node, how the planted arithmetic differs from the node's own on the same inputs."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def beside(self, name: str, planted: Planted) -> Planted:
        """Runs both; returns the node's own result."""

        def compared(strict: Planted, *inputs: Tensor) -> Outputs:
            ours, theirs = strict(*inputs), planted(strict, *inputs)
            found = self.values.setdefault(kind(name), [0, 0, 0.0, 0.0])
            shaped = (t.view(a.shape) for a, t in zip(ours, theirs, strict=True))
            for a, b in zip(ours, shaped, strict=True):
                found[0] += a.numel()
                found[1] += count_differing(a, b)
                found[2] += float((b.double() - a.double()).square().sum())
                found[3] += float(a.double().square().sum())
            return ours

        return compared

    def record(self, node: str) -> dict[str, Any]:
        """What was found of one kind of node."""
        values, off, difference, norm = self.values[node]
        share, relative = off / values, (difference / norm) ** 0.5 if norm else 0.0
        return {"node": node, "values": values, "differing": off, "share": share, "relative": relative}


def kind(node: str) -> str:
    """A node's name without the number of its block."""
    return re.sub(r"blocks\.\d+\.", "", node)


def compare(name: str, engines: Engines, rows: int, blocks: int, writer: Writer) -> None:
    """The records of one engine."""
    dit = PackedDiT(DiTConfig.from_mapping({**engines.config, "num_layers": blocks}))
    request = engines.request(rows)
    stock, weights, inputs, planted = _ENGINES[name](engines, dit, request)
    comparison = Comparison()
    with torch.no_grad(), engines.sdpa():
        runs = {}
        for label, overlay in (("strict", {}), ("shipped", planted)):
            recorder = Recorder(label)
            runs[label] = dit.run(weights, inputs, Settings(tracer=recorder, overlay=overlay)), recorder.trace
        beside = {node: comparison.beside(node, arithmetic) for node, arithmetic in planted.items()}
        dit.run(weights, inputs, Settings(overlay=beside))
    first = first_divergence(runs["strict"][1], runs["shipped"][1])
    shared = {"engine": name, "rows": rows, "blocks": blocks, "case": "divergence"}
    shared["planted_differing"] = differing(runs["shipped"][0], stock())
    for node in comparison.values:
        record = shared | comparison.record(node)
        if first is not None and node == kind(first.node):
            record |= {
                "first": first.node,
                "slot": first.slot,
                "row": first.row,
                "differing_rows": first.differing,
            }
        writer.add(record)
    strict = runs["strict"][1]
    shares = {(d.node, d.slot): d.differing / max(d.rows, 1) for d in divergences(strict, runs["shipped"][1])}
    outputs = list(strict.steps[0].outputs)
    chain = {"case": f"{name} as shipped", "outputs": [f"{node} [{slot}]" for node, slot in outputs]}
    writer.add(shared | chain | {"share": [round(shares.get(output, 0.0), 4) for output in outputs]})


Parts = tuple[Callable[[], Outputs], ModuleWeights, PackedInputs, dict[str, Planted]]


def _diffusers(engines: Engines, dit: PackedDiT, request: Any) -> Parts:
    model = engines.trainer(bound=False, blocks=dit.config.layers)
    inputs = diffusers_inputs(engines.trainer_inputs(request))
    return (
        engines.trainer_forward(model, request),
        weights_view(model),
        inputs,
        diffusers_nodes(dit, model, inputs),
    )


def _vllm(engines: Engines, dit: PackedDiT, request: Any) -> Parts:
    model = engines.rollout(bound=False, blocks=dit.config.layers)
    inputs = vllm_inputs(engines.rollout_inputs([request]))
    weights = ModuleWeights(LiveTensors(model))
    return engines.rollout_forward(model, request), weights, inputs, vllm_nodes(dit, model, inputs)


_ENGINES = {"vllm-omni": _vllm, "diffusers": _diffusers}


def run_divergence(engines: Engines, writer: Writer, rows: int, blocks: int = 2) -> None:
    """Both engines, the first ``blocks`` blocks."""
    for name in _ENGINES:
        compare(name, engines, rows, blocks, writer)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "divergence_h200.json"
    )
    parser.add_argument("--rows", type=int, default=925)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="tiny engines on the CPU, few rows")
    arguments = parser.parse_args()
    device = "cpu" if arguments.smoke else "cuda"
    config = dict(TINY) if arguments.smoke else {**RELEASE, "num_layers": arguments.blocks}
    with engine.engine():
        rows = 33 if arguments.smoke else arguments.rows
        run_divergence(Engines(config, device), Writer(arguments.out), rows, config["num_layers"])


if __name__ == "__main__":
    main()
