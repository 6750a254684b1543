"""A small packed DiT for the graph and trace tests: configuration, weights, packed rows, and ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from h3_kernels.collectives import TorchDistributedCollective
from h3_kernels.graph import DiTConfig, ModuleWeights, PackedDiT, PackedInputs, Settings, Ulysses
from h3_kernels.logical_keys import LogicalKeys
from h3_kernels.testing.threads import ThreadCollective, on_threads, shard
from h3_kernels.trace import Parallel, Recorder, save
from torch import Tensor

# No two sizes are equal, and every one that tensor parallelism cuts divides by 8.
SIZES: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "attention_head_dim": 16,
    "hidden_size": 64,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "ffn_dim": 192,
    "in_channels": 4,
    "audio_in_channels": 8,
    "text_dim": 48,
    "freq_dim": 24,
    "time_embed_hidden_dim": 80,
    "time_embed_dim": 32,
    "rope_freq_dim": 2,
}
CONFIG = DiTConfig.from_mapping(SIZES)
GRAPH = PackedDiT(CONFIG)
FLOAT32 = ("video_patch_proj", "audio_patch_proj", "time_embedder", "video_out", "audio_out")
BIASED = ("_proj.linear", "patch_proj", "condition_proj", "proj_in", "time_embedder.proj_out", "_out")

__all__ = ["ThreadCollective", "on_threads", "shard"]  # the tests' own names for them

Results = tuple[Tensor, Tensor]
Gradients = dict[str, Tensor]


def _shapes() -> dict[str, tuple[int, ...]]:
    c = CONFIG
    inputs = {
        "condition_proj": c.text_dim,
        "video_patch_proj": c.video_width,
        "audio_patch_proj": c.audio_channels,
    }
    inputs |= {"qkv_proj": c.hidden, "fc1": c.hidden, "out_proj": c.inner, "fc2": c.ffn, "linear": c.time_dim}
    inputs |= {"proj_in": c.freq_dim, "proj_out": c.time_hidden, "video_out": c.hidden, "audio_out": c.hidden}
    shapes: dict[str, tuple[int, ...]] = {}
    for node in GRAPH.nodes:
        if node.width and node.op in ("projection", "row_parallel"):
            shapes[f"{node.name}.weight"] = (node.width, inputs[node.name.rpartition(".")[2]])
            if node.name.endswith(BIASED):
                shapes[f"{node.name}.bias"] = (node.width,)
        elif node.parameters:
            shapes |= {
                name: (c.head_dim if "_norm" in name and ".attn." in name else c.hidden,)
                for name in node.parameters
            }
    return shapes


def weights(seed: int = 0) -> dict[str, Tensor]:
    """Module-layout weights: rows of unit gain, norms away from 1, biases away from 0; fp32 where the model is."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in _shapes().items():
        t = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            t *= shape[1] ** -0.5
        else:
            t = 0.3 * t + (0.0 if name.endswith("bias") else 1.0)
        made[name] = (
            t if name.startswith(FLOAT32) or any(f".{part}." in name for part in FLOAT32) else t.bfloat16()
        )
    return made


