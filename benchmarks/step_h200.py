"""Whole steps of the real transformers at full width, as shipped and bound (scope `model`), interleaved in one run.

    python benchmarks/step_h200.py [--out results/step_h200.json] [--blocks 50] [--rounds 5] [--only forward graph ...]
    python benchmarks/step_h200.py --smoke     # tiny engines on a CPU, to check the script

Both engines hold one set of random weights (engine_models.py). As shipped means: vLLM-Omni eager on its own attention
and with its exact AdaLN cache; Diffusers with cuDNN attention, which importing vllm had switched off. A training step
is forward and backward of a LoRA of rank 64 on six linears of every block, gradient checkpointing, no optimizer. 20% of
the rows are text, 10% audio; one document.

Records, one per cell: `forward` of both engines (`adaln` says whether the timesteps were new or the engine's cache held
them), `step`, forwards replayed from CUDA graphs (case `graph`), cheaper row-parallel contracts, a long sequence in few
blocks extrapolated to all (`measured_blocks`), GPU time by kind of kernel for every variant, and by node for the graph.
`peak_bytes`: the model's own tensors and the most a call allocates beside what lay there.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from engine_models import Engines
from h3_adapter_vllm.testing import engine
from h3_kernels.testing.tiny import TINY
from records import Writer
from released_sizes import RELEASE
from step_cells import Steps
from step_graphs import captured, graph, replayed


def cells(steps: Steps, smoke: bool) -> dict[str, list[Callable[[], None]]]:
    """Every cell, in the order they are run."""
    short, middle, long = (20, 33, 40) if smoke else (70, 925, 8349)
    longest, few = (60, (1, 2)) if smoke else (37000, (2, 8))
    return {
        "forward": [lambda n=n: steps.forward(n) for n in (long, middle, short)],
        "step": [lambda: steps.step(long, 2), lambda: steps.step(middle, steps.rounds)],
        "captured": [lambda: captured(steps, middle, steps.rounds)] if steps.cuda else [],
        "captured_long": [lambda: captured(steps, long, 2)] if steps.cuda else [],
        "replayed": [lambda n=n: replayed(steps, n) for n in (short, middle)],
        "graph": [lambda n=n: graph(steps, n) for n in (short, middle) if steps.cuda],
        "nodes": [lambda n=n: steps.nodes(n) for n in (long, middle)],
        "kernels": [lambda n=n: steps.kernels(n) for n in (long, middle)],
        "long": [lambda: steps.long(longest, few)],
        "cached": [lambda n=n: steps.cached(n) for n in (middle, short)],
        "contracts": [lambda n=n: steps.contracts(n) for n in (middle, long)],
    }


def attempt(name: str, cell: Callable[[], Any], writer: Writer) -> bool:
    """Run a cell; a fault is a record of its own, so that the other cells are still made. Whether it ran."""
    try:
        cell()
    except Exception as error:  # noqa: BLE001  # whatever an engine or a driver raises
        traceback.print_exc()
        writer.add({"case": name, "refused": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"})
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "step_h200.json")
    parser.add_argument("--blocks", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=None, help="kinds of cells")
    parser.add_argument("--gates", type=Path, help="also run gates_h200 on the same models, into this file")
    parser.add_argument("--divergence", type=Path, help="also run divergence_h200 on them, into this file")
    parser.add_argument("--smoke", action="store_true", help="tiny engines on the CPU, few rows")
    arguments = parser.parse_args()
    device = "cpu" if arguments.smoke else "cuda"
    config = {**TINY, "num_layers": 3} if arguments.smoke else {**RELEASE, "num_layers": arguments.blocks}
    torch.utils.deterministic.fill_uninitialized_memory = False
    writer = Writer(arguments.out)
    with engine.engine():
        if device == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(True)
        engines = Engines(config, device)
        steps = Steps(engines, writer, 2 if arguments.smoke else arguments.rounds)
        todo = [(kind, cell) for kind, made in cells(steps, arguments.smoke).items() for cell in made]
        chosen = [(kind, cell) for kind, cell in todo if arguments.only is None or kind in arguments.only]
        chosen[4:4] = list(checks(engines, arguments, writer))
        return int(not all([attempt(kind, cell, writer) for kind, cell in chosen]))


def checks(
    engines: Engines, arguments: argparse.Namespace, writer: Writer
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Gates and divergence on the same models, if asked for."""
    from divergence_h200 import run_divergence
    from gates_h200 import run_gates

    if arguments.gates:
        yield "gates", lambda: run_gates(engines, Writer(arguments.gates))
    if arguments.divergence:
        rows = 33 if arguments.smoke else 925
        yield "divergence", lambda: run_divergence(engines, Writer(arguments.divergence), rows)


if __name__ == "__main__":
    sys.exit(main())
