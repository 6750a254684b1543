"""A real vLLM-Omni MiniMaxH3DiTModel on CPU, in one process for each tensor-parallel rank.

The worker functions are module level, so that the processes can import them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from h3_mapper import H3Config
from h3_mapper.plan import tensors
from h3_mapper.spec import Layout
from mapper_engines import TORCH, native_model

TIMEOUT_S = 300
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_HOST_IP": "127.0.0.1"}
ENGINE_MODULES = [
    "vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer",
    "vllm_omni.diffusion.lora.manager",
]
"""Imported once, in the fork server: ten seconds and 600 MB that every rank then shares."""


def trainer_state(config: H3Config, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random Diffusers-layout weights in the model's dtypes; the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: torch.randn(spec.shape, generator=generator).to(TORCH[spec.dtype])
        for spec in tensors(config, Layout.DIFFUSERS)
    }


@contextlib.contextmanager
def engine(rank: int, world: int, port: int) -> Iterator[None]:
    """vLLM's configuration and a gloo tensor-parallel group of `world` ranks, this one `rank`."""
    os.environ["VLLM_DIST_IDENT"] = f"h3{port}"
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


def live(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and the inv_freq buffer by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def run_ranks(world: int, worker: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `worker(rank, world, *arguments)` in `world` engine processes; their results by rank."""
    os.environ |= QUIET
    multiprocessing.set_forkserver_preload(ENGINE_MODULES)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        arguments_ = (world, port, folder, worker, arguments)
        context = mp.start_processes(_enter, arguments_, nprocs=world, join=False, start_method="forkserver")
        while not context.join(TIMEOUT_S):
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
        model = native_model(config)
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


def pipeline_worker(rank: int, world: int, config: H3Config) -> dict[str, Any]:
    """Both partitions through vLLM-Omni's own MiniMaxH3Pipeline.load_weights, as verl-omni calls it."""
    from h3_mapper.sync import WeightSync
    from vllm_omni.diffusion.models.minimax_h3.pipeline_minimax_h3 import MiniMaxH3Pipeline

    pipeline = MiniMaxH3Pipeline.__new__(
        MiniMaxH3Pipeline
    )  # the constructor also wants VAEs and a text encoder
    torch.nn.Module.__init__(pipeline)
    pipeline.transformer, pipeline.transformers_ref = native_model(config), native_model(config)
    pipeline.video_vae = pipeline.audio_vae = pipeline._fasth3 = None
    streams = {"transformer": trainer_state(config, 0), "transformers_ref": trainer_state(config, 1)}
    sync = WeightSync(config, components={name: f"{name}." for name in streams})
    bucket = [
        (f"{component}.{name}", value)
        for component, state in streams.items()
        for name, value in random.Random(0).sample(sorted(state.items()), len(state))
    ]
    returned = pipeline.load_weights(sync.push(bucket))
    return {
        "returned": returned,
        "finished": set(sync.finish()),
        "states": [
            {name: tensor.detach().clone() for name, tensor in live(model).items()}
            for model in (pipeline.transformer, pipeline.transformers_ref)
        ],
    }


def lora_worker(
    rank: int, world: int, config: H3Config, folders: list[tuple[str, bool]]
) -> list[dict[str, Any]]:
    """Bind adapter folders with vLLM-Omni's own manager, each to a new model.

    folders: (path, complete the model's stacked mapping first). Returns the factors the layers then hold, by module,
    or the manager's error.
    """
    return [_bind(config, path, stacked) for path, stacked in folders]


def _bind(config: H3Config, path: str, stacked: bool) -> dict[str, Any]:
    from h3_mapper.lora.engine import complete_stacked_mapping
    from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager
    from vllm_omni.lora.request import LoRARequest

    pipeline = torch.nn.Module()
    pipeline.transformer = native_model(config)
    if stacked:
        complete_stacked_mapping(pipeline.transformer)
    manager = DiffusionLoRAManager(pipeline, torch.device("cpu"), torch.bfloat16)
    try:
        manager.set_active_adapter(LoRARequest("test", 1, path))
    except ValueError as error:
        return {"error": str(error)}
    return {
        "layers": {
            name.removeprefix("transformer."): [
                [stack[0, 0].clone() for stack in side]
                for side in (layer.lora_a_stacked, layer.lora_b_stacked)
            ]
            for name, layer in manager._lora_modules.items()
        }
    }
