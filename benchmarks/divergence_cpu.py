"""Where runs of one denoising forward part: the share of rows that differ, output by output, against a strict trace.

    python benchmarks/divergence_cpu.py [--out benchmarks/results/divergence_cpu.json]

The real Diffusers transformer at a small size with random weights, on a CPU, every node bound to the contracts. Each
case changes one thing of the strict run: nothing; every node on Diffusers' own arithmetic; the partial sums of one
row-parallel linear rounded to bf16, as ranks that exchange bf16 tensors do; one norm weight moved by one bf16 step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from h3_adapter_diffusers import install_h3_training
from h3_adapter_diffusers.testing.packings import fl2va
from h3_adapter_diffusers.testing.tiny import build, velocities
from h3_kernels.contract import UNITS
from h3_kernels.testing import NEGATIVE_FOLDS, twin_gemm
from h3_kernels.trace import Recorder, Trace, divergences
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from records import Writer  # noqa: E402

Change = Callable[[nn.Module], Any]


def nothing(model: nn.Module) -> None:
    """Strict against strict."""


def diffusers_arithmetic(model: nn.Module) -> str:
    """Every node as Diffusers ships it."""
    return "*"


def bf16_partials(model: nn.Module) -> dict[str, Any]:
    """The units of one fc2 rounded before they are added, as an all-reduce over bf16 tensors does."""
    weight = model.transformer_blocks[0].ff.net[2].weight
    add = partial(
        twin_gemm, fold=NEGATIVE_FOLDS["tree of bf16 partials"], units=UNITS, out_dtype=torch.bfloat16
    )

    def replacement(strict: object, f: Tensor) -> tuple[Tensor]:
        return (add(f, weight),)

    return {"blocks.0.mlp.fc2": replacement}


def one_step(model: nn.Module) -> None:
    """One norm weight, one bf16 step away."""
    model.transformer_blocks[1].norm2.weight.data.view(torch.int16)[7] += 1


CASES: dict[str, Change] = {
    "strict again": nothing,
    "Diffusers' own arithmetic": diffusers_arithmetic,
    "fc2 of block 0 from bf16 partial sums": bf16_partials,
    "norm2 of block 1 off by one bf16 step": one_step,
}


def trace(change: Change) -> Trace:
    """One forward of a fresh model after `change`, which returns the overlay to run it with."""
    model, recorder = build(), Recorder("run")
    overlay = change(model)
    with (
        torch.no_grad(),
        install_h3_training(model, scope="model", overlay=overlay) as handle,
        handle.trace(recorder),
    ):
        velocities(model, fl2va())
    return recorder.trace


def compare(strict: Trace, case: str, other: Trace) -> dict[str, Any]:
    """A record: every output in the order computed, and the share of its rows that differ."""
    differing = {
        (d.node, d.slot): d.differing / d.rows for d in divergences(strict, other) if d.node != "velocity"
    }
    outputs = list(strict.steps[0].outputs)
    share = [round(differing.get(key, 0.0), 4) for key in outputs]
    names = [f"{node} [{slot}]" for node, slot in outputs]
    return {"subject": "one forward", "case": case, "outputs": names, "share": share}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/divergence_cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    writer, strict = Writer(arguments.out), trace(nothing)
    for case, change in CASES.items():
        writer.add(compare(strict, case, trace(change)))


if __name__ == "__main__":
    main()
