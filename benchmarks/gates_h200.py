"""Gates of both real engines at full width on one device: which bits are equal, and twins that must not be.

    python benchmarks/gates_h200.py [--out results/gates_h200.json] [--blocks 50]
    python benchmarks/gates_h200.py --smoke     # tiny engines on a CPU

Every record counts values that differ; `expected` is 0, or "some" for a twin. Exit status 1 if one is not as expected.
`step_h200.py --gates FILE` runs the same gates on its own models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from engine_models import Engines, differing
from h3_adapter_diffusers import install as diffusers_install
from h3_adapter_diffusers.training import AUDIO_SHIFT, VIDEO_SHIFT, sigma_grid
from h3_adapter_vllm.graph_binding import LiveTensors
from h3_adapter_vllm.testing import engine
from h3_kernels.graph import DiTConfig, ModuleWeights, PackedDiT, Settings, vllm_inputs
from h3_kernels.testing.threads import on_threads, shard
from h3_kernels.testing.tiny import TINY
from h3_kernels.trace import Recorder, divergences, first_divergence
from records import Record, Writer
from released_sizes import RELEASE
from torch import Tensor

PADDING = 57
STEPS = 4
Velocities = tuple[Tensor, Tensor]


class Gates:
    """The models of one run, and the gates."""

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self.cuda = engines.device == "cuda"
        self.rollout = engines.rollout(bound=True)
        self.trainer = engines.trainer(bound=True)
        self.stock_trainer = engines.trainer(bound=False)

    def records(self) -> Iterator[Record]:
        """Every gate's records."""
        few = (20, 33) if not self.cuda else (70, 925, 8349)
        for rows in few:
            yield from self.engines_agree(rows)
        yield from self.nodes_agree(few[1])
        yield from self.trajectories_agree(few[1])
        yield from self.rows_are_independent(few[1])
        yield from self.ranks_agree(few[1])

    def engines_agree(self, rows: int) -> Iterator[Record]:
        """The same request through both engines, all blocks; as shipped they differ."""
        request, e = self.engines.request(rows), self.engines
        bound = e.rollout_forward(self.rollout, request)(), e.trainer_forward(self.trainer, request)()
        shipped = e.rollout_forward(e.vllm, request)(), e.trainer_forward(self.stock_trainer, request)()
        yield self._record("velocities of both engines", rows, differing(*bound), bound[0])
        yield self._record("twin: as shipped", rows, differing(*shipped), shipped[0], twin=self.cuda)

    def nodes_agree(self, rows: int) -> Iterator[Record]:
        """Every node of both engines, by row digests; a planted change is found at its node."""
        request = self.engines.request(rows)
        handle = diffusers_install.handle_of(self.trainer)
        assert handle is not None
        theirs = Recorder("diffusers")
        with handle.trace(theirs):
            self.engines.trainer_forward(self.trainer, request)()
        ours = self._traced(request, {})
        outputs = len(ours.trace.steps[0].outputs)
        found = list(divergences(ours.trace, theirs.trace))
        yield self._record("nodes of both engines, outputs by row digest", rows, len(found), outputs)

        def nudge(strict: Callable[..., Any], *inputs: Tensor) -> tuple[Tensor, ...]:
            (x,) = strict(*inputs)
            return (x.index_fill(0, torch.tensor([11], device=x.device), 3.0),)

        planted = self._traced(request, {"blocks.0.mlp.act_fn": nudge})
        first = first_divergence(ours.trace, planted.trace)
        hit = first is not None and (first.node, first.row, first.differing) == ("blocks.0.mlp.act_fn", 11, 1)
        record = self._record("twin: a planted row, found at its node", rows, int(hit), 1, twin=True)
        yield record | {"first": str(first)}

    def trajectories_agree(self, rows: int) -> Iterator[Record]:
        """STEPS denoising steps, each engine on its own latents."""
        e, request = self.engines, self.engines.request(rows)

        def rollout(model: Any) -> Callable[..., Velocities]:
            return lambda req, **times: e.rollout_forward(model, req, **times)()

        def trainer(model: Any) -> Callable[..., Velocities]:
            return lambda req, **times: e.trainer_forward(model, req, **times)()

        bound = [self._denoise(request, run) for run in (rollout(self.rollout), trainer(self.trainer))]
        shipped = [self._denoise(request, run) for run in (rollout(e.vllm), trainer(self.stock_trainer))]
        name = f"latents after {STEPS} steps of both engines"
        yield self._record(name, rows, differing(*bound), bound[0])
        yield self._record(f"twin: {name}, as shipped", rows, differing(*shipped), shipped[0], twin=self.cuda)

    def rows_are_independent(self, rows: int) -> Iterator[Record]:
        """Padding, two packed requests, repetition: velocities of each request alone."""
        e = self.engines
        requests = [e.request(rows, seed=1), e.request(rows // 2, seed=2)]
        alone = [e.rollout_forward(self.rollout, request)() for request in requests]
        again = e.rollout_forward(self.rollout, requests[0])()
        padded = e.rollout_forward(self.rollout, requests[0], padding=PADDING)()
        with torch.no_grad():
            packed = self.rollout(**e.rollout_inputs(requests, padding=PADDING))
        both = tuple(torch.cat(streams) for streams in zip(*alone, strict=True))
        yield self._record("repeated", rows, differing(alone[0], again), again)
        yield self._record(f"{PADDING} padding rows behind", rows, differing(alone[0], padded), padded)
        yield self._record("two requests packed and padded", rows, differing(both, packed), packed)

    def ranks_agree(self, rows: int) -> Iterator[Record]:
        """Tensor parallelism as threads on one device: the velocities of one rank, two blocks; a twin of one unit.

        (In tiny sizes on a CPU the roundings to bf16 hide the twin's order.)
        """
        blocks = min(2, self.engines.blocks)
        dit = PackedDiT(DiTConfig.from_mapping({**self.engines.config, "num_layers": blocks}))
        live = LiveTensors(self.engines.vllm)
        names = {name for node in dit.nodes for name in node.parameters if name in live}
        module = {name: live[name] for name in names}
        inputs = vllm_inputs(self.engines.rollout_inputs([self.engines.request(rows)]))

        def run(weights: dict[str, Tensor], settings: Settings) -> Velocities:
            with torch.no_grad():
                return dit.run(ModuleWeights(weights), inputs, settings)

        whole = run(module, Settings())
        for tp in (2, 4, 8):
            ranks = on_threads(
                tp,
                lambda rank, collective, tp=tp: run(
                    shard(module, tp, rank), Settings(tp=tp, rank=rank, collective=collective)
                ),
            )
            off = sum(differing(whole, found) for found in ranks)
            yield self._record(f"tp={tp} on threads, {blocks} blocks", rows, off, whole)
        other = run(module, Settings(contract="h3-parallel-v1-u1"))
        name = "twin: one unit in the place of eight"
        yield self._record(name, rows, differing(whole, other), whole, twin=self.cuda)

    def _traced(self, request: Any, overlay: dict[str, Any]) -> Recorder:
        dit = PackedDiT(DiTConfig.from_mapping(self.engines.config))
        recorder = Recorder("vllm-omni")
        inputs = vllm_inputs(self.engines.rollout_inputs([request]))
        with torch.no_grad():
            settings = Settings(tracer=recorder, overlay=overlay)
            dit.run(ModuleWeights(LiveTensors(self.engines.vllm)), inputs, settings)
        return recorder

    def _denoise(self, request: Any, velocity: Callable[..., Velocities]) -> Velocities:
        """Euler steps in fp32 over both streams' sigma grids."""
        import dataclasses

        video, audio = (t.to(self.engines.device) for t in (request.video, request.audio))
        grids = sigma_grid(STEPS + 1, VIDEO_SHIFT), sigma_grid(STEPS + 1, AUDIO_SHIFT)
        for step in range(STEPS):
            now, after = ([float(grid[step + i]) for grid in grids] for i in (0, 1))
            request = dataclasses.replace(request, video=video, audio=audio)
            v_video, v_audio = velocity(request, video_t=1 - now[0], audio_t=1 - now[1])
            video = video + (now[0] - after[0]) * v_video
            audio = audio + (now[1] - after[1]) * v_audio
        return video, audio

    def _record(
        self, gate: str, rows: int, off: int, compared: int | Iterable[Tensor], *, twin: bool = False
    ) -> Record:
        values = compared if isinstance(compared, int) else sum(t.numel() for t in compared)
        return {
            "case": gate,
            "rows": rows,
            "blocks": self.engines.blocks,
            "hidden": self.engines.config["hidden_size"],
            "differing": off,
            "values": values,
            "expected": "some" if twin else 0,
        }


def run_gates(engines: Engines, writer: Writer) -> int:
    """Write every record; how many are not as expected."""
    wrong = 0
    for record in Gates(engines).records():
        ok = record["differing"] > 0 if record["expected"] == "some" else record["differing"] == 0
        writer.add(record | {"passed": ok})
        wrong += not ok
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gates_h200.json")
    parser.add_argument("--blocks", type=int, default=50)
    parser.add_argument("--smoke", action="store_true", help="tiny engines on the CPU, few rows")
    arguments = parser.parse_args()
    device = "cpu" if arguments.smoke else "cuda"
    config = dict(TINY) if arguments.smoke else {**RELEASE, "num_layers": arguments.blocks}
    torch.utils.deterministic.fill_uninitialized_memory = False
    with engine.engine():
        return int(run_gates(Engines(config, device), Writer(arguments.out)) > 0)


if __name__ == "__main__":
    sys.exit(main())
