"""What each rank of a GPU group does with the trainer's model; run by ``run_ranks`` in fresh processes.

Spawned, not forked: importing Diffusers on a GPU machine initialises CUDA in the fork server. H3_TEST_DEVICE=cpu, or
=shared for one GPU under all ranks, tries the code of these tests where there are not enough GPUs.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WANTED = os.environ.get("H3_TEST_DEVICE", "cuda")
DEVICE = "cpu" if WANTED == "cpu" else "cuda"
FORMS = ("auto", "scatter", "peer") if DEVICE == "cuda" else ("auto", "scatter")
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]
Outputs = dict[str, torch.Tensor]


def run_ranks(case: str, tp: int, folder: Path) -> list[Any]:
    """``CASES[case](tp, rank)`` of every rank, in rank order; raises if a rank fails."""
    folder.mkdir()
    mp.spawn(_rank, args=(case, tp, str(folder)), nprocs=tp)
    return [torch.load(folder / f"{rank}.pt") for rank in range(tp)]


def _rank(rank: int, case: str, tp: int, folder: str) -> None:
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(tp), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # what NCCL and the engine say is not what is tested
    if WANTED == "shared":
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    if DEVICE == "cuda":
        torch.cuda.set_device(0 if WANTED == "shared" else rank)
    backend = "nccl" if WANTED == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=tp)
    try:
        torch.save(CASES[case](tp, rank), Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def add_lora(model: Any, tp: int, rank: int) -> None:
    """The same adapter at every degree: drawn whole on the CPU, cut like the linear it is on."""
    from h3_adapter_diffusers.lora import is_wrapper
    from h3_adapter_diffusers.survey import find_sites
    from h3_adapter_diffusers.tensor_parallel import local_shard
    from h3_kernels.binding import Style
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))
    for site in find_sites(model):
        if not is_wrapper(site.module):
            continue
        generator = torch.Generator().manual_seed(sum(map(ord, site.name)))
        row = site.rule.style is Style.ROW
        for layer, cut in ((site.module.lora_A, row), (site.module.lora_B, not row)):
            weight = layer["default"].weight
            shape = list(weight.shape)
            shape[1 if row else 0] *= tp if cut else 1
            whole = torch.randn(shape, generator=generator) / 8
            mine = local_shard(whole, site.rule, tp, rank) if cut else whole
            weight.data = mine.to(DEVICE, torch.bfloat16)


def train(every: bool, tp: int = 1, rank: int = 0, form: str = "auto") -> Outputs:
    """Velocities and gradients by name, on the CPU, of one step in scope model; LoRA's, or ``every`` parameter's."""
    from h3_adapter_diffusers.install import install_h3_training
    from h3_adapter_diffusers.tensor_parallel import shard
    from h3_adapter_diffusers.testing.packings import fl2va
    from h3_adapter_diffusers.testing.tiny import build
    from h3_adapter_diffusers.training import velocity
    from h3_kernels.testing.tiny import SMALL

    model = build(SMALL, device=DEVICE).train()
    parallel = shard(model, form=form) if tp > 1 else None
    if not every:
        add_lora(model, tp, rank)
    handle = install_h3_training(model, scope="model", tp=parallel)
    request = fl2va(SMALL).to(DEVICE)
    video, audio = velocity(
        model, request.packed, request.video, request.audio, request.text, 0.6, 0.2, handle=handle
    )
    (video.square().sum() + audio.square().sum()).backward()
    assert not handle.report().refused()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert grads
    return {name: t.detach().float().cpu() for name, t in {"video": video, "audio": audio, **grads}.items()}


def share(name: str, whole: torch.Tensor, rules: dict[str, Any], tp: int, rank: int) -> torch.Tensor:
    """A whole tensor cut the way the parameter is."""
    from h3_adapter_diffusers.tensor_parallel import local_shard
    from h3_kernels.binding import Style

    module = name.rpartition(".")[0].replace(".base_layer", "")
    target, _, side = module.partition(".lora_")
    rule = rules.get(target)
    if rule is None or rule.boundary or not name.endswith("weight"):
        return whole
    row = rule.style is Style.ROW
    if side and (side.startswith("A") != row):
        return whole
    return local_shard(whole, rule, tp, rank).contiguous()


def differences(every: bool, tp: int, rank: int) -> dict[str, list[str]]:
    """By form, the tensors that are not bit for bit this rank's share of one process's."""
    from h3_adapter_diffusers.survey import find_sites
    from h3_adapter_diffusers.testing.tiny import build
    from h3_kernels.testing import count_differing
    from h3_kernels.testing.tiny import SMALL

    rules = {site.name: site.rule for site in find_sites(build(SMALL))}
    whole = train(every)
    wrong = {}
    for form in FORMS:
        found = train(every, tp, rank, form)
        assert found.keys() == whole.keys()
        shares = {name: share(name, whole[name], rules, tp, rank) for name in found}
        wrong[form] = [name for name, t in found.items() if count_differing(t, shares[name])]
    return wrong


def mirrored(tp: int, rank: int) -> int:
    """A wrong plan: row-parallel shards of the mirror image, so that units are added in another order."""
    from h3_adapter_diffusers import tensor_parallel
    from h3_kernels.binding import Style

    whole, real = train(True), tensor_parallel.local_shard

    def wrong(weight: torch.Tensor, rule: Any, size: int, r: int) -> torch.Tensor:
        return real(weight, rule, size, size - 1 - r if rule.style is Style.ROW else r)

    tensor_parallel.local_shard = wrong
    return int((train(True, tp, rank)["video"] != whole["video"]).sum())


CASES = {
    "lora": lambda tp, rank: differences(False, tp, rank),
    "every parameter": lambda tp, rank: differences(True, tp, rank),
    "mirrored": mirrored,
}
