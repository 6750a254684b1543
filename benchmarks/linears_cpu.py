"""The CPU reference of both contracts: time against F.linear and against the same order in torch operations, and error.

    python benchmarks/linears_cpu.py [--out benchmarks/results/linears_cpu.json] [--rounds 15]

One record per shape, dtype and direction, of a block at a quarter of the model's width (inner 1792, FFN 3584). The CPU
path defines the bits that tests and tiny engines compare; it is not meant to be fast. One thread. Backward is dX, dW.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from h3_kernels import reference
from h3_kernels.projection import projection
from h3_kernels.row_parallel import row_parallel
from h3_kernels.testing import interleaved_bench, random_inputs
from torch import Tensor
from torch.nn.functional import linear

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from records import Writer  # noqa: E402

SHAPES = {"qkv_proj": (5376, 1344), "fc1": (7168, 1344), "out_proj": (1344, 1792), "fc2": (1344, 3584)}
UNITS = {"qkv_proj": 1, "fc1": 1, "out_proj": 8, "fc2": 8}
FORWARD = {1: projection, 8: row_parallel}
ROWS = (1, 70)


def error(y: Tensor, truth: Tensor) -> float:
    return float((y.double() - truth).norm() / truth.norm())


def step(
    call: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, dy: Tensor
) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    return torch.autograd.grad(call(*leaves), leaves, dy)


def cells(rounds: int) -> Iterator[dict[str, Any]]:
    for op in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            for rows in ROWS:
                yield forward(op, dtype, rows, rounds)
            yield backward(op, dtype, ROWS[-1], rounds)


def forward(op: str, dtype: torch.dtype, rows: int, rounds: int) -> dict[str, Any]:
    x, weight = random_inputs(rows, *SHAPES[op], dtype=dtype)
    units, truth = UNITS[op], reference.truth(x, weight)
    ours = FORWARD[units]
    variants: dict[str, Callable[[], object]] = {
        "ours": lambda: ours(x, weight),
        "stock": lambda: linear(x, weight),
    }
    if rows == 1:
        settings: dict[str, Any] = {"units": units, "out_dtype": dtype, "compiled": False}
        variants["torch_order"] = lambda: reference.tree_gemm(x, weight, **settings)
    errors = {"error": error(ours(x, weight), truth), "stock_error": error(linear(x, weight), truth)}
    return record(op, rows, dtype, "forward", rounds, variants) | errors


def backward(op: str, dtype: torch.dtype, rows: int, rounds: int) -> dict[str, Any]:
    n, k = SHAPES[op]
    x, weight = random_inputs(rows, n, k, dtype=dtype)
    dy = random_inputs(rows, 1, n, dtype=dtype, seed=1)[0]
    ours = FORWARD[UNITS[op]]
    variants = {"ours": lambda: step(ours, x, weight, dy), "stock": lambda: step(linear, x, weight, dy)}
    return record(op, rows, dtype, "forward and backward", rounds, variants)


def record(
    op: str,
    rows: int,
    dtype: torch.dtype,
    direction: str,
    rounds: int,
    variants: dict[str, Callable[[], object]],
) -> dict[str, Any]:
    times = {
        name: round(t.median_us, 1)
        for name, t in interleaved_bench(variants, device="cpu", rounds=rounds).items()
    }
    n, k = SHAPES[op]
    found = {
        "op": op,
        "rows": rows,
        "n": n,
        "k": k,
        "dtype": str(dtype).removeprefix("torch."),
        "direction": direction,
    }
    return (
        found
        | {f"{name}_us": us for name, us in times.items()}
        | {"ratio": round(times["ours"] / times["stock"], 2)}
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/linears_cpu.json")
    parser.add_argument("--rounds", type=int, default=15)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    writer = Writer(settings.out)
    for cell in cells(settings.rounds):
        writer.add(cell)


if __name__ == "__main__":
    main()
