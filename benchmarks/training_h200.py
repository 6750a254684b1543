"""A LoRA training step of the real Diffusers transformer at full width, bound and as shipped: bits, time,
memory.

    python benchmarks/training_h200.py [--out results/training_h200.json] [--rows 70 925 8349] [--layers 4]
    [--rounds 10] python benchmarks/training_h200.py --smoke     # tiny model on a CPU, to check the script

Random weights, frozen base, rank-64 bf16 LoRA on the six linears of every block (two refiner blocks,
`--layers` blocks), gradient checkpointing, loss = sum of squares, no optimizer step. 20% of the rows are
text, 10% audio. One model per variant, all on the same base weights and adapters: `cudnn` and `flash` are
Diffusers as shipped with that SDPA backend, `projections` and `model` are installs of that scope
(`projections` leaves attention to the flash backend). Times are medians of rounds interleaved over the
variants in one run.

Every cell first checks bits: the forward and the gradients repeat; in scope `model` the packed rows are
permuted under logical keys; LoRA gradients of the last block against fp64, strict and provider, on the same
inputs. With `--rollout` (or, alone, `--velocities`) the velocities of vLLM-Omni on the same weights and
adapter, padded, are compared byte by byte with the trainer's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from h3_adapter_diffusers.errors import H3AdapterError
from h3_adapter_diffusers.install import Handle, install_h3_training
from h3_adapter_diffusers.lora_gate import lora_gate
from h3_adapter_diffusers.packing import PackedSequence
from h3_adapter_diffusers.testing.native import engine_lora, native_adapters, native_inputs
from h3_adapter_diffusers.testing.tiny import Request, build
from h3_adapter_diffusers.weights import base_state
from h3_kernels.binding import Bound
from h3_kernels.errors import H3KernelsError
from h3_kernels.testing import interleaved_bench
from h3_kernels.testing.tiny import TINY
from peft import LoraConfig
from released_sizes import RELEASE
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from records import Writer

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]
RANK, PADDING, GIB = 64, 57, 1 << 30
BACKENDS = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "projections": [SDPBackend.FLASH_ATTENTION],
}
TIMES = torch.tensor([0.2, 0.6]), 0.6, 0.2  # distinct timesteps; of video rows; of audio rows


class Bench:
    """The models of one run by variant, with their handles (none as shipped)."""

    def __init__(self, config: dict[str, Any], device: str, *, velocities: bool = False) -> None:
        self.config, self.device = config, device
        self.models: dict[str, Any] = {}
        self.handles: dict[str, Handle] = {}
        self.refused: dict[str, str] = {}
        first: Any = None
        names = ("cudnn", "flash", "projections", "model")
        names = names if device == "cuda" else ("stock", *names[2:])
        for name in (names[0], "model") if velocities else names:
            model = self._twin(first)
            first = first or model
            try:
                if name in ("projections", "model"):
                    self.handles[name] = install_h3_training(model, scope=name)
                self.models[name] = model
                if not velocities:
                    self.step(name, self.request(70))()
            except (H3AdapterError, H3KernelsError, RuntimeError) as error:
                self.refused[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                self.models.pop(name, None)
                self.handles.pop(name, None)

    def _twin(self, first: Any) -> Any:
        """A model on `first`'s base weights with an adapter of the same values."""
        if first is None:
            model = build(self.config, device=self.device)
        else:
            with torch.device("meta"):
                model = type(first)(**self.config)
            model.rope = first.rope
            for name, tensor in base_state(first).items():
                owner, _, kind = name.rpartition(".")
                setattr(model.get_submodule(owner), kind, torch.nn.Parameter(tensor, requires_grad=False))
        model.requires_grad_(False).train()
        model.add_adapter(LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS))
        generator = torch.Generator(self.device).manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                data = torch.randn(parameter.shape, generator=generator, device=self.device)
                parameter.data = (data * parameter.shape[1] ** -0.5 / 4).bfloat16()
        model.enable_gradient_checkpointing()
        return model

    def request(self, rows: int, seed: int = 1) -> Request:
        """Text, then audio, then video rows at random positions."""
        generator = torch.Generator().manual_seed(seed)
        text, audio = max(4, rows // 5), max(4, rows // 10)
        video = rows - text - audio
        at = torch.arange(rows).split([text, audio, video])
        packed = PackedSequence(
            position_ids=torch.randint(0, 64, (rows, 3), generator=generator).float(),
            token_tags=torch.cat([torch.full((n,), tag) for n, tag in ((text, 1), (audio, 2), (video, 0))]),
            text_indices=at[0],
            audio_indices=at[1],
            video_indices=at[2],
            video_generated=torch.ones(video, dtype=torch.bool),
            audio_generated=torch.ones(audio, dtype=torch.bool),
        )
        widths = self.config["in_channels"] * 4, self.config["audio_in_channels"], self.config["text_dim"]
        streams = [
            torch.randn(n, w, generator=generator) for n, w in zip((video, audio, text), widths, strict=True)
        ]
        return Request(f"{rows} rows", packed, streams[0], streams[1], streams[2].bfloat16())

    def arguments(self, request: Request) -> dict[str, Tensor]:
        """The forward's keyword arguments, on the device."""
        streams = {
            "hidden_states": request.video[None],
            "audio_hidden_states": request.audio[None],
            "encoder_hidden_states": request.text[None],
        }
        moved = {name: rows.to(self.device) for name, rows in streams.items()}
        return moved | request.packed.arguments(*TIMES[1:], self.device)

    def forward(self, name: str, request: Request) -> Callable[[], tuple[Tensor, Tensor]]:
        model, arguments, backend = self.models[name], self.arguments(request), self.backend(name)

        def run() -> tuple[Tensor, Tensor]:
            with torch.no_grad(), backend():
                outputs: tuple[Tensor, Tensor] = model(**arguments, return_dict=False)
            return outputs

        return run

    def step(self, name: str, request: Request) -> Callable[[], dict[str, Tensor]]:
        """Forward, backward; the LoRA gradients by name."""
        model, arguments, backend = self.models[name], self.arguments(request), self.backend(name)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        keys = {k: v.to(self.device) for k, v in request.packed.keys(0, len(TIMES[0])).items()}

        def run() -> dict[str, Tensor]:
            for parameter in trained.values():
                parameter.grad = None
            with backend(), self.handles[name].rows(keys) if name in self.handles else nullcontext():
                video, audio = model(**arguments, return_dict=False)
                (video.float().square().sum() + audio.float().square().sum()).backward()
            return {n: p.grad for n, p in trained.items()}

        return run

    def backend(self, name: str) -> Callable[[], AbstractContextManager[Any]]:
        """The SDPA backend of a variant, where it still runs SDPA."""
        chosen = BACKENDS.get(name) if self.device == "cuda" else None
        return (lambda: sdpa_kernel(chosen)) if chosen else nullcontext

    def cell(self, rows: int, rounds: int) -> dict[str, Any]:
        """Bits, time and memory at one row count."""
        request = self.request(rows)
        forwards = {name: self.forward(name, request) for name in self.models}
        steps = {name: self.step(name, request) for name in self.models}
        found: dict[str, Any] = {
            "rows": rows,
            "bits": {name: self.bits(name, request) for name in self.models},
            "gradient_distance_to_stock": distances(steps, next(iter(self.models))),
        }
        for kind, runs in (("forward", forwards), ("step", steps)):
            timings = interleaved_bench(runs, device=self.device, rounds=rounds, flush_l2=False, graphs=False)
            found[f"{kind}_ms"] = {name: round(t.median_us / 1e3, 2) for name, t in timings.items()}
        if self.device == "cuda":
            found["step_peak_gib"] = {name: peak(run) for name, run in steps.items()}
        return found

    def bits(self, name: str, request: Request) -> dict[str, int]:
        """Differing values: the forward repeated, the gradients repeated, the gradients of permuted rows."""
        forward, step = self.forward(name, request), self.step(name, request)
        reference = copies(step())
        found = {
            "forward_repeat": differing(forward(), forward()),
            "gradient_repeat": differing_of(reference, step()),
        }
        if name == "model":
            place = torch.randperm(len(request.packed), generator=torch.Generator().manual_seed(2))
            moved = replace(request, packed=request.packed.permuted(place))
            found["gradient_permuted"] = differing_of(reference, self.step(name, moved)())
        return found

    def gate(self, rows: int) -> dict[str, Any]:
        """LoRA gradients of the last block against fp64, from the activations of the shipped model."""
        name = next(iter(self.models))
        model, arguments = self.models[name], self.arguments(self.request(rows))

        def loss() -> Tensor:
            with self.backend(name)():
                video, audio = model(**arguments, return_dict=False)
            total: Tensor = video.float().square().sum() + audio.float().square().sum()
            return total

        report = lora_gate(model, loss, targets=f"transformer_blocks.{self.config['num_layers'] - 1}.*")
        return {
            "rows": rows,
            "passed": report.passed,
            "gradients": [
                {
                    "target": f"{row.target} {row.matrix}",
                    "strict": row.strict_error,
                    "provider": row.provider_error,
                    "repeats": row.repeats,
                    "permutes": row.permutes,
                }
                for row in report.rows
            ],
        }

    def providers(self) -> dict[str, dict[str, int]]:
        """Per scope: how many nodes each provider served in the last forward."""
        counts: dict[str, dict[str, int]] = {}
        for name, handle in self.handles.items():
            tally = counts.setdefault(name, {})
            for node in (report := handle.report()):
                state = report[node]
                kind = f"{state.contract} by {state.provider}" if isinstance(state, Bound) else state.state
                tally[kind] = tally.get(kind, 0) + 1
        return counts

    def rollout(self, rows: int) -> dict[str, Any]:
        """Bytes in which vLLM-Omni's velocities, padded, differ from the trainer's, both in scope `model`."""
        from h3_adapter_vllm import install_h3_rollout
        from h3_adapter_vllm.testing import engine
        from h3_mapper.apply import diffusers_to_native

        trainer, request = self.models["model"], self.request(rows)
        with engine.engine():
            model = engine.build(self.config, device=self.device)
            state = diffusers_to_native(base_state(trainer), layout="release", config=self.config)
            model.load_weights(state.items())
            del state
            found: dict[str, Any] = {"rows": rows, "padding": PADDING}
            ours = self.forward("model", request)()
            for adapters in (True, False):
                if adapters:
                    engine_lora(model, native_adapters(trainer), rank=RANK)
                    handle = install_h3_rollout(model, scope="model")
                inputs = native_inputs(
                    [request], video_t=TIMES[1], audio_t=TIMES[2], padding=PADDING, device=self.device
                )
                with torch.no_grad():
                    theirs = model(**inputs)
                found["differ_with_adapters" if adapters else "differ_without"] = differing(ours, theirs)
                found["values"] = sum(t.numel() for t in theirs)
                if adapters:
                    handle.remove()
                    ours = self.forward(next(iter(self.models)), request)()
        return found


def copies(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: grad.clone() for name, grad in grads.items()}


def differing(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> int:
    """Values whose bits differ."""
    kinds = {4: torch.int32, 2: torch.int16}
    pairs = ((x.contiguous().flatten(), y.contiguous().flatten()) for x, y in zip(a, b, strict=True))
    return sum(
        int((x.view(kinds[x.element_size()]) != y.view(kinds[y.element_size()])).sum()) for x, y in pairs
    )


def differing_of(a: dict[str, Tensor], b: dict[str, Tensor]) -> int:
    return differing(tuple(a.values()), tuple(b[name] for name in a))


def distances(steps: dict[str, Callable[[], dict[str, Tensor]]], baseline: str) -> dict[str, float]:
    """Relative norm of the difference of all LoRA gradients to those of `baseline`."""
    stock = copies(steps[baseline]())
    norm = sum(float(g.double().square().sum()) for g in stock.values()) ** 0.5
    found = {}
    for name, run in steps.items():
        grads = run()
        total = sum(float((grads[n].double() - stock[n].double()).square().sum()) for n in stock)
        found[name] = total**0.5 / norm
    return found


def peak(run: Callable[[], Any]) -> float:
    """GiB in use at the highest point of a step, weights of all variants' shared base included."""
    run()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return round(torch.cuda.max_memory_allocated() / GIB, 3)


def cell_records(cell: dict[str, Any], stock: str) -> list[dict[str, Any]]:
    """One record per direction and variant of a cell, beside the variant `stock`."""
    peaks = cell.get("step_peak_gib", {})
    return [
        {
            "scope": variant,
            "direction": direction,
            "rows": cell["rows"],
            "peer": f"stock, {stock}",
            "ours_ms": ours_ms,
            "stock_ms": cell[f"{direction}_ms"][stock],
            "ratio": round(ours_ms / cell[f"{direction}_ms"][stock], 4),
            "peak_gib": peaks.get(variant),
            "stock_peak_gib": peaks.get(stock),
            "differing": cell["bits"][variant],
            "stock_differing": cell["bits"][stock],
            "gradient_distance_to_stock": cell["gradient_distance_to_stock"][variant],
        }
        for direction in ("forward", "step")
        for variant, ours_ms in cell[f"{direction}_ms"].items()
        if variant != stock
    ]


def measure(bench: Bench, writer: Writer, shared: dict[str, Any], rows: list[int], rounds: int) -> None:
    """Every cell, then the gradient gate."""
    stock = next(iter(bench.models))
    for count in rows:
        for record in cell_records(bench.cell(count, rounds), stock):
            writer.add({**shared, **record, "providers": bench.providers().get(record["scope"])})
    writer.add({**shared, "case": "LoRA gradient gate", **bench.gate(rows[min(1, len(rows) - 1)])})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "training_h200.json")
    parser.add_argument("--rows", type=int, nargs="+", default=[70, 925, 8349])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--rollout", action="store_true", help="also compare with vLLM-Omni on the same weights"
    )
    parser.add_argument(
        "--velocities", action="store_true", help="nothing but that comparison, at the first two row counts"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny model on the CPU, few rows")
    arguments = parser.parse_args()
    device = "cpu" if arguments.smoke else "cuda"
    config = dict(TINY) if arguments.smoke else {**RELEASE, "num_layers": arguments.layers}
    rows = [20, 33] if arguments.smoke else arguments.rows
    bench = Bench(config, device, velocities=arguments.velocities)
    writer = Writer(arguments.out)
    shared = {
        "engine": "diffusers",
        "blocks": config["num_layers"],
        "hidden": config["hidden_size"],
        "lora_rank": RANK,
    }
    for variant, reason in bench.refused.items():
        writer.add({**shared, "scope": variant, "refused": reason})
    if not arguments.velocities:
        measure(bench, writer, shared, rows, 3 if arguments.smoke else arguments.rounds)
    wanted = arguments.rollout or arguments.velocities
    for count in rows[:2] if wanted and "model" in bench.models else []:
        writer.add({**shared, "case": "velocities of both engines", **bench.rollout(count)})


if __name__ == "__main__":
    main()
