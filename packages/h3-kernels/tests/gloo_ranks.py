"""What each rank of a process group does in the collective tests; run by ``run_ranks`` in fresh processes.

Every rank computes its share of each case and saves what it got; the tests compare the files with one process. Over
gloo all ranks share the CPU or one GPU, over NCCL each has a GPU of its own.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from h3_kernels.collectives import TorchDistributedCollective, cost
from h3_kernels.contract import UNITS, row_range
from h3_kernels.logical_keys import LogicalKeys
from h3_kernels.lora import ColumnStyle, RowStyle, lora_linear
from h3_kernels.projection import projection, projection_group
from h3_kernels.providers import tree_gemm
from h3_kernels.row_parallel import row_parallel
from h3_kernels.testing import cancellation_inputs, shard_columns, shard_parts

ROWS, K, N = 13, 128, 96
PARTS = 3
FORMS: dict[str, dict[str, Any]] = {
    "auto": {},
    "gather": {"form": "gather"},
    "scatter": {"form": "scatter"},
    "hierarchical": {"form": "hierarchical", "node_size": 2},
    "two nodes": {"form": "hierarchical", "node_size": 4},
    "peer": {"form": "peer"},
    "peer rows": {"form": "peer"},
}
"""At 8 ranks, hierarchical is 4 nodes of 2 and two nodes is 2x4; the other forms are 1x8. Roots this small go to every
peer whole; ``peer rows`` sends each its rows, as large ones do."""

Outputs = dict[str, torch.Tensor]


def forms(world_size: int, device: str, backend: str) -> list[str]:
    """Names of the forms a world takes: peer needs CUDA, two nodes of 4 need 8 ranks.

    Ranks that share a GPU copy through the host for gloo, whose forms the CPU's worlds go through in full: they take
    one of them beside the peer forms.
    """
    if device == "cpu":
        absent = {"peer", "peer rows"}
    else:
        absent = {"gather", "scatter", "hierarchical", "two nodes"} if backend == "gloo" else set()
    return [name for name in FORMS if name not in absent and (name != "two nodes" or world_size == 8)]


def run_ranks(world_size: int, folder: Path, device: str = "cpu", backend: str = "gloo") -> list[Outputs]:
    """Results of every rank, in rank order, on the CPU; raises if a rank fails."""
    mp.spawn(_rank, args=(world_size, str(folder), device, backend), nprocs=world_size)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


def _rank(rank: int, world_size: int, folder: str, device: str, backend: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    if backend == "nccl":
        torch.cuda.set_device(rank)
    elif device == "cuda":
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        # Both load the compiler or FSDP, 2 s in each process: once is enough.
        results = backend_case("cpu" if backend == "gloo" else device) | (
            sharded_case() | compiled_case() if world_size == 2 and device == "cpu" else {}
        )
        for name in forms(world_size, device, backend):
            exchange = TorchDistributedCollective(**FORMS[name])
            cases = [exchange_case, linear_case, sequence_case, lora_case]
            if name.startswith("peer"):
                cost.SECOND_STEP_BYTES["peer"] = 1 << 20 if name == "peer" else -1
                cases.append(captured_case)
            for case in cases:
                results |= {f"{name}/{k}": v for k, v in case(exchange, device).items()}
        torch.save({name: t.cpu() for name, t in results.items()}, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def roots(world_size: int, rows: int) -> torch.Tensor:
    """fp32 subtree roots [ranks, rows, 5] whose order of addition shows in almost every element."""
    generator = torch.Generator().manual_seed(rows)
    large = torch.randn(world_size, rows, 5, generator=generator) * 2.0**20
    return large - large.flip(0) + torch.randn(world_size, rows, 5, generator=generator)


def exchange_case(exchange: TorchDistributedCollective, device: str) -> Outputs:
    bias = torch.arange(5, device=device).float()
    out = {}
    for rows in (1, exchange.world_size, ROWS):
        root = roots(exchange.world_size, rows)[exchange.rank].to(device)
        before = root.clone()
        out[f"reduce{rows}"] = exchange.all_reduce_tree(root)
        out[f"reduce{rows}/bf16"] = exchange.all_reduce_tree(root, bias=bias, out_dtype=torch.bfloat16)
        scattered = exchange.reduce_scatter_tree(root, bias=bias, out_dtype=torch.bfloat16)
        out[f"scatter{rows}"] = scattered
        out[f"gather{rows}"] = exchange.all_gather_rows(scattered, rows)
        out[f"untouched{rows}"] = (root == before).all()
    return out


def captured_case(exchange: TorchDistributedCollective, device: str) -> Outputs:
    """The three calls in one CUDA graph, replayed; nothing of a replay may meet the one before it."""
    root = roots(exchange.world_size, ROWS)[exchange.rank].to(device)

    def calls() -> list[torch.Tensor]:
        scattered = exchange.reduce_scatter_tree(root)
        return [exchange.all_reduce_tree(root), scattered, exchange.all_gather_rows(scattered, ROWS)]

    calls()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog queries events in another thread meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = calls()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return {f"captured{i}": t for i, t in enumerate(captured)}


def small_bias(n: int) -> torch.Tensor:
    """Of the size of what the cancelling sums leave, so that it hides none of their bits."""
    return torch.linspace(-1e-5, 1e-5, n).bfloat16()


def _to(device: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.to(device) for t in tensors]


def column_tensors(device: str = "cpu") -> list[torch.Tensor]:
    """x [ROWS, K], fused weight [3 N, K], bias [3 N], dy [ROWS, 3 N], whole."""
    x, weight = cancellation_inputs(ROWS, PARTS * N, K, seed=1)
    dy, _ = cancellation_inputs(ROWS, 1, PARTS * N, seed=2)
    return _to(device, x, weight, small_bias(PARTS * N), dy)


def row_tensors(device: str = "cpu") -> list[torch.Tensor]:
    """x [ROWS, K], weight [N, K], bias [N], dy [ROWS, N], whole."""
    x, weight = cancellation_inputs(ROWS, N, K, seed=3)
    dy, _ = cancellation_inputs(ROWS, 1, N, seed=4)
    return _to(device, x, weight, small_bias(N), dy)


def lora_tensors(device: str = "cpu") -> list[torch.Tensor]:
    """x [ROWS, K], base_out [ROWS, N], a [8, K], b [N, 8], dy [ROWS, N], whole."""
    x, a = cancellation_inputs(ROWS, 8, K, seed=5)
    _, b = cancellation_inputs(1, N, 8, seed=6)
    dy, _ = cancellation_inputs(ROWS, 1, N, seed=7)
    generator = torch.Generator().manual_seed(8)
    return _to(device, x, torch.randn(ROWS, N, generator=generator).bfloat16(), a, b, dy)


def keys(device: str = "cpu") -> LogicalKeys:
    """Keys that reverse the rows and drop the second one."""
    table = torch.stack([torch.zeros(ROWS, dtype=torch.int64), torch.arange(ROWS).flip(0)], dim=1)
    table[1, 0] = -1
    return LogicalKeys(table.to(device))


def gradients(name: str, y: torch.Tensor, dy: torch.Tensor, **leaves: torch.Tensor) -> Outputs:
    """y and the gradient of every leaf, as ``name/y``, ``name/dx`` and so on."""
    found = torch.autograd.grad(y, list(leaves.values()), dy)
    return {f"{name}/y": y.detach()} | {f"{name}/d{n}": g for n, g in zip(leaves, found, strict=True)}


def _leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.clone().requires_grad_() for t in tensors]


def linear_case(exchange: TorchDistributedCollective, device: str) -> Outputs:
    tp, rank = exchange.world_size, exchange.rank
    where: dict[str, Any] = {"tp": tp, "rank": rank, "collective": exchange, "logical_keys": keys(device)}
    x, weight, bias, dy = column_tensors(device)
    weight, bias, dy = (
        shard_parts(t, tp, rank, parts=PARTS, dim=d) for t, d in ((weight, 0), (bias, 0), (dy, 1))
    )
    x, weight, bias = _leaves(x, weight, bias)
    y = projection(x, weight, bias, parts=(0, 1, 2), **where)
    out = gradients("column", y, dy, x=x, w=weight, b=bias)
    ys = projection_group(x, weight.detach().chunk(PARTS), **where)
    (out["group/dx"],) = torch.autograd.grad(ys, x, dy.chunk(PARTS, dim=1))
    x, weight, bias, dy = row_tensors(device)
    x, weight, bias = _leaves(*(shard_columns(t, tp, rank) for t in (x, weight)), bias)
    y = row_parallel(x, weight, bias, **where)
    return out | gradients("row", y, dy, x=x, w=weight, b=bias)


def sequence_case(exchange: TorchDistributedCollective, device: str) -> Outputs:
    """Sequence parallel: a column-parallel linear gathers rows, a row-parallel one scatters them."""
    tp, rank = exchange.world_size, exchange.rank
    start, stop = row_range(ROWS, tp, rank)
    where: dict[str, Any] = {"tp": tp, "rank": rank, "collective": exchange, "logical_keys": keys(device)}
    x, weight, bias, dy = column_tensors(device)
    weight, bias, dy = (
        shard_parts(t, tp, rank, parts=PARTS, dim=d) for t, d in ((weight, 0), (bias, 0), (dy, 1))
    )
    x, weight, bias = _leaves(x[start:stop], weight, bias)
    y = projection(x, weight, bias, parts=(0, 1, 2), gather_rows=ROWS, **where)
    out = gradients("sequence column", y, dy, x=x, w=weight, b=bias)
    x, weight, bias, dy = row_tensors(device)
    x, weight, bias = _leaves(*(shard_columns(t, tp, rank) for t in (x, weight)), bias)
    y = row_parallel(x, weight, bias, scatter_rows=True, **where)
    return out | gradients("sequence row", y, dy[start:stop], x=x, w=weight, b=bias)


def lora_case(exchange: TorchDistributedCollective, device: str) -> Outputs:
    tp, rank = exchange.world_size, exchange.rank
    x, base, a, b, dy = lora_tensors(device)
    base, b, dy = (shard_parts(t, tp, rank, dim=dim) for t, dim in ((base, 1), (b, 0), (dy, 1)))
    x, base, a, b = _leaves(x, base, a, b)
    y = lora_linear(x, base, a, b, 0.75, style=ColumnStyle(tp, rank, exchange))
    out = gradients("lora column", y, dy, x=x, base=base, a=a, b=b)
    x, base, a, b, dy = lora_tensors(device)
    x, base, a, b = _leaves(shard_columns(x, tp, rank), base, shard_columns(a, tp, rank), b)
    y = lora_linear(x, base, a, b, 0.75, style=RowStyle(tp=tp, rank=rank, collective=exchange))
    return out | gradients("lora row", y, dy, x=x, base=base, a=a, b=b)


class Block(torch.nn.Module):
    """The column-parallel weight of ``column_tensors`` and a row-parallel one behind it, unsharded by tp."""

    def __init__(self) -> None:
        super().__init__()
        _, weight, bias, _ = column_tensors()
        self.up, self.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
        self.down = torch.nn.Parameter(weight.t().contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return row_parallel(projection(x, self.up, self.bias, parts=(0, 1, 2)), self.down)


def block_gradients(block: torch.nn.Module) -> Outputs:
    """y, dX and the parameters' gradients of one forward and backward."""
    x, *_ = column_tensors()
    (x,) = _leaves(x)
    dy, _ = cancellation_inputs(ROWS, 1, K, seed=9)
    y = block(x)
    y.backward(dy)
    found: Outputs = {"fsdp/y": y.detach(), "fsdp/dx": x.grad}  # type: ignore[dict-item]
    for name, parameter in block.named_parameters():
        gradient: Any = parameter.grad
        found[f"fsdp/{name}"] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def sharded_case() -> Outputs:
    """FSDP2 over two ranks on equal data; the mean of two equal gradients is exact."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return block_gradients(fully_shard(Block(), mesh=mesh))


def compiled_case() -> Outputs:
    """Both linears in one compiled graph with their exchanges."""
    exchange = TorchDistributedCollective()
    tp, rank = exchange.world_size, exchange.rank
    where: dict[str, Any] = {"tp": tp, "rank": rank, "collective": exchange}

    def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return row_parallel(projection(x, up, parts=(0, 1, 2), **where), down, **where)

    x, weight, *_ = column_tensors()
    up = shard_parts(weight, tp, rank, parts=PARTS)
    x, up, down = _leaves(x, up, up.t().contiguous())
    dy, _ = cancellation_inputs(ROWS, 1, K, seed=9)
    out = {}
    for name, call in {
        "eager": block,
        "compiled": torch.compile(block, backend="aot_eager", fullgraph=True),
    }.items():
        out |= gradients(name, call(x, up, down), dy, x=x, up=up, down=down)
    return out


def partial_dx(world_size: int, rank: int) -> torch.Tensor:
    """A rank's fp32 subtree root of the column-parallel dX, on the CPU."""
    _, weight, _, dy = column_tensors()
    dy = shard_parts(dy, world_size, rank, parts=PARTS, dim=1)
    weight = shard_parts(weight, world_size, rank, parts=PARTS)
    return tree_gemm(dy, weight.t(), units=UNITS // world_size, out_dtype=torch.float32)


def backend_case(device: str) -> Outputs:
    """The negative twins: the backend's own sums of the same roots, and of the same partial dX."""
    rank, size = dist.get_rank(), dist.get_world_size()
    totals = roots(size, ROWS)[rank].to(device), partial_dx(size, rank).to(device)
    for total in totals:
        dist.all_reduce(total)
    return {"backend sum": totals[0], "backend dx": totals[1]}
