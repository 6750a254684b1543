"""What the cells of step_h200 measure with: times of nodes, kernels by kind, memory, captures."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from engine_models import differing
from h3_kernels.graph import Node, PackedInputs

KERNELS = {
    "attention": ("flash", "fmha", "sdpa", "attention", "dkdv", "dq_kernel", "delta_kernel"),
    "gemm": ("gemm", "fc1_swiglu", "nvjet", "cutlass", "xmma", "splitk", "tree_reduce", "lora_expand"),
}
"""What a word in a kernel's name says it does; the rest is elementwise."""


class NodeTimes:
    """A tracer of the graph: time from one node's end to the next one's, summed over blocks."""

    reads_values = False

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.marks: list[tuple[str, Any]] = []

    def begin(self, inputs: PackedInputs) -> None:
        """The first mark."""
        self.marks = [("", self._now())]

    def record(self, node: Node, requested: str, actual: str, outputs: Mapping[str, Any]) -> None:
        """A mark behind ``node``; of two nodes in one launch the first has its time."""
        self.marks.append((kind(node.name), self._now()))

    def milliseconds(self) -> dict[str, float]:
        """Per kind of node."""
        if self.cuda:
            torch.cuda.synchronize()
        total: dict[str, float] = {}
        for (_, before), (name, after) in zip(self.marks, self.marks[1:], strict=False):
            spent = before.elapsed_time(after) if self.cuda else (after - before) * 1e3
            total[name] = total.get(name, 0.0) + spent
        return total

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def kind(node: str) -> str:
    """What a node is called over all blocks; refiner and ends are one each."""
    first, _, rest = node.partition(".")
    if first == "blocks":
        name = rest.partition(".")[2]
        return {"attn_residual": "attn_residual + norm2", "norm2": "attn_residual + norm2"}.get(name, name)
    return "token_refiner" if first == "token_refiner" else "inputs and final layer"


def compared(ours: float, stock: float) -> dict[str, float]:
    """Both times in milliseconds, and their ratio."""
    return {"ours_ms": round(ours, 3), "stock_ms": round(stock, 3), "ratio": round(ours / stock, 4)}


def with_new_timesteps(model: Any, run: Callable[[], Any]) -> Callable[[], Any]:
    """``run`` as the first forward at its timesteps: the engine's AdaLN cache holds nothing."""

    def fresh() -> Any:
        model.adaln_cache.clear()
        return run()

    return fresh


def set_cache(model: Any, limit: int) -> int:
    """Set the bytes vLLM-Omni's AdaLN cache may hold; returns the limit before. Nothing for another model."""
    cache = getattr(model, "adaln_cache", None)
    if cache is None:
        return 0
    before, cache.max_bytes = int(cache.max_bytes), limit
    cache.clear()
    return before


def capture(run: Callable[[], Any]) -> tuple[Callable[[], Any], int]:
    """A replay of ``run``'s graph, and in how many values it differs from an eager call."""
    expected = [t.clone() for t in run()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay, differing(expected, outputs)


def held(model: Any) -> int:
    """Bytes of a model's parameters and buffers."""
    tensors = {t.data_ptr(): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())


def allocated(run: Callable[[], Any], cuda: bool) -> tuple[Any, int]:
    """The result of a call, and the most bytes it allocates beside what lay there."""
    if not cuda:
        return run(), 0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    return result, int(torch.cuda.max_memory_allocated() - before)


def gpu_busy(run: Callable[[], Any]) -> tuple[dict[str, float], int]:
    """Milliseconds of one call by kind of kernel, and how many kernels it launched."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    total, count = {"gemm": 0.0, "attention": 0.0, "rest": 0.0}, 0
    for event in profiler.key_averages():
        name = event.key.lower()
        kinds = (k for k, words in KERNELS.items() if any(word in name for word in words))
        total[next(kinds, "rest")] += event.self_device_time_total / 1e3
        count += event.count if event.self_device_time_total else 0
    return {name: round(value, 3) for name, value in total.items()}, count


def freed(cuda: bool) -> int:
    """Give unused memory back; the bytes torch still holds, pools of captured graphs included."""
    gc.collect()
    if not cuda:
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved())
