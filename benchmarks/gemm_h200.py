"""The linears under both contracts against stock ``F.linear`` on an H200: time, scratch, and error against fp64.

    python benchmarks/gemm_h200.py [--out results/gemm_h200.json] [--rows 70 925 8349] [--rounds 21] [--only forward]

One record per operation, rows, tensor-parallel degree, contract, provider and direction. Every provider of a cell and
stock are interleaved in one run (CUDA graphs, L2 flushed, medians). tp > 1 is one rank's share against ``F.linear`` on
that share; row-parallel ranks return their fp32 subtree root. Backward dX and dW are compared with ``torch.mm`` on the
same operands. Errors are ||y - fp64|| / ||fp64|| over 70 rows. ``extra_bytes`` is memory beside operands and result;
cuBLAS's own workspace, which stock holds too, is not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from h3_kernels import fused
from h3_kernels.contract import PROJECTION, UNITS, parallel_id
from h3_kernels.providers import GemmCall, choose, tree_gemm
from h3_kernels.reference import truth
from h3_kernels.testing import interleaved_bench
from torch import Tensor
from torch.nn.functional import linear

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import records  # noqa: E402

BF16 = torch.bfloat16
SHAPES = {"qkv_proj": (21504, 5376), "fc1": (28672, 5376), "out_proj": (5376, 7168), "fc2": (5376, 14336)}
COLUMN_PARALLEL = ("qkv_proj", "fc1")
ERROR_ROWS = 70


@dataclass(frozen=True)
class Cell:
    """One product to time: operands a [m, k] and b [n, k], the stock call for it, and the providers to ask."""

    op: str
    rows: int
    tp: int
    contract: str
    direction: str
    a: Tensor
    b: Tensor
    stock: Callable[[], Tensor]
    units: int
    out_dtype: torch.dtype
    providers: tuple[str, ...]

    def call(self) -> GemmCall:
        """The call as providers see it."""
        layouts = ("k" if self.a.stride(1) == 1 else "m", "k" if self.b.stride(1) == 1 else "n")
        sizes = (self.a.shape[0], self.b.shape[0], self.a.shape[1])
        capability = torch.cuda.get_device_capability()
        return GemmCall(*sizes, self.units, BF16, self.out_dtype, *layouts, False, "cuda", capability)  # type: ignore[arg-type]

    def run(self, provider: str) -> Tensor:
        """The contract's product by ``provider``."""
        return tree_gemm(self.a, self.b, units=self.units, out_dtype=self.out_dtype, provider=provider)


def operands(op: str, rows: int, tp: int) -> tuple[Tensor, Tensor]:
    """x [rows, K] and weight [N, K] of one rank."""
    n, k = SHAPES[op]
    n, k = (n // tp, k) if op in COLUMN_PARALLEL else (n, k // tp)
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, k, device="cuda", generator=generator).to(BF16)
    weight = (torch.randn(n, k, device="cuda", generator=generator) * k**-0.5).to(BF16)
    return x, weight


def forward(op: str, rows: int) -> Iterator[Cell]:
    """The whole linear on one device, under every contract that covers it."""
    x, weight = operands(op, rows, 1)

    def stock() -> Tensor:
        return linear(x, weight)

    def cell(contract: str, units: int, *providers: str) -> Cell:
        return Cell(op, rows, 1, contract, "forward", x, weight, stock, units, BF16, providers)

    if op in COLUMN_PARALLEL:
        yield cell(PROJECTION, 1, "cublaslt", "triton", "fused-sm90")
        return
    yield cell(parallel_id(8), 8, "fused-sm90", "bmm-tree", *(("triton",) if rows < 1000 else ()))
    for units in (4, 2):
        yield cell(parallel_id(units), units, "fused-sm90")
    yield cell(parallel_id(1), 1, "cublaslt", "fused-sm90")


