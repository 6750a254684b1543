"""Timing variants against each other in one run: interleaved, L2 flushed, CUDA graphs, medians.

Variants of one run share clocks, temperature and neighbours; two runs do not. So a benchmark reports ratios from
here, never a time compared with a time of another day.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

# Larger than the L2 of any card to date (H200: 50 MB); writing it takes longer than a graph launch takes the host.
FLUSH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one variant over all rounds."""

    median_us: float
    p10_us: float
    p90_us: float
    rounds: int


def interleaved_bench(
    variants: Mapping[str, Callable[[], object]],
    *,
    device: str = "cuda",
    rounds: int = 50,
    warmup: int = 3,
    flush_l2: bool = True,
    graphs: bool = True,
    meet: Callable[[], object] | None = None,
    capture_error_mode: str = "global",
) -> dict[str, Timing]:
    """Time each variant once per round, in a rotating order, and return its median, 10th and 90th percentile.

    On CUDA each variant is captured into a graph (``graphs``) and timed by events on the current stream, after a
    write of 256 MiB that empties the L2 (``flush_l2``). On the CPU variants are called and timed by the wall clock.
    ``meet`` is called right before each start, for ranks that time a collective together; ``capture_error_mode`` is
    ``torch.cuda.graph``'s: "thread_local" beside threads that query events meanwhile, as NCCL's watchdog does.
    """
    for run in variants.values():
        for _ in range(warmup):
            run()
    names = list(variants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    if device.startswith("cuda"):
        mode = capture_error_mode if graphs else None
        measure = _by_events(variants, flush_l2, mode, meet)
    else:
        measure = _by_clock(variants, meet)
    for turn in range(rounds):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            samples[name].append(measure(name))
    return {name: _timing(times) for name, times in samples.items()}


def _by_clock(
    variants: Mapping[str, Callable[[], object]], meet: Callable[[], object] | None
) -> Callable[[str], float]:
    def measure(name: str) -> float:
        if meet is not None:
            meet()
        start = time.perf_counter()
        variants[name]()
        return (time.perf_counter() - start) * 1e6

    return measure


def _by_events(
    variants: Mapping[str, Callable[[], object]],
    flush_l2: bool,
    capture: str | None,
    meet: Callable[[], object] | None,
) -> Callable[[str], float]:
    runs = {name: run if capture is None else _captured(run, capture) for name, run in variants.items()}
    scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda") if flush_l2 else None

    def measure(name: str) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        if scratch is not None:
            scratch.zero_()
        if meet is not None:
            meet()
        start.record()
        runs[name]()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3

    return measure


def _captured(run: Callable[[], object], mode: str) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        run()
    return graph.replay


def _timing(times: list[float]) -> Timing:
    ordered = sorted(times)
    last = len(ordered) - 1
    return Timing(
        median_us=statistics.median(ordered),
        p10_us=ordered[round(last * 0.1)],
        p90_us=ordered[round(last * 0.9)],
        rounds=len(ordered),
    )
