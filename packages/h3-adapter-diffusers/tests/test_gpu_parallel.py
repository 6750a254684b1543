"""The trainer on several GPUs: velocities and gradients of tp 2, 4 and 8, over NCCL and peer memory, are tp 1's bytes.

With a GPU a rank, as `tools/gpu_matrix.py h200 --gpus N` has them, and at tp 2 over gloo on one GPU. The CPU proof of
the same is test_tensor_parallel.py.
"""

import os

import pytest
import torch
from h3_adapter_diffusers.install import install_h3_training
from h3_adapter_diffusers.lora import is_wrapper
from h3_adapter_diffusers.survey import find_sites
from h3_adapter_diffusers.tensor_parallel import local_shard, shard
from h3_adapter_diffusers.testing import ranks as processes
from h3_adapter_diffusers.testing.packings import fl2va
from h3_adapter_diffusers.testing.ranks import run_ranks
from h3_adapter_diffusers.testing.tiny import build
from h3_adapter_diffusers.training import velocity
from h3_kernels.binding import Style
from h3_kernels.testing.tiny import SMALL
from peft import LoraConfig

# H3_TEST_DEVICE=cpu tries this file's own code where there is no GPU.
DEVICE = os.environ.get("H3_TEST_DEVICE", "cuda")
GPUS = min(torch.cuda.device_count() if DEVICE == "cuda" else 8, int(os.environ.get("H3_GPUS", "8")))
FORMS = ("auto", "scatter", "peer") if DEVICE == "cuda" else ("auto", "scatter")
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.filterwarnings("default"),  # what NCCL and the engine say on a GPU is not what is tested
]


def needs(gpus):
    return pytest.mark.skipif(gpus > GPUS, reason=f"needs {gpus} CUDA devices, {GPUS} may be used")


ALONE = pytest.mark.skipif(GPUS != 1, reason="the ranks have GPUs of their own, or there is none")
DEGREES = [
    pytest.param(2, marks=[needs(1), ALONE], id="2-one-gpu"),
    *(pytest.param(tp, marks=needs(tp)) for tp in (2, 4, 8)),
]


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Every rank compiles and proves the kernels of every shape first."""
    monkeypatch.setattr(processes, "TIMEOUT_S", 540)


def own_gpus(rank, world):
    """A GPU a rank and a group over them, beside gloo's default group; None, the default group, where ranks share."""
    import torch.distributed as dist

    if DEVICE == "cpu":
        return None
    if torch.cuda.device_count() < world:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        torch.cuda.set_device(0)
        return None
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    torch.cuda.set_device(rank)
    return dist.new_group(list(range(world)), backend="nccl")


def add_lora(model, tp, rank):
    """The same adapter at every degree: drawn whole on the CPU, cut like the linear it is on."""
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


def step(model, handle):
    """Velocities and gradients by name, on the CPU."""
    request = fl2va(SMALL).to(DEVICE)
    video, audio = velocity(
        model, request.packed, request.video, request.audio, request.text, 0.6, 0.2, handle=handle
    )
    (video.square().sum() + audio.square().sum()).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert grads
    return {name: t.detach().float().cpu() for name, t in {"video": video, "audio": audio, **grads}.items()}


def train(every, tp=1, rank=0, group=None, form="auto"):
    model = build(SMALL, device=DEVICE).train()
    parallel = shard(model, group, form=form) if tp > 1 else None
    if not every:
        add_lora(model, tp, rank)
    handle = install_h3_training(model, scope="model", tp=parallel)
    found = step(model, handle)
    assert not handle.report().refused()
    return found


def expected(name, whole, rules, tp, rank):
    """A whole tensor cut the way the parameter is."""
    module = name.rpartition(".")[0].replace(".base_layer", "")
    target, _, side = module.partition(".lora_")
    rule = rules.get(target)
    if rule is None or rule.boundary or not name.endswith("weight"):
        return whole
    row = rule.style is Style.ROW
    if side and (side.startswith("A") != row):
        return whole
    return local_shard(whole, rule, tp, rank)


def differences(every):
    """This rank's tensors that are not bit for bit its share of one process's, by form."""
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()
    group = own_gpus(rank, world)
    rules = {site.name: site.rule for site in find_sites(build(SMALL))}
    whole = train(every)
    wrong = {}
    for form in FORMS:
        found = train(every, world, rank, group, form)
        assert found.keys() == whole.keys()
        wrong[form] = [
            name
            for name, t in found.items()
            if not torch.equal(
                t.view(torch.int32),
                expected(name, whole[name], rules, world, rank).contiguous().view(torch.int32),
            )
        ]
    return wrong


@pytest.mark.parametrize("every", [False, True], ids=["lora", "every parameter"])
@pytest.mark.parametrize("tp", DEGREES)
def test_sharded_bytes_are_those_of_one_gpu(tp, every):
    for wrong in run_ranks(differences, tp, every):
        assert wrong == {form: [] for form in FORMS}


def mirrored():
    """A wrong plan: row-parallel shards of the mirror image, so that units are added in another order."""
    import torch.distributed as dist
    from h3_adapter_diffusers import tensor_parallel

    world, rank = dist.get_world_size(), dist.get_rank()
    group = own_gpus(rank, world)
    whole = train(True)
    real = tensor_parallel.local_shard
    tensor_parallel.local_shard = lambda w, rule, size, r: (
        real(w, rule, size, size - 1 - r) if rule.style is Style.ROW else real(w, rule, size, r)
    )
    found = train(True, world, rank, group)
    return int((found["video"] != whole["video"]).sum())


@pytest.mark.parametrize("tp", DEGREES)
def test_twin_a_wrong_shard_plan_is_caught(tp):
    assert all(count > 0 for count in run_ranks(mirrored, tp))
