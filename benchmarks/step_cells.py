"""The cells of step_h200: whole steps of both engines, as shipped and bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine_models import RANK, Engines, differing, distance
from h3_adapter_diffusers import install as diffusers_install
from h3_kernels.contract import parallel_id
from h3_kernels.testing import interleaved_bench
from records import Writer
from step_measure import NodeTimes, allocated, compared, freed, gpu_busy, held, with_new_timesteps

Variants = dict[str, Callable[[], Any]]


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
        runs = self.forwards(self.models, rows)
        times = self.times({(e, v): run for e, pair in runs.items() for v, run in pair.items()})
        bits = self._bits(runs)
        for name, pair in runs.items():
            record = self.record(name, rows, times[name, "ours"], times[name, "stock"])
            self.writer.add(record | bits[name] | self.peaks(name, pair))

    def cached(self, rows: int) -> None:
        """Denoise forwards of vLLM-Omni at timesteps its AdaLN cache holds."""
        name = "vllm-omni"
        pair = self.forwards({name: self.models[name]}, rows, cached=True)[name]
        times = self.times(pair)
        record = self.record(name, rows, times["ours"], times["stock"])
        self.writer.add(record | {"adaln": "cached"} | self.peaks(name, pair))

    def long(self, rows: int, measured: tuple[int, int]) -> None:
        """Forwards of few blocks, extrapolated: time(all) = time(b) + (all - b) * (time(b) - time(a)) / (b - a)."""
        a, b = measured
        times: dict[int, dict[Any, float]] = {}
        for blocks in measured:
            models = {
                "vllm-omni": {v: self._rollout(v, blocks) for v in ("stock", "ours")},
                "diffusers": {v: self.trainer(v, blocks) for v in ("stock", "ours")},
            }
            runs = self.forwards(models, rows)
            flat = {(e, v): run for e, pair in runs.items() for v, run in pair.items()}
            times[blocks] = self.times(flat, 3)
        total = self.engines.blocks
        for name in self.models:
            ours, stock = (
                times[b][name, v] + (total - b) * (times[b][name, v] - times[a][name, v]) / (b - a)
                for v in ("ours", "stock")
            )
            record = self.record(name, rows, ours, stock)
            record["case"] = "extrapolated"
            record["measured_blocks"] = {
                str(blocks): {v: round(times[blocks][name, v], 3) for v in ("ours", "stock")}
                for blocks in measured
            }
            self.writer.add(record)

    def contracts(self, rows: int) -> None:
        """vLLM-Omni under the cheaper row-parallel contracts, against it as shipped."""
        models = {"stock": self.engines.vllm} | {
            parallel_id(units): self.engines.rollout(bound=True, contract=parallel_id(units))
            for units in (8, 4, 2, 1)
        }
        times = self.times(self.forwards({"vllm-omni": models}, rows)["vllm-omni"], 3)
        for contract, milliseconds in times.items():
            if contract != "stock":
                record = self.record("vllm-omni", rows, milliseconds, times["stock"])
                self.writer.add(record | {"case": "contract", "contract": contract})

    def step(self, rows: int, rounds: int) -> None:
        """LoRA training steps of Diffusers' model: first the gradients, which warm up, then times, then a repeat."""
        pair = {v: self.trainer(v, self.engines.blocks, lora=True) for v in ("stock", "ours")}
        request = self.engines.request(rows)
        runs: Variants = {v: self.engines.trainer_step(model, request) for v, model in pair.items()}
        gradients = {v: [g.clone() for g in run().values()] for v, run in runs.items()}
        times = self.times(runs, rounds, warmup=0)
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
        freed(self.cuda)

    def kernels(self, rows: int) -> None:
        """GPU time of every variant's forward by kind of kernel."""
        for name, pair in self.forwards(self.models, rows).items():
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

    def forwards(
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

    def record(self, name: str, rows: int, ours: float, stock: float) -> dict[str, Any]:
        """A record of a forward in milliseconds; timesteps are new unless it says otherwise."""
        record = {"engine": name, "direction": "forward", "rows": rows, **self.shared}
        record |= {"adaln": "computed"} if name == "vllm-omni" else {}
        return record | compared(ours, stock) | {"stock_attention": self.stock_attention[name]}

    def _rollout(self, variant: str, blocks: int) -> Any:
        return self.engines.rollout(bound=variant == "ours", blocks=blocks)

    def trainer(self, variant: str, blocks: int, *, lora: bool = False) -> Any:
        return self.engines.trainer(bound=variant == "ours", blocks=blocks, lora=lora)

    def times(
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

    def peaks(self, name: str, runs: Variants) -> dict[str, int]:
        if not self.cuda:
            return {}
        found = {v: held(self.models[name][v]) + allocated(run, True)[1] for v, run in runs.items()}
        return {"peak_bytes": found["ours"], "stock_peak_bytes": found["stock"]}

    def _by_kernel(self, name: str, direction: str, rows: int, runs: Variants) -> None:
        for variant, run in runs.items():
            busy, counts = gpu_busy(run) if self.cuda else ({}, 0)
            record = {"engine": name, "direction": direction, "rows": rows, **self.shared, "case": "kernels"}
            self.writer.add(record | {"variant": variant, "busy_ms": busy, "kernels": counts})
