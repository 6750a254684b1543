"""What each rank of a GPU group does with the real engine; run by ``run_ranks`` in fresh processes, one GPU each.

The engine's own groups, over NCCL: tensor parallel, and Ulysses beside it. Weights travel in a file that the one rank
of the smallest group writes. H3_TEST_DEVICE=cpu, or =shared for one GPU under all ranks, tries the code of these tests
where there are not enough GPUs.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

WANTED = os.environ.get("H3_TEST_DEVICE", "cuda")
DEVICE = "cpu" if WANTED == "cpu" else "cuda"
ROWS = 333 if DEVICE == "cuda" else 21  # no number of ranks divides them
Outputs = dict[str, torch.Tensor]


def run_ranks(tp: int, sequence: int, folder: Path) -> list[Outputs]:
    """Results of every rank, in rank order, on the CPU; raises if a rank fails."""
    out = folder / f"tp{tp}-sequence{sequence}"
    out.mkdir()
    mp.spawn(_rank, args=(tp, sequence, str(folder), str(out)), nprocs=tp * sequence)
    return [torch.load(out / f"{rank}.pt") for rank in range(tp * sequence)]


def _rank(rank: int, tp: int, sequence: int, folder: str, out: str) -> None:
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"  # stock is the backend's sum
    os.environ["VLLM_DIST_IDENT"] = f"h3-{os.getppid()}"  # names vLLM's shared-memory segments
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(tp * sequence), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the engine's CUDA builds warn; that is not what is tested
    if DEVICE == "cuda":
        torch.cuda.set_device(0 if WANTED == "shared" else rank)
    if WANTED == "shared":
        os.environ.update(TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1", VLLM_DISABLE_PYNCCL="1")
    with (_groups if DEVICE == "cuda" else _groups_on_cpu)(rank, tp, sequence, f"file://{out}/store"):
        found = outputs(Path(folder) / "release.pt", tp, sequence)
    torch.save({name: t.cpu() for name, t in found.items()}, Path(out) / f"{rank}.pt")


@contextlib.contextmanager
def _groups(rank: int, tp: int, sequence: int, store: str) -> Iterator[None]:
    """The engine's configuration and groups as its worker makes them."""
    import torch.distributed as dist
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import set_custom_all_reduce
    from vllm_omni.diffusion.distributed import parallel_state

    set_custom_all_reduce(False)  # as above, and the other one is not built everywhere
    world, device = tp * sequence, torch.cuda.current_device()
    backend = "nccl" if WANTED == "cuda" else "gloo"
    with set_current_vllm_config(VllmConfig()):
        dist.init_process_group(backend, init_method=store, world_size=world, rank=rank)
        parallel_state.init_distributed_environment(world, rank, store, device, backend)
        parallel_state.initialize_model_parallel(
            sequence_parallel_size=sequence,
            ulysses_degree=sequence,
            tensor_parallel_size=tp,
            backend=backend,
        )
        try:
            yield
            dist.barrier()
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def _groups_on_cpu(rank: int, tp: int, sequence: int, store: str) -> contextlib.AbstractContextManager[None]:
    from h3_adapter_vllm.testing.engine import engine

    return engine(tp=tp, sequence=sequence, rank=rank, world=tp * sequence, init_method=store)


def loaded(path: Path, sequence: int) -> Any:
    """The engine for this rank's groups, on its GPU."""
    from h3_adapter_vllm.testing import engine
    from h3_kernels.testing.tiny import SMALL

    model = engine.build(SMALL, device=DEVICE, ulysses_degree=sequence)
    if not path.exists():  # the one rank of the first world
        engine.randomise(model)
        engine.save_state(engine.release_state(model), path)
    model.load_weights(torch.load(path).items())
    return model


def outputs(path: Path, tp: int, sequence: int) -> Outputs:
    """Velocities of the whole bound graph by form, of the engine as shipped, and every bound linear's output."""
    from h3_adapter_vllm import install_h3_rollout
    from h3_adapter_vllm.testing import engine
    from h3_kernels.testing.tiny import SMALL
    from vllm.distributed import get_tp_group

    model = loaded(path, sequence)
    text, audio = ROWS // 5, ROWS // 10
    request = engine.request(1, text=text, audio=audio, video=ROWS - text - audio, config=SMALL)
    found = {}
    for form, collective in collectives(tp, get_tp_group().device_group).items():
        with install_h3_rollout(model, scope="model", collective=collective) as handle:
            for padding in (0, 4):
                name = f"{form}/padding{padding}"
                found |= named(name, engine.velocities(model, [request], padding=padding))
            assert not handle.report().refused()
    if sequence > 1:
        return found
    found |= named("stock", engine.velocities(model, [request]))
    with install_h3_rollout(model, scope="projections") as handle:
        found |= {f"linear/{name}": whole_output(layer) for name, layer in handle.linears.items()}
    return found


def collectives(tp: int, group: Any) -> dict[str, Any]:
    """The adapter's own choice (None), and the forms it does not choose."""
    from h3_kernels.collectives import TorchDistributedCollective

    if tp == 1:
        return {"default": None}
    forms: dict[str, dict[str, Any]] = {
        "scatter": {"form": "scatter"},
        "hierarchical": {"form": "hierarchical", "node_size": max(1, tp // 2)},
        "peer": {"form": "peer"},
    }
    if DEVICE == "cpu":
        del forms["peer"]
    return {"default": None} | {name: TorchDistributedCollective(group, **f) for name, f in forms.items()}


def named(name: str, velocities: tuple[torch.Tensor, torch.Tensor]) -> Outputs:
    return {f"{name}/video": velocities[0], f"{name}/audio": velocities[1]}


def whole_output(layer: Any) -> torch.Tensor:
    """The layer's output on all ranks' columns, in the order of the unsharded weight, on inputs all degrees share."""
    from h3_kernels.collectives import TorchDistributedCollective
    from vllm.distributed import get_tp_group

    x = torch.randn(70, layer.input_size, generator=torch.Generator().manual_seed(7))
    x = x.to(layer.weight.device, layer.weight.dtype)
    if getattr(layer, "input_is_parallel", False):
        width = layer.input_size_per_partition
        x = x[:, layer.tp_rank * width : (layer.tp_rank + 1) * width].contiguous()
    with torch.no_grad():
        y, _ = layer(x)
    if getattr(layer, "tp_size", 1) == 1 or getattr(layer, "gather_output", True):
        return y
    exchange = TorchDistributedCollective(get_tp_group().device_group, form="gather")
    parts = [part.t().contiguous() for part in y.split(layer.output_partition_sizes, -1)]
    return torch.cat([exchange.all_gather_rows(p, len(p) * layer.tp_size) for p in parts]).t().contiguous()
