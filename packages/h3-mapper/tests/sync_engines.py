"""A real vLLM-Omni MiniMaxH3DiTModel on CPU, in one process for each tensor-parallel rank.

The worker functions are module level, so that processes started by `spawn` can import them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing as mp
from h3_mapper import H3Config
from h3_mapper.plan import tensors
from h3_mapper.spec import Layout

TIMEOUT_S = 300


def trainer_state(config: H3Config, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random Diffusers-layout weights in the model's dtypes; the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    kinds = {"BF16": torch.bfloat16, "F32": torch.float32}
    return {
        spec.name: torch.randn(spec.shape, generator=generator).to(kinds[spec.dtype])
        for spec in tensors(config, Layout.DIFFUSERS)
    }


@contextlib.contextmanager
def engine(rank: int, world: int, port: int) -> Iterator[None]:
    """vLLM's configuration and a gloo tensor-parallel group of `world` ranks, this one `rank`."""
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_HOST_IP": "127.0.0.1", "VLLM_DIST_IDENT": f"h3{port}"}
    torch.set_num_threads(1)
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm_omni.platforms.interface import UnspecifiedOmniPlatform

    sdpa = "vllm_omni.diffusion.attention.backends.sdpa.SDPABackend"
    UnspecifiedOmniPlatform.get_diffusion_attn_backend_cls = classmethod(lambda *_, **__: sdpa)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(world)
        yield
    torch.distributed.destroy_process_group()


def build(config: H3Config) -> Any:
    """The engine's model of these sizes, its memory filled with NaN so that an unset value shows."""
    from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3DiTModel

    od_config = SimpleNamespace(
        tf_model_config=config.to_json(native=True),
        cache_config={"minimax_h3_adaln_cache": False},
        parallel_config=SimpleNamespace(ulysses_degree=1),
    )
    model = MiniMaxH3DiTModel(od_config, diffusers_weights=False).eval()
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(float("nan"))
    return model


def live(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and the inv_freq buffer by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def run_ranks(world: int, worker: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `worker(rank, world, *arguments)` in `world` engine processes; their results by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(_enter, (world, port, folder, worker, arguments), nprocs=world, join=False)
        for process in context.processes:
            process.join(TIMEOUT_S)
        while not context.join(1):
            pass
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _enter(
    rank: int, world: int, port: int, folder: str, worker: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    with engine(rank, world, port):
        torch.save(worker(rank, world, *arguments), Path(folder) / f"{rank}.pt")


def sync_worker(rank: int, world: int, config: H3Config) -> dict[str, Any]:
    """Sync the same trainer weights by all three ways; report bits, names and digests."""
    from h3_mapper.sync import WeightSync, through_loaders
    from h3_mapper.sync_proof import LiveDigest

    state = trainer_state(config)
    named = [(f"transformer.{name}", value) for name, value in state.items()]
    buckets = [named[start : start + 7] for start in range(0, len(named), 7)][::-1]
    report: dict[str, Any] = {}
    for way in ("load_weights", "weight_loader", "load_into"):
        model = build(config)
        if way == "load_weights":
            sync = WeightSync(config, Layout.RELEASE, components={"transformer": ""})
            returned = set()
            for bucket in buckets:
                returned |= model.load_weights(sync.push(bucket))
        elif way == "weight_loader":
            sync = WeightSync(config, components={"transformer": ""})
            for bucket in buckets:
                through_loaders(live(model), sync.push_shards(bucket))
            returned = None
        else:
            sync = WeightSync(config, Layout.MODULE, components={"transformer": ""}, tp=world, rank=rank)
            for bucket in buckets:
                sync.load_into(bucket, live(model))
            returned = None
        digest = LiveDigest(config, Layout.MODULE, tp=world, rank=rank)
        for name, tensor in live(model).items():
            digest.add(name, tensor)
        report[way] = {
            "state": {name: tensor.detach().clone() for name, tensor in live(model).items()},
            "expected_names": {name for name, _ in model.named_parameters()} | {"rope.inv_freq"},
            "finished": set(sync.finish()),
            "returned": returned,
            "partials": digest.partials(),
        }
    return report
