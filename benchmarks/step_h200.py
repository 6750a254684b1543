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
import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from engine_models import RANK, Engines, differing, distance
from h3_adapter_diffusers import install as diffusers_install
from h3_adapter_vllm.testing import engine
from h3_kernels.contract import parallel_id
from h3_kernels.graph import Node, PackedInputs
from h3_kernels.testing import interleaved_bench
from h3_kernels.testing.tiny import TINY
from records import Writer
from release import RELEASE

Variants = dict[str, Callable[[], Any]]
KERNELS = {
    "attention": ("flash", "fmha", "sdpa", "attention", "dkdv", "dq_kernel", "delta_kernel"),
    "gemm": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "tree_reduce", "lora_expand"),
}
"""What a word in a kernel's name says it does; the rest is elementwise."""


class Steps:
    """The models of one run and the cells that are made of them."""

    def __init__(self, engines: Engines, writer: Writer, rounds: int) -> None:
        self.engines, self.writer, self.rounds = engines, writer, rounds
        self.cuda = engines.device == "cuda"
        self.shared = {"hidden": engines.config["hidden_size"], "blocks": engines.blocks}
        self.models = {
            "vllm-omni": {"stock": engines.vllm, "ours": engines.rollout(bound=True)},
            "diffusers": {"stock": engines.trainer(bound=False), "ours": engines.trainer(bound=True)},
        }
        self.stock_attention = {"vllm-omni": engines.attention, "diffusers": "cuDNN" if self.cuda else "SDPA"}

    def forward(self, rows: int) -> None:
        """Denoise forwards of both engines at one row count, all four interleaved."""
        runs = self._forwards(self.models, rows)
        times = self._times({(e, v): run for e, pair in runs.items() for v, run in pair.items()})
        bits = self._bits(runs)
        for name, pair in runs.items():
            record = self._record(name, rows, times[name, "ours"], times[name, "stock"])
            self.writer.add(record | bits[name] | self._peaks(name, pair))

    def cached(self, rows: int) -> None:
        """Denoise forwards of vLLM-Omni at timesteps its AdaLN cache holds."""
        name = "vllm-omni"
        pair = self._forwards({name: self.models[name]}, rows, cached=True)[name]
        times = self._times(pair)
        record = self._record(name, rows, times["ours"], times["stock"])
        self.writer.add(record | {"adaln": "cached"} | self._peaks(name, pair))

    def long(self, rows: int, measured: tuple[int, int]) -> None:
        """Forwards of few blocks, extrapolated: time(all) = time(b) + (all - b) * (time(b) - time(a)) / (b - a)."""
        a, b = measured
        times: dict[int, dict[Any, float]] = {}
        for blocks in measured:
            models = {
                "vllm-omni": {v: self._rollout(v, blocks) for v in ("stock", "ours")},
                "diffusers": {v: self._trainer(v, blocks) for v in ("stock", "ours")},
            }
            runs = self._forwards(models, rows)
            flat = {(e, v): run for e, pair in runs.items() for v, run in pair.items()}
            times[blocks] = self._times(flat, 3)
        total = self.engines.blocks
        for name in self.models:
            ours, stock = (
                times[b][name, v] + (total - b) * (times[b][name, v] - times[a][name, v]) / (b - a)
                for v in ("ours", "stock")
            )
            record = self._record(name, rows, ours, stock)
            record["case"] = "extrapolated"
            record["measured_blocks"] = {
                str(blocks): {v: round(times[blocks][name, v], 3) for v in ("ours", "stock")}
                for blocks in measured
            }
            self.writer.add(record)

    def graph(self, rows: int) -> None:
        """Forwards captured in CUDA graphs; the AdaLN cache, which asks the host, is off for both sides."""
        for name, pair in self._forwards(self.models, rows, cached=True).items():
            captured: Variants = {}
            record = {"engine": name, "direction": "forward", "rows": rows, **self.shared, "case": "graph"}
            with ExitStack() as stack:
                for model in self.models[name].values():
                    stack.callback(set_cache, model, set_cache(model, 0))
                for variant, run in pair.items():
                    try:
                        replay, off = capture(run)
                    except (RuntimeError, ValueError) as error:
                        record[f"{variant}_refused"] = str(error).splitlines()[0]
                        continue
                    captured[variant] = replay
                    record[f"{variant}_replay_differing"] = off
                times = self._times(captured)
            if len(captured) == 2:
                record |= compared(times["ours"], times["stock"])
            self.writer.add(record | {f"{variant}_ms": round(t, 3) for variant, t in times.items()})
            captured.clear()
            self._free()

    def contracts(self, rows: int) -> None:
        """vLLM-Omni under the cheaper row-parallel contracts, against it as shipped."""
        models = {"stock": self.engines.vllm} | {
            parallel_id(units): self.engines.rollout(bound=True, contract=parallel_id(units))
            for units in (8, 4, 2, 1)
        }
        times = self._times(self._forwards({"vllm-omni": models}, rows)["vllm-omni"], 3)
        for contract, milliseconds in times.items():
            if contract != "stock":
                record = self._record("vllm-omni", rows, milliseconds, times["stock"])
                self.writer.add(record | {"case": "contract", "contract": contract})

    def step(self, rows: int, rounds: int) -> None:
        """LoRA training steps of Diffusers' model: first the gradients, which warm up, then times, then a repeat."""
        pair = {v: self._trainer(v, self.engines.blocks, lora=True) for v in ("stock", "ours")}
        request = self.engines.request(rows)
        runs: Variants = {v: self.engines.trainer_step(model, request) for v, model in pair.items()}
        gradients = {v: [g.clone() for g in run().values()] for v, run in runs.items()}
        times = self._times(runs, rounds, warmup=0)
        record = {"engine": "diffusers", "direction": "step", "rows": rows, **self.shared, "lora_rank": RANK}
        record |= compared(times["ours"], times["stock"])
        record |= {"stock_attention": self.stock_attention["diffusers"]}
        record["gradient_distance"] = distance(gradients["stock"], gradients["ours"])
        for variant, prefix in (("ours", ""), ("stock", "stock_")):
            pair[variant].zero_grad(set_to_none=True)
            again, most = allocated(runs[variant], self.cuda)
            record[f"{prefix}repeat_differing"] = differing(gradients[variant], again.values())
            record |= {f"{prefix}peak_bytes": held(pair[variant]) + most} if self.cuda else {}
        self.writer.add(record)
        gradients.clear()
        if self.cuda and rows > 4096:
            self._by_kernel("diffusers", "step", rows, runs)
        runs.clear()
        pair.clear()
        self._free()

    def kernels(self, rows: int) -> None:
        """GPU time of every variant's forward by kind of kernel."""
        for name, pair in self._forwards(self.models, rows).items():
            self._by_kernel(name, "forward", rows, pair)

    def nodes(self, rows: int) -> None:
        """Time of each node of the graph, over all blocks, in Diffusers' bound model."""
        model = self.models["diffusers"]["ours"]
        run = self.engines.trainer_forward(model, self.engines.request(rows))
        handle = diffusers_install.handle_of(model)
        assert handle is not None
        run()
        found: list[dict[str, float]] = []
        for _ in range(max(2, self.rounds // 2)):
            tracer = NodeTimes(self.engines.device)
            with handle.trace(tracer):
                run()
            found.append(tracer.milliseconds())
        for node in found[0]:
            middle = sorted(times[node] for times in found)[len(found) // 2]
            record = {"engine": "diffusers", "direction": "forward", "rows": rows, **self.shared}
            self.writer.add(record | {"case": "node", "node": node, "ours_ms": round(middle, 3)})

    def _forwards(
        self, models: Mapping[str, Mapping[str, Any]], rows: int, *, cached: bool = False
    ) -> dict[str, Variants]:
        request = self.engines.request(rows)
        runs: dict[str, Variants] = {}
        for name, pair in models.items():
            make = self.engines.rollout_forward if name == "vllm-omni" else self.engines.trainer_forward
            runs[name] = {}
            for variant, model in pair.items():
                run = make(model, request)
                new = name == "vllm-omni" and not cached
                runs[name][variant] = with_new_timesteps(model, run) if new else run
        return runs

    def _record(self, name: str, rows: int, ours: float, stock: float) -> dict[str, Any]:
        """A record of a forward in milliseconds; timesteps are new unless it says otherwise."""
        record = {"engine": name, "direction": "forward", "rows": rows, **self.shared}
        record |= {"adaln": "computed"} if name == "vllm-omni" else {}
        return record | compared(ours, stock) | {"stock_attention": self.stock_attention[name]}

    def _rollout(self, variant: str, blocks: int) -> Any:
        return self.engines.rollout(bound=variant == "ours", blocks=blocks)

    def _trainer(self, variant: str, blocks: int, *, lora: bool = False) -> Any:
        return self.engines.trainer(bound=variant == "ours", blocks=blocks, lora=lora)

    def _times(
        self, runs: Mapping[Any, Callable[[], Any]], rounds: int | None = None, warmup: int = 1
    ) -> dict[Any, float]:
        if not runs:
            return {}
        timings = interleaved_bench(
            runs, device=self.engines.device, rounds=rounds or self.rounds, warmup=warmup, flush_l2=False, graphs=False
        )  # fmt: skip
        return {name: timing.median_us / 1e3 for name, timing in timings.items()}

    def _bits(self, runs: dict[str, Variants]) -> dict[str, dict[str, Any]]:
        """How the two engines' velocities differ: bound, as shipped, and from one to the other."""
        outputs = {name: {v: run() for v, run in pair.items()} for name, pair in runs.items()}
        rollout, trainer = outputs["vllm-omni"], outputs["diffusers"]
        between = {
            "engines_differing": differing(rollout["ours"], trainer["ours"]),
            "stock_engines_differing": differing(rollout["stock"], trainer["stock"]),
            "values": sum(t.numel() for t in rollout["ours"]),
        }
        return {
            name: between | {"distance_to_stock": distance(found["stock"], found["ours"])}
            for name, found in outputs.items()
        }

    def _peaks(self, name: str, runs: Variants) -> dict[str, int]:
        if not self.cuda:
            return {}
        found = {v: held(self.models[name][v]) + allocated(run, True)[1] for v, run in runs.items()}
        return {"peak_bytes": found["ours"], "stock_peak_bytes": found["stock"]}

    def _by_kernel(self, name: str, direction: str, rows: int, runs: Variants) -> None:
        for variant, run in runs.items():
            busy, counts = gpu_busy(run) if self.cuda else ({}, 0)
            record = {"engine": name, "direction": direction, "rows": rows, **self.shared, "case": "kernels"}
            self.writer.add(record | {"variant": variant, "busy_ms": busy, "kernels": counts})

    def _free(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


class NodeTimes:
    """A tracer of the graph: time from one node's end to the next one's, summed over blocks."""

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


def cells(steps: Steps, smoke: bool) -> dict[str, list[Callable[[], None]]]:
    """Every cell, in the order they are run."""
    short, middle, long = (20, 33, 40) if smoke else (70, 925, 8349)
    longest, few = (60, (1, 2)) if smoke else (37000, (2, 8))
    return {
        "forward": [lambda n=n: steps.forward(n) for n in (long, middle, short)],
        "step": [lambda: steps.step(long, 2), lambda: steps.step(middle, steps.rounds)],
        "graph": [lambda n=n: steps.graph(n) for n in (short, middle) if steps.cuda],
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
