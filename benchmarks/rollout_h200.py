"""The real vLLM-Omni transformer at full width, bound and as shipped: bits, time per forward, memory.

    python benchmarks/rollout_h200.py [--out results/rollout_h200.json] [--rows 70 925 8349] [--layers 4] [--rounds 20]
    python benchmarks/rollout_h200.py --smoke     # tiny engine on a CPU, to check the script

Random weights, two refiner blocks and `--layers` blocks; 20% of the rows are text, 10% audio. One model per variant,
all on the same weights: `stock` is the engine as shipped (its own attention, eager, AdaLN cache off), the others are
installs by scope. Times are medians of rounds interleaved over the variants in one run; captured graphs come last. On a
GPU machine without network, tools/h200_site packs the engines.

Every cell first checks bits: each bound linear against h3-kernels called directly on the same inputs, a second forward,
padding rows behind the request, and the request packed with another one against each alone.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from h3_adapter_vllm import H3AdapterError, Handle, install_h3_rollout
from h3_adapter_vllm.testing import engine
from h3_kernels.binding import Bound
from h3_kernels.errors import H3KernelsError
from h3_kernels.projection import projection
from h3_kernels.row_parallel import row_parallel
from h3_kernels.testing import interleaved_bench
from released_sizes import RELEASE
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from records import Writer

SCOPES = ("linears", "projections", "model")
PADDING = 57
MIB = 1 << 20


class Bench:
    """The models of one run: a name, a model and its handle (None as shipped), all on the same weights."""

    def __init__(self, config: dict[str, Any], device: str) -> None:
        self.config, self.device = config, device
        self.models: dict[str, nn.Module] = {"stock": engine.build(config, device=device)}
        engine.randomise(self.models["stock"])
        self.handles: dict[str, Handle] = {}
        self.refused: dict[str, str] = {}
        for scope in SCOPES:
            model = self._twin()
            try:
                handle = install_h3_rollout(model, scope=scope)
                engine.velocities(model, [self.request(20, seed=0)])
            except (H3AdapterError, H3KernelsError, RuntimeError) as error:
                self.refused[scope] = f"{type(error).__name__}: {error}"
                continue
            self.models[scope], self.handles[scope] = model, handle

    def _twin(self) -> nn.Module:
        model = engine.build(self.config, device=self.device)
        for name, parameter in self.models["stock"].named_parameters():
            model.get_parameter(name).data = parameter.data
        for name, buffer in self.models["stock"].named_buffers():
            model.get_buffer(name).copy_(buffer)
        return model

    def request(self, rows: int, seed: int) -> engine.Request:
        text, audio = max(4, rows // 5), max(4, rows // 10)
        return engine.request(seed, text=text, audio=audio, video=rows - text - audio, config=self.config)

    def runs(self, rows: int) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
        inputs = engine.forward_inputs([self.request(rows, seed=1)], device=self.device)
        return {name: forward_of(model, inputs) for name, model in self.models.items()}

    def cell(self, rows: int, rounds: int) -> dict[str, Any]:
        """Bits, time and memory of eager forwards at one row count."""
        requests = [self.request(rows, seed=1), self.request(rows, seed=2)]
        runs = self.runs(rows)
        linears = {name: check_linears(handle, rows) for name, handle in self.handles.items()}
        times = milliseconds(runs, self.device, rounds, graphs=False)
        return {
            "rows": rows,
            "bits": {name: self.invariance(model, requests) for name, model in self.models.items()},
            "linears": {name: found for name, found in linears.items() if found},
            "distance_to_stock": {name: distance(runs["stock"](), run()) for name, run in runs.items()},
            "milliseconds": times,
            "peak_mib": {name: peak(run) for name, run in runs.items()} if self.device == "cuda" else {},
        }

    def graphs(self, rows: int, rounds: int) -> dict[str, Any]:
        """Captured forwards: values in which a replay differs from eager, and times; or why one cannot be captured."""
        found: dict[str, Any] = {"rows": rows}
        captured = {}
        for name, run in self.runs(rows).items():
            try:
                found[name] = {"differing": graph_differing(run)}
                captured[name] = run
            except RuntimeError as error:
                found[name] = {"refused": str(error).splitlines()[0]}
        for name, time in milliseconds(captured, self.device, rounds, graphs=True).items():
            found[name]["milliseconds"] = time
        return found

    def invariance(self, model: nn.Module, requests: list[engine.Request]) -> dict[str, Any]:
        """Differing velocity values: a repeat, padding rows, and two packed requests against each alone."""
        alone = [engine.velocities(model, [r]) for r in requests]
        found: dict[str, Any] = {
            "repeat": differing(alone[0], engine.velocities(model, requests[:1])),
            "padded": differing(alone[0], engine.velocities(model, requests[:1], padding=PADDING)),
        }
        try:
            packed = engine.velocities(model, requests)
        except ValueError as error:
            return {**found, "packed": str(error).split(".")[0]}
        both = tuple(torch.cat(streams) for streams in zip(*alone, strict=True))
        return {**found, "packed": differing(both, packed)}

    def providers(self) -> dict[str, dict[str, int]]:
        """Per scope: how many nodes each provider served in the last forward, and how many stay the engine's."""
        counts: dict[str, dict[str, int]] = {}
        for name, handle in self.handles.items():
            states = (handle.report()[node] for node in handle.report())
            kinds = Counter(
                f"{s.contract} by {s.provider}" if isinstance(s, Bound) else s.state for s in states
            )
            counts[name] = dict(sorted(kinds.items()))
        return counts


