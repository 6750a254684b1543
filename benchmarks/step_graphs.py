"""Cells of step_h200 that run from CUDA graphs: whole forwards, forwards as an adapter replays them, training steps.

`graph` captures both sides by hand. `replayed` sets H3_CUDA_GRAPHS=1 and calls the model, as a user would; the engine
runs as shipped. `captured` trains through `capture_steps`, against the engine as shipped, our own launched steps and,
where torch captures it, the engine's step in a graph. Memory of captured cells counts the graphs' pool.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from engine_models import RANK, differing
from h3_adapter_diffusers import capture_steps
from h3_kernels.graph.replay import ENVIRONMENT
from step_cells import Steps, Variants
from step_measure import allocated, capture, compared, freed, held, set_cache
from torch.utils.checkpoint import checkpoint


def graph(steps: Steps, rows: int) -> None:
    """Forwards captured in CUDA graphs; the AdaLN cache, which asks the host, is off for both sides."""
    for name, pair in steps.forwards(steps.models, rows, cached=True).items():
        captured: Variants = {}
        record = {"engine": name, "direction": "forward", "rows": rows, **steps.shared, "case": "graph"}
        with ExitStack() as stack:
            for model in steps.models[name].values():
                stack.callback(set_cache, model, set_cache(model, 0))
            for variant, run in pair.items():
                try:
                    replay, off = capture(run)
                except (RuntimeError, ValueError) as error:
                    record[f"{variant}_refused"] = str(error).splitlines()[0]
                    continue
                captured[variant] = replay
                record[f"{variant}_replay_differing"] = off
            times = steps.times(captured)
        if len(captured) == 2:
            record |= compared(times["ours"], times["stock"])
        steps.writer.add(record | {f"{variant}_ms": round(t, 3) for variant, t in times.items()})
        captured.clear()
        freed(steps.cuda)


def replayed(steps: Steps, rows: int) -> None:
    """Forwards of both engines through their adapters' replays; ``replay_differing`` counts against launched ones."""
    for name, pair in steps.forwards(steps.models, rows).items():
        launched = [t.clone() for t in pair["ours"]()]
        before = freed(steps.cuda)
        with replays():
            for _ in range(3):
                outputs = pair["ours"]()
            pool = freed(steps.cuda) - before
            times = steps.times(pair)
            record = steps.record(name, rows, times["ours"], times["stock"]) | {"case": "replayed"}
            record["replay_differing"] = differing(launched, outputs)
            peaks = steps.peaks(name, pair)
            peaks |= {"peak_bytes": peaks["peak_bytes"] + pool} if peaks else {}
        steps.writer.add(record | peaks)


@contextmanager
def replays() -> Iterator[None]:
    """Forwards without gradients are replayed in the block."""
    before = os.environ.get(ENVIRONMENT)
    os.environ[ENVIRONMENT] = "1"
    try:
        yield
    finally:
        del os.environ[ENVIRONMENT]
        if before is not None:
            os.environ[ENVIRONMENT] = before


def captured(steps: Steps, rows: int, rounds: int) -> None:
    """LoRA training steps from CUDA graphs, against the engine as shipped; first the bits, then times, then memory."""
    models = {v: steps.trainer(v, steps.engines.blocks, lora=True) for v in ("stock", "ours")}
    models["launched"] = steps.trainer("ours", steps.engines.blocks, lora=True)
    request = steps.engines.request(rows)
    runs = {v: steps.engines.trainer_step(model, request) for v, model in models.items()}
    expected = [g.clone() for g in runs["launched"]().values()]
    runs["stock"]()
    record: dict[str, Any] = {"engine": "diffusers", "direction": "step", "rows": rows, **steps.shared}
    record |= {"case": "captured", "lora_rank": RANK, "stock_attention": steps.stock_attention["diffusers"]}
    clear(models)
    before = freed(steps.cuda)
    with capture_steps(models["ours"]) as captures:
        record["replay_differing"] = differing(expected, runs["ours"]().values())
        record["repeat_differing"] = differing(expected, runs["ours"]().values())
        clear(models)
        pool = freed(steps.cuda) - before
        times = steps.times(runs, rounds, warmup=0)
        record |= compared(times["ours"], times["stock"]) | {"launched_ms": round(times["launched"], 3)}
        clear(models)
        for variant, prefix in (("ours", ""), ("stock", "stock_")):
            most = allocated(runs[variant], steps.cuda)[1]
            clear(models)
            record[f"{prefix}peak_bytes"] = held(models[variant]) + most + (pool if variant == "ours" else 0)
        record |= {"captures": len(captures), "pool_bytes": pool}
    runs.clear()
    models.clear()
    freed(steps.cuda)
    steps.writer.add(record | stock_captured(steps, rows, rounds))
    freed(steps.cuda)


def stock_captured(steps: Steps, rows: int, rounds: int) -> dict[str, Any]:
    """The step of the engine as shipped in one CUDA graph, if torch captures it; else with checkpointing that keeps no
    random states, which is not as shipped."""
    found: dict[str, Any] = {}
    plain = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    for name, function in (("stock_captured", None), ("stock_captured_without_rng_states", plain)):
        model = steps.trainer("stock", steps.engines.blocks, lora=True)
        if function is not None:
            model.enable_gradient_checkpointing(function)
        run = steps.engines.trainer_step(model, steps.engines.request(rows))
        try:
            found[f"{name}_ms"] = round(steps.times({name: capture(gradients(run))[0]}, rounds)[name], 3)
        except (RuntimeError, ValueError) as error:
            found[f"{name}_refused"] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
            torch.cuda.synchronize()
        del run, model
        freed(steps.cuda)
        if f"{name}_ms" in found:
            break
    return found


def gradients(run: Callable[[], Any]) -> Callable[[], list[Any]]:
    """A step as a function that returns its gradients."""
    return lambda: list(run().values())


def clear(models: dict[str, Any]) -> None:
    """Drop every gradient."""
    for model in models.values():
        model.zero_grad(set_to_none=True)
