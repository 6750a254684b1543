"""What the ranks of parallel_h200.py share: how they start, how they meet, and how they time a collective together."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from h3_kernels.testing import interleaved_bench
from torch import Tensor

ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",  # stock without in-switch sums, as every measurement of this project
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
"""Set in every rank unless the caller has set it otherwise; each record holds what was in force."""

# torch 2.13 renamed both and warns at the old names.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class World:
    """One rank's place: its device, and whether all ranks share it (then a backend of the host carries bytes)."""

    rank: int
    size: int
    device: str
    shared: bool

    @property
    def timed_by_events(self) -> bool:
        """Graphs and events need a backend that runs on the stream; gloo blocks the host instead."""
        return self.device != "cpu" and not self.shared


def run_world(size: int, work: Callable[..., None], *args: Any) -> None:
    """``work(world, *args)`` in ``size`` processes, one GPU each where there are enough; raises if one of them does.

    With fewer GPUs all ranks share the first, and without one they run on the CPU, both over gloo.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(size, torch.cuda.device_count(), folder, work, args), nprocs=size)  # type: ignore[no-untyped-call]


def _rank(rank: int, size: int, devices: int, folder: str, work: Callable[..., Any], args: Any) -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    shared = devices < size
    if shared:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.set_num_threads(1)
    device = "cpu" if devices == 0 else "cuda"
    if device == "cuda":
        torch.cuda.set_device(0 if shared else rank)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo" if shared else "nccl", init_method=store, rank=rank, world_size=size)
    try:
        work(World(rank, size, device, shared), *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()


class Stock:
    """The backend's own collectives, as a trainer calls them. Ranks that share a GPU copy through the host for gloo."""

    def __init__(self, world: World) -> None:
        self._host = world.shared

    def all_reduce(self, t: Tensor) -> Tensor:
        """The sum of ``t`` over the ranks, in place where the backend reads it."""
        t = t.cpu() if self._host else t
        dist.all_reduce(t)
        return t

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> None:
        """This rank's rows of the sum of ``whole``, into ``part``."""
        received = part.cpu() if self._host else part
        _reduce_scatter_single(received, whole.cpu() if self._host else whole)
        if self._host:
            part.copy_(received)

    def all_gather(self, whole: Tensor, part: Tensor) -> None:
        """Every rank's ``part``, into ``whole``."""
        received = whole.cpu() if self._host else whole
        _all_gather_single(received, part.cpu() if self._host else part)
        if self._host:
            whole.copy_(received)


def total(world: World, value: int) -> int:
    """Sum of ``value`` over the ranks."""
    held = torch.tensor([value], dtype=torch.int64, device="cpu" if world.shared else world.device)
    dist.all_reduce(held)
    return int(held.item())


def slowest(world: World, values: Mapping[str, float]) -> dict[str, float]:
    """The largest over the ranks, by name; the names are the same on every rank."""
    held = torch.tensor(
        list(values.values()), dtype=torch.float64, device="cpu" if world.shared else world.device
    )
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return dict(zip(values, held.tolist(), strict=True))


def bench(
    world: World, variants: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 3
) -> dict[str, float]:
    """Median microseconds of every variant on the slowest rank, interleaved in one run.

    All ranks call it with the same names. On GPUs of their own: CUDA graphs, L2 flushed, and the streams meet in a
    small all-reduce before each start, so no rank measures how late another one launched. Elsewhere: wall clock.
    """
    timings = interleaved_bench(
        variants if world.timed_by_events else {name: _settled(world, run) for name, run in variants.items()},
        device="cuda" if world.timed_by_events else "cpu",
        rounds=rounds,
        warmup=warmup,
        meet=_meeting(world),
        capture_error_mode="thread_local",
    )
    return slowest(world, {name: timing.median_us for name, timing in timings.items()})


def _meeting(world: World) -> Callable[[], object]:
    """What the ranks do before each start: on GPUs of their own the streams meet, elsewhere the processes."""
    if world.timed_by_events:
        held = torch.zeros(1, device="cuda")
        return lambda: dist.all_reduce(held)

    def meet() -> None:
        _settle(world)
        dist.barrier()

    return meet


def _settle(world: World) -> None:
    if world.device != "cpu":
        torch.cuda.synchronize()


def _settled(world: World, run: Callable[[], object]) -> Callable[[], object]:
    """``run`` until the device is done."""

    def settled() -> None:
        run()
        _settle(world)

    return settled


def environment() -> dict[str, str]:
    """The settings of ENVIRONMENT in force."""
    return {name: os.environ.get(name, "") for name in ENVIRONMENT}