def forward_of(model: nn.Module, inputs: dict[str, Any]) -> Callable[[], tuple[Tensor, Tensor]]:
    def run() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            outputs: tuple[Tensor, Tensor] = model(**inputs)
        return outputs

    return run


def graph_differing(run: Callable[[], tuple[Tensor, Tensor]]) -> int:
    """Velocity values in which the replay of a captured forward differs from an eager one."""
    expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    graph.replay()
    torch.cuda.synchronize()
    return differing(expected, outputs)


def check_linears(handle: Handle, rows: int) -> dict[str, int]:
    """Values in which a bound layer differs from h3-kernels called directly, summed per kind of linear."""
    found: Counter[str] = Counter()
    generator: dict[torch.device, torch.Generator] = {}
    for name, layer in handle.linears.items():
        device = layer.weight.device
        state = generator.setdefault(device, torch.Generator(device).manual_seed(0))
        x = torch.randn(rows, layer.input_size, generator=state, device=device).to(layer.weight.dtype)
        with torch.no_grad():
            direct = row_parallel if type(layer).__name__ == "RowParallelLinear" else projection
            found[".".join(name.split(".")[-2:])] += differing(
                (layer(x)[0],), (direct(x, layer.weight, layer.bias),)
            )
    return dict(found)


def differing(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> int:
    """Values whose bits differ."""
    kinds = {4: torch.int32, 2: torch.int16}
    pairs = ((x.contiguous(), y.contiguous()) for x, y in zip(a, b, strict=True))
    return sum(
        int((x.view(kinds[x.element_size()]) != y.view(kinds[y.element_size()])).sum()) for x, y in pairs
    )


def distance(stock: tuple[Tensor, ...], ours: tuple[Tensor, ...]) -> float:
    """Relative norm of the difference of the velocities."""
    a, b = (torch.cat([t.flatten() for t in v]).double() for v in (stock, ours))
    return float((a - b).norm() / a.norm())


def milliseconds(
    runs: dict[str, Callable[[], Any]], device: str, rounds: int, *, graphs: bool
) -> dict[str, float]:
    timings = interleaved_bench(runs, device=device, rounds=rounds, flush_l2=False, graphs=graphs)
    return {name: round(timing.median_us / 1e3, 3) for name, timing in timings.items()}


def peak(run: Callable[[], Any]) -> float:
    """MiB a forward allocates above what was there."""
    run()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / MIB, 1)


def eager_records(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """One record per scope of an eager cell: time and memory beside the engine as shipped, and the bits found."""
    stock_ms, stock_peak = cell["milliseconds"]["stock"], cell["peak_mib"].get("stock")
    return [
        {
            "case": "eager",
            "scope": scope,
            "rows": cell["rows"],
            "ours_ms": ours_ms,
            "stock_ms": stock_ms,
            "ratio": round(ours_ms / stock_ms, 4),
            "peak_mib": cell["peak_mib"].get(scope),
            "stock_peak_mib": stock_peak,
            "differing": cell["bits"][scope],
            "stock_differing": cell["bits"]["stock"],
            "linears_differing": cell["linears"].get(scope, {}),
            "distance_to_stock": cell["distance_to_stock"][scope],
        }
        for scope, ours_ms in cell["milliseconds"].items()
        if scope != "stock"
    ]


def captured_records(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """One record per scope of a captured cell, or why it cannot be captured."""
    stock_ms = cell.get("stock", {}).get("milliseconds")
    found = []
    for scope, one in cell.items():
        if scope in {"rows", "stock"}:
            continue
        record = {"case": "captured", "scope": scope, "rows": cell["rows"], "stock_ms": stock_ms, **one}
        if "milliseconds" in record and stock_ms is not None:
            record["ours_ms"] = record.pop("milliseconds")
            record["ratio"] = round(record["ours_ms"] / stock_ms, 4)
        found.append(record)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rollout_h200.json")
    parser.add_argument("--rows", type=int, nargs="+", default=[70, 925, 8349])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="tiny engine on the CPU, few rows")
    arguments = parser.parse_args()
    device = "cpu" if arguments.smoke else "cuda"
    config = dict(engine.TINY) if arguments.smoke else {**RELEASE, "num_layers": arguments.layers}
    torch.utils.deterministic.fill_uninitialized_memory = False
    rows = [20, 33] if arguments.smoke else arguments.rows
    rounds = 3 if arguments.smoke else arguments.rounds
    writer = Writer(arguments.out)
    with engine.engine():
        bench = Bench(config, device)
        attention = bench.models["stock"].blocks[0].attn.attention.attn_backend.get_name()
        shared = {
            "engine": "vllm-omni",
            "direction": "forward",
            "blocks": config["num_layers"],
            "hidden": config["hidden_size"],
            "stock_attention": attention,
        }
        for scope, reason in bench.refused.items():
            writer.add({**shared, "scope": scope, "refused": reason})
        for count in rows:
            for record in eager_records(bench.cell(count, rounds)):
                writer.add({**shared, **record, "providers": bench.providers()[record["scope"]]})
        for count in rows if device == "cuda" else []:
            for record in captured_records(bench.graphs(count, rounds)):
                writer.add({**shared, **record})


if __name__ == "__main__":
    main()