def ranks(op: str, rows: int) -> Iterator[Cell]:
    """One rank's share at tp 2, 4 and 8."""
    for tp in (2, 4, 8):
        x, weight = operands(op, rows, tp)
        units, out = (1, BF16) if op in COLUMN_PARALLEL else (UNITS // tp, torch.float32)
        contract = PROJECTION if op in COLUMN_PARALLEL else parallel_id(UNITS)

        def stock(x: Tensor = x, weight: Tensor = weight) -> Tensor:
            return linear(x, weight)

        yield Cell(op, rows, tp, contract, "forward", x, weight, stock, units, out, ("auto",))


def backward(op: str, rows: int) -> Iterator[Cell]:
    """dX and dW: the tree over N for a column-parallel dX, one chain otherwise."""
    x, weight = operands(op, rows, 1)
    dy = torch.randn(rows, weight.shape[0], device="cuda").to(BF16)
    contract, units = (PROJECTION, UNITS) if op in COLUMN_PARALLEL else (parallel_id(UNITS), 1)

    def stock_dx() -> Tensor:
        return torch.mm(dy, weight)

    def stock_dw() -> Tensor:
        return torch.mm(dy.t(), x)

    yield Cell(op, rows, 1, contract, "dX", dy, weight.t(), stock_dx, units, BF16, ("auto",))
    yield Cell(op, rows, 1, contract, "dW", dy.t(), x.t(), stock_dw, 1, BF16, ("auto",))


def relative_error(y: Tensor, exact: Tensor) -> float:
    """Of the first rows, against fp64."""
    return float((y[:ERROR_ROWS].double() - exact).norm() / exact.norm())


def extra_bytes(cell: Cell, provider: str) -> int:
    """Scratch of one call: the fused plan's workspace, or what the call allocates beside its result."""
    if provider == "fused-sm90":
        call = cell.call()
        sizes = (call.m, call.n, call.k, call.units)
        return fused.plan(*sizes, call.a_layout != "k", call.b_layout != "k").scratch_bytes
    cell.run(provider)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = cell.run(provider)
    return torch.cuda.max_memory_allocated() - before - y.numel() * y.element_size()


def measure(cell: Cell, rounds: int) -> Iterator[records.Record]:
    """One record per provider of the cell; one that is refused gives a record with the reason."""
    variants: dict[str, Callable[[], Tensor]] = {"stock": cell.stock}
    serving: dict[str, str] = {}
    for wanted in cell.providers:
        try:
            serving[wanted] = choose(cell.call(), wanted, torch.device("cuda", 0)).name
        except Exception as error:  # noqa: BLE001  # a refusal is a result
            yield record(cell, wanted, refused=str(error))
            continue
        variants[wanted] = lambda wanted=wanted: cell.run(wanted)
    times = interleaved_bench(variants, rounds=rounds)
    exact = truth(cell.a[:ERROR_ROWS], cell.b)
    stock_error = relative_error(cell.stock(), exact)
    for wanted, name in serving.items():
        ours, stock = times[wanted].median_us, times["stock"].median_us
        yield record(
            cell, name, ours_us=round(ours, 2), stock_us=round(stock, 2), ratio=round(ours / stock, 4),
            auto=wanted == "auto" or choose(cell.call(), "auto", torch.device("cuda", 0)).name == name,
            extra_bytes=extra_bytes(cell, name), error=relative_error(cell.run(wanted), exact), stock_error=stock_error,
        )  # fmt: skip


def record(cell: Cell, provider: str, **measured: object) -> records.Record:
    """A record with the cell's conditions first."""
    head = {"op": cell.op, "rows": cell.rows, "tp": cell.tp, "contract": cell.contract, "provider": provider}
    return {**head, "direction": cell.direction, **measured}


GROUPS = {"forward": forward, "backward": backward, "ranks": ranks}


def main() -> None:
    """Measure every cell, writing after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gemm_h200.json")
    parser.add_argument("--rows", type=int, nargs="+", default=[70, 925, 8349])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--only", choices=GROUPS, nargs="+", default=list(GROUPS))
    arguments = parser.parse_args()
    found: list[records.Record] = []
    for group in arguments.only:
        for op in SHAPES:
            for rows in arguments.rows:
                rounds = arguments.rounds if rows < 4000 else max(9, arguments.rounds // 2)
                for cell in GROUPS[group](op, rows):
                    found.extend(measure(cell, rounds))
                records.write(arguments.out, found)
                print(f"{group} {op} {rows} rows: {len(found)} records", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
