"""Tensor and sequence parallel on several GPUs: collectives and layers against stock NCCL, and the bits of each degree.

    python benchmarks/parallel_h200.py --gpus 8 [--out FILE] [--rows 70 925 8349] [--rounds 21] [--only bits]
    python benchmarks/parallel_h200.py --gpus 4 --smoke   # small sizes, ranks sharing one GPU or the CPU, over gloo

One process a GPU; every tp of 2, 4 and 8 that fits runs in processes of its own. Variants of a cell are interleaved in
one run (CUDA graphs, L2 flushed, medians of the slowest rank). One record per op, rows, tp and form:

- collectives: fp32 roots [rows, 5376] to bf16 against NCCL's bf16 all-reduce, reduce-scatter or all-gather of them;
- layers: GEMM and collective against ``F.linear`` (``torch.mm`` for dX) and NCCL's collective, on the rank's shard;
- bits: bytes of y, dX and dW that differ from one process's, and of every form's sums from the canonical tree's.

``differing_bytes`` is the sum over all ranks. A record of op "backend sum" is the negative twin: NCCL's own fp32 sum of
the same roots. --smoke gives no figures worth keeping and writes to a temporary file unless --out names one.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from h3_kernels.collectives import TorchDistributedCollective
from h3_kernels.collectives.protocol import name_of
from h3_kernels.contract import TP_DEGREES, UNITS, row_range
from h3_kernels.errors import CollectiveError
from h3_kernels.projection import projection
from h3_kernels.reference import finish, fold_tree
from h3_kernels.row_parallel import row_parallel
from h3_kernels.testing import cancellation_inputs, random_inputs, shard_columns, shard_parts
from parallel_ranks import Stock, World, bench, environment, run_world, total
from torch import Tensor
from torch.nn.functional import linear

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import records  # noqa: E402

BF16 = torch.bfloat16
# name: (N, K) of the model's four linears, and of small ones with the same divisors.
SHAPES = {"qkv_proj": (21504, 5376), "fc1": (28672, 5376), "out_proj": (5376, 7168), "fc2": (5376, 14336)}
SMALL = {"qkv_proj": (1536, 512), "fc1": (1024, 512), "out_proj": (512, 1024), "fc2": (512, 1024)}
PARTS = {"qkv_proj": [0, 1, 2], "fc1": [0, 1]}
"""Column-parallel linears and the parts of their fused weight."""

ROW_FORMS = ("scatter", "hierarchical", "peer")
"""What differs where rows stay scattered: gather and auto then move them as scatter does."""

Record = dict[str, Any]
Forms = dict[str, TorchDistributedCollective]


@dataclass(frozen=True)
class Run:
    """One degree: its ranks, every form of collective over them, the linears' sizes, and the rounds of a cell."""

    world: World
    forms: Forms
    shapes: dict[str, tuple[int, int]]
    rounds: int

    def rounds_of(self, rows: int) -> int:
        """Fewer where a round takes long."""
        return self.rounds if rows < 4000 else max(2, self.rounds // 2)

    def where(self, form: TorchDistributedCollective) -> dict[str, Any]:
        """Arguments of a linear on this rank."""
        return {"tp": self.world.size, "rank": self.world.rank, "collective": form}


def forms(world: World) -> tuple[Forms, Record | None]:
    """Every form this world can take, two nodes of half the ranks for the hierarchical one; why not peer, if so."""
    made = {name: TorchDistributedCollective(form=name) for name in ("auto", "gather", "scatter")}
    if world.size > 2:
        made["hierarchical"] = TorchDistributedCollective(form="hierarchical", node_size=world.size // 2)
    refused = None
    if world.device != "cpu":
        peer = TorchDistributedCollective(form="peer")
        try:
            peer.all_reduce_tree(torch.zeros(1, 8, device=world.device))
            made["peer"] = peer
        except CollectiveError as error:
            refused = {"op": "all_reduce", "form": "peer", "refused": str(error)}
    if total(world, refused is not None):
        made.pop("peer", None)
        refused = refused or {"op": "all_reduce", "form": "peer", "refused": "another rank cannot"}
    return made, refused


def differing(a: Tensor, b: Tensor) -> int:
    """Bytes that differ."""
    a, b = (t.contiguous().view(torch.uint8) for t in (a, b))
    return int((a != b).sum())


def roots(world: World, rows: int, columns: int) -> Tensor:
    """fp32 roots [ranks, rows, N] of all ranks, the same on every rank, whose order of addition shows."""
    generator = torch.Generator(world.device).manual_seed(rows)
    shape = (world.size, rows, columns)
    large = torch.randn(shape, generator=generator, device=world.device) * 2.0**20
    return large - large.flip(0) + torch.randn(shape, generator=generator, device=world.device)


# Collectives alone.


def stock_collectives(world: World, rows: int, columns: int) -> dict[str, Callable[[], object]]:
    """The backend's collective of the bf16 tensor, by op; scattered rows are padded to whole chunks, as it demands."""
    chunk, stock = -(-rows // world.size), Stock(world)
    whole = torch.zeros(rows, columns, dtype=BF16, device=world.device)
    padded = torch.zeros(chunk * world.size, columns, dtype=BF16, device=world.device)
    part = torch.zeros(chunk, columns, dtype=BF16, device=world.device)
    return {
        "all_reduce": lambda: stock.all_reduce(whole),
        "reduce_scatter": lambda: stock.reduce_scatter(part, padded),
        "all_gather": lambda: stock.all_gather(padded, part),
    }


def collectives(run: Run, rows: int) -> Iterator[Record]:
    """Time of every form beside the backend's, and the bytes that differ from the canonical tree's."""
    world, columns = run.world, run.shapes["out_proj"][0]
    every = roots(world, rows, columns)
    root, tree = every[world.rank].clone(), fold_tree(every)
    del every
    expected, own = finish(tree, None, BF16), slice(*row_range(rows, world.size, world.rank))
    wrong = total(world, differing(Stock(world).all_reduce(root.clone()).to(world.device), tree))
    yield {"op": "backend sum", "form": "stock", "differing_bytes": wrong}
    del tree
    for op, stock in stock_collectives(world, rows, columns).items():
        names = run.forms if op == "all_reduce" else [name for name in ROW_FORMS if name in run.forms]
        calls = {name: collective_call(op, run.forms[name], root, expected[own], rows) for name in names}
        wanted = expected[own] if op == "reduce_scatter" else expected
        differ = {name: total(world, differing(call(), wanted)) for name, call in calls.items()}
        times = bench(world, {"stock": stock, **calls}, run.rounds_of(rows))
        for name in calls:
            yield {**timed(op, name, "forward", times), "differing_bytes": differ[name]}


def collective_call(
    op: str, form: TorchDistributedCollective, root: Tensor, mine: Tensor, rows: int
) -> Callable[[], Tensor]:
    """One call of ``form``."""
    return {
        "all_reduce": lambda: form.all_reduce_tree(root, out_dtype=BF16),
        "reduce_scatter": lambda: form.reduce_scatter_tree(root, out_dtype=BF16),
        "all_gather": lambda: form.all_gather_rows(mine, rows),
    }[op]


def timed(op: str, form: str, direction: str, times: dict[str, float]) -> Record:
    """The timed part of a record."""
    ours, stock = times[form], times["stock"]
    measured = {"ours_us": round(ours, 2), "stock_us": round(stock, 2), "ratio": round(ours / stock, 4)}
    return {"op": op, "form": form, "direction": direction, **measured}


# Layers: the rank's GEMM and the collective behind or before it.


def layers(run: Run, rows: int) -> Iterator[Record]:
    """Row-parallel forward (rows whole and scattered), column-parallel dX, and column-parallel forward of own rows."""
    for op in run.shapes:
        for kind, (stock, ours) in layer_calls(run, op, rows).items():
            names = [name for name in ROW_FORMS if name in run.forms] if "rows" in kind else list(run.forms)
            calls = {name: functools.partial(ours, run.forms[name]) for name in names}
            with torch.no_grad():
                times = bench(run.world, {"stock": stock, **calls}, run.rounds_of(rows))
            for name in calls:
                yield timed(f"{op} {kind}", name, "dX" if kind == "dX" else "forward", times)


Calls = tuple[Callable[[], object], Callable[[TorchDistributedCollective], object]]


def layer_calls(run: Run, op: str, rows: int) -> dict[str, Calls]:
    """By kind: the stock call and ours for a form."""
    return column_calls(run, op, rows) if op in PARTS else row_calls(run, op, rows)


def column_calls(run: Run, op: str, rows: int) -> dict[str, Calls]:
    """dX of a column-parallel linear, and its forward when ranks hold rows."""
    world, (n, k) = run.world, run.shapes[op]
    chunk = -(-rows // world.size)
    seeded: Any = {"device": world.device, "seed": rows}
    x, weight = random_inputs(chunk * world.size, n // world.size, k, **seeded)
    dy, _ = random_inputs(rows, 1, n // world.size, **seeded)
    own = x[slice(*row_range(rows, world.size, world.rank))].contiguous()
    part, gathered, units = x[:chunk].clone(), torch.empty_like(x), UNITS // world.size
    stock, input_grad = Stock(world), torch.ops.h3_kernels.input_grad

    def stock_gathered() -> Tensor:
        stock.all_gather(gathered, part)
        return linear(gathered[:rows], weight)

    return {
        "dX": (
            lambda: stock.all_reduce(torch.mm(dy, weight)),
            lambda form: input_grad(dy, weight, PARTS[op], units, False, "auto", name_of(form)),
        ),
        "rows gathered": (
            stock_gathered,
            lambda form: projection(own, weight, gather_rows=rows, parts=PARTS[op], **run.where(form)),
        ),
    }


def row_calls(run: Run, op: str, rows: int) -> dict[str, Calls]:
    """Forward of a row-parallel linear, its rows whole and scattered."""
    world, (n, k) = run.world, run.shapes[op]
    chunk = -(-rows // world.size)
    x, weight = random_inputs(chunk * world.size, n, k // world.size, device=world.device, seed=rows)
    scattered, stock = torch.empty(chunk, n, dtype=BF16, device=world.device), Stock(world)
    return {
        "layer": (
            lambda: stock.all_reduce(linear(x[:rows], weight)),
            lambda form: row_parallel(x[:rows], weight, **run.where(form)),
        ),
        "rows scattered": (
            lambda: stock.reduce_scatter(scattered, linear(x, weight)),
            lambda form: row_parallel(x[:rows], weight, scatter_rows=True, **run.where(form)),
        ),
    }


# Bits: every degree against one process.


def bits(run: Run, rows: int) -> Iterator[Record]:
    """Bytes of y, dX and dW of the ranks that differ from those of one process on the same inputs."""
    world = run.world
    for op in run.shapes:
        tensors = whole_tensors(op, run.shapes[op], rows, world.device)
        one = gradients(op, *tensors)
        held = [cut(op, name, t, world) for name, t in zip(("x", "w", "dy"), tensors, strict=True)]
        for form, collective in run.forms.items():
            for direction, t in gradients(op, *held, **run.where(collective)).items():
                wanted = cut(op, direction, one[direction], world)
                yield {
                    "op": f"{op} bits", "form": form, "direction": direction,
                    "compared_bytes": world.size * wanted.numel() * wanted.itemsize,
                    "differing_bytes": total(world, differing(t, wanted)),
                }  # fmt: skip


def whole_tensors(op: str, shape: tuple[int, int], rows: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, K], weight [N, K], dy [rows, N], cancelling, the same on every rank."""
    n, k = shape
    x, weight = cancellation_inputs(rows, n, k, device=device, seed=rows)
    dy, _ = cancellation_inputs(rows, 1, n, device=device, seed=rows + 7)
    return x, weight, dy


def gradients(op: str, x: Tensor, weight: Tensor, dy: Tensor, **at: Any) -> dict[str, Tensor]:
    """y, dX and dW of one linear."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = projection(x, weight, parts=PARTS[op], **at) if op in PARTS else row_parallel(x, weight, **at)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    return {"forward": y.detach(), "dX": dx, "dW": dw}


def cut(op: str, name: str, t: Tensor, world: World) -> Tensor:
    """The rank's share of a whole tensor of ``op``: x and dX, w and dW, dy and y are cut alike."""
    kind = {"dX": "x", "dW": "w", "forward": "dy"}.get(name, name)
    if op in PARTS:
        dim = {"x": None, "w": 0, "dy": 1}[kind]
        return t if dim is None else shard_parts(t, world.size, world.rank, parts=len(PARTS[op]), dim=dim)
    return t if kind == "dy" else shard_columns(t, world.size, world.rank).contiguous()


GROUPS = {"bits": bits, "collectives": collectives, "layers": layers}


def work(world: World, arguments: argparse.Namespace) -> None:
    """Every cell of one degree; rank 0 adds each record to the file."""
    every, refused = forms(world)
    run = Run(world, every, SMALL if arguments.smoke else SHAPES, arguments.rounds)
    shared = {"ranks_share_a_device": world.shared, "settings": environment()}
    writer = None
    if world.rank == 0:
        writer = records.Writer(arguments.out)
        writer.records = records.load(arguments.out)
        if refused is not None:
            writer.add({"tp": world.size, **refused, **shared})
    for group in arguments.only:
        for rows in arguments.rows:
            for record in GROUPS[group](run, rows):
                if writer is not None:
                    writer.add({"op": record["op"], "rows": rows, "tp": world.size, **record, **shared})


def parse() -> argparse.Namespace:
    """The command line, with sizes a smoke run can afford."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, required=True, help="2, 4 or 8: the largest tp")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", choices=GROUPS, nargs="+", default=list(GROUPS))
    parser.add_argument("--tp", type=int, nargs="+", help="degrees to run (default: all up to --gpus)")
    parser.add_argument(
        "--smoke", action="store_true", help="small sizes; ranks may share a GPU or run on the CPU"
    )
    arguments = parser.parse_args()
    arguments.rows = arguments.rows or ([13] if arguments.smoke else [70, 925, 8349])
    arguments.rounds = arguments.rounds or (2 if arguments.smoke else 21)
    arguments.tp = arguments.tp or [tp for tp in TP_DEGREES if 1 < tp <= arguments.gpus]
    if not arguments.smoke and torch.cuda.device_count() < arguments.gpus:
        parser.error(f"{torch.cuda.device_count()} GPUs visible, --gpus {arguments.gpus}; or --smoke")
    return arguments


def main() -> int:
    """Measure every degree. Exit status 1 if a byte differed."""
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.out is None:
            results = ROOT / "benchmarks/results/parallel_h200.json"
            arguments.out = Path(folder) / "parallel.json" if arguments.smoke else results
        arguments.out.unlink(missing_ok=True)
        for tp in arguments.tp:
            run_world(tp, work, arguments)
        found = records.load(arguments.out)
    checked = [r for r in found if "differing_bytes" in r and r["form"] != "stock"]
    wrong = [r for r in checked if r["differing_bytes"]]
    print(f"{len(found)} records, {len(checked)} compared bit by bit, {len(wrong)} differ", file=sys.stderr)
    return 1 if wrong or not found else 0


if __name__ == "__main__":
    raise SystemExit(main())