def pieces(module: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights as Diffusers holds them: separate q, k and v, fc1 rows [value; gate]."""
    out = {}
    for name, t in module.items():
        stem = name.removesuffix("weight")
        if "qkv_proj" in name:
            out |= {
                f"{stem}{part}.weight": piece.clone() for part, piece in zip("qkv", t.chunk(3), strict=True)
            }
        elif ".fc1." in name:
            gate, value = t.chunk(2)
            out[f"{stem}value_gate.weight"] = torch.cat([value, gate])
        else:
            out[name] = t
    return out


def request(
    seed: int = 1, text: int = 5, audio: int = 6, video: int = 9, scattered: bool = False
) -> PackedInputs:
    """One document [text | audio | video] of three noise levels, its rows scattered if asked; keys (0, place)."""
    g = torch.Generator().manual_seed(seed)
    rows = text + audio + video
    places = torch.randperm(rows, generator=g) if scattered else torch.arange(rows)
    at = [p.sort().values for p in places.split([text, audio, video])]
    tags, index = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    tags[at[0]], tags[at[1]] = 1, 2
    index[at[1]], index[at[2][:3]] = 1, 2
    return PackedInputs(
        video=torch.randn(video, CONFIG.video_width, generator=g),
        audio=torch.randn(audio, CONFIG.audio_channels, generator=g),
        text=torch.randn(text, CONFIG.text_dim, generator=g).bfloat16(),
        video_positions=at[2],
        audio_positions=at[1],
        text_positions=at[0],
        positions=torch.rand(rows, 3, generator=g, dtype=torch.float64) * 40,
        tags=tags,
        timesteps=torch.tensor([0.7, 0.31, 0.999]),
        timestep_index=index,
        cu_seqlens=torch.tensor([0, rows], dtype=torch.int32),
        text_cu_seqlens=torch.tensor([0, text], dtype=torch.int32),
        max_seqlen=rows,
        text_max_seqlen=text,
        keys=LogicalKeys(torch.stack([torch.zeros(rows, dtype=torch.int64), torch.arange(rows)], dim=1)),
    )


def padded(inputs: PackedInputs, padding: int) -> PackedInputs:
    """The same document with a second one of ``padding`` rows behind it; without keys."""
    rows = inputs.rows
    return replace(
        inputs,
        keys=None,
        positions=torch.cat([inputs.positions, torch.zeros(padding, 3, dtype=torch.float64)]),
        tags=torch.cat([inputs.tags, torch.full((padding,), -1)]),
        timestep_index=torch.cat([inputs.timestep_index, torch.zeros(padding, dtype=torch.int64)]),
        cu_seqlens=torch.tensor([0, rows, rows + padding], dtype=torch.int32),
    )


def run(module: Mapping[str, Tensor], inputs: PackedInputs, settings: Settings | None = None) -> Results:
    """Velocities, without gradients."""
    with torch.no_grad():
        return GRAPH.run(ModuleWeights(module), inputs, settings)


def train(
    module: Mapping[str, Tensor], inputs: PackedInputs, settings: Settings | None = None
) -> tuple[Results, Gradients]:
    """Velocities and the gradient of every weight, of a loss that weighs each output by its own value."""
    leaves = {name: t.clone().requires_grad_() for name, t in module.items()}
    video, audio = GRAPH.run(ModuleWeights(leaves), inputs, settings)
    torch.autograd.backward([video, audio], [torch.sin(3 * video.detach()), torch.sin(3 * audio.detach())])
    return (video.detach(), audio.detach()), {
        name: t.grad for name, t in leaves.items() if t.grad is not None
    }


def on_processes(ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Results of ``_process`` on every rank of a gloo group, in rank order; raises if a rank fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_process, args=(ranks, port, str(folder)), nprocs=ranks)
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def _process(rank: int, ranks: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        whole, inputs = weights(), request(video=10)
        exchange = TorchDistributedCollective()
        tensor = Settings(tp=ranks, rank=rank, collective=exchange)
        results = {
            "tp": train(shard(whole, ranks, rank), inputs, tensor),
            "ulysses": run(whole, inputs, Settings(sequence=Ulysses())),
            "ulysses_gradient": block_input_gradient(whole, inputs, Settings(sequence=Ulysses())),
        }
        torch.save(results, Path(folder) / f"{rank}.pt")
        recorder = Recorder("ulysses", parallel=Parallel("sequence", ranks, rank))
        run(whole, padded(inputs, 5), Settings(sequence=Ulysses(), tracer=recorder))
        save(recorder.trace, Path(folder) / f"trace{rank}")
    finally:
        dist.destroy_process_group()


def block_input_gradient(
    module: Mapping[str, Tensor], inputs: PackedInputs, settings: Settings | None = None
) -> Tensor:
    """Gradient of the packed rows that enter block 0 (of this rank's rows, under sequence parallelism)."""
    caught = []

    def catch(strict: Callable[..., tuple[Tensor, ...]], *slots: Tensor) -> tuple[Tensor, ...]:
        x, *rest = strict(*slots)
        caught.append(x.detach().requires_grad_())
        return (caught[0], *rest)

    settings = replace(settings or Settings(), overlay={"shard": catch})
    video, audio = GRAPH.run(ModuleWeights(module), inputs, settings)
    torch.autograd.backward([video, audio], [torch.sin(3 * video.detach()), torch.sin(3 * audio.detach())])
    assert caught[0].grad is not None
    return caught[0].grad
