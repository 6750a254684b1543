"""Tensor parallelism of the trainer: velocities, LoRA gradients and whole gradients of tp 2, 4, 8 are tp 1's
bytes."""

import re

import pytest
import torch
from diffusers import TensorParallelConfig
from diffusers_gpu_ranks import share
from h3_adapter_diffusers.errors import BoundModelError, InstallError
from h3_adapter_diffusers.install import install_h3_training
from h3_adapter_diffusers.lora import is_wrapper
from h3_adapter_diffusers.survey import find_sites
from h3_adapter_diffusers.tensor_parallel import local_shard, shard
from h3_adapter_diffusers.testing.packings import fl2va
from h3_adapter_diffusers.testing.ranks import run_ranks
from h3_adapter_diffusers.testing.tiny import build
from h3_adapter_diffusers.training import velocity
from h3_kernels.binding import Style
from peft import LoraConfig

pytestmark = pytest.mark.engine

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]


def add_lora(model, tp, rank):
    """The same adapter at every degree: drawn whole, cut like the linear it is on."""
    model.add_adapter(LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))
    for site in find_sites(model):
        if not is_wrapper(site.module):
            continue
        generator = torch.Generator().manual_seed(sum(map(ord, site.name)))
        a, b = site.module.lora_A["default"].weight, site.module.lora_B["default"].weight
        row = site.rule.style is Style.ROW
        whole_a = torch.randn(a.shape[0], a.shape[1] * (tp if row else 1), generator=generator) / 8
        whole_b = torch.randn(b.shape[0] * (1 if row else tp), b.shape[1], generator=generator) / 8
        a.data = (local_shard(whole_a, site.rule, tp, rank) if row else whole_a).bfloat16()
        b.data = (whole_b if row else local_shard(whole_b, site.rule, tp, rank)).bfloat16()


def step(scope, tp=1, rank=0, parallel=None, every=False):
    """Velocities and gradients, by name, of this rank."""
    model = build().train()
    if tp > 1:
        parallel = shard(model)
    if not every:
        add_lora(model, tp, rank)
    handle = install_h3_training(model, scope=scope, tp=parallel)
    request = fl2va()
    video, audio = velocity(
        model, request.packed, request.video, request.audio, request.text, 0.6, 0.2, handle=handle
    )
    (video.square().sum() + audio.square().sum()).backward()
    assert not handle.report().refused()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: t.detach().float().numpy() for name, t in {"video": video, "audio": audio, **grads}.items()}


def rank_step(scope, every):
    import torch.distributed as dist

    return step(scope, dist.get_world_size(), dist.get_rank(), every=every)


def expected(name, whole, rules, tp, rank):
    """A whole gradient cut the way the parameter is."""
    return share(name, torch.from_numpy(whole), rules, tp, rank).numpy()


@pytest.fixture(scope="module")
def rules():
    return {site.name: site.rule for site in find_sites(build())}


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize(
    ("scope", "every"),
    [("projections", False), ("model", False), ("model", True)],
    ids=["projections-lora", "model-lora", "model-every parameter"],
)
def test_sharded_bytes_are_those_of_one_process(scope, every, tp, rules):
    reference = step(scope, every=every)
    for rank, result in enumerate(run_ranks(rank_step, tp, scope, every)):
        assert result.keys() == reference.keys()
        different = [
            name
            for name, value in result.items()
            if not (value == expected(name, reference[name], rules, tp, rank)).all()
        ]
        assert not different, different


def partial_norms():
    with pytest.raises(BoundModelError) as caught:
        rank_step("projections", True)
    return str(caught.value)


def test_partial_gradients_of_the_head_norms_are_refused():
    """In scope projections the norms stay torch's, which sees only this rank's heads."""
    assert "gradients would cover this rank's heads only" in run_ranks(partial_norms, 2)[0]


def unshared_installs():
    parallel = shard(build())
    messages = []
    for rank_one in ({"contract": "h3-parallel-v1-u4"}, {"overlay": "proj_in"}, {"provider": "fast"}):
        model = build()
        shard(model)
        with pytest.raises(InstallError) as caught:
            install_h3_training(
                model, tp=parallel, scope="projections", **(rank_one if parallel.rank else {})
            )
        messages.append(str(caught.value))
        assert all("forward" not in vars(module) for module in model.modules())
    return messages


def test_an_install_that_ranks_do_not_share_is_refused_on_both():
    contract, overlay, provider = zip(*run_ranks(unshared_installs, 2), strict=True)
    assert all("u4" in message and "u8" in message for message in contract)
    assert all("overlay=proj_in" in message for message in overlay)
    assert "rank 1 of tp=2 refused: " in provider[0]
    assert all("no provider is named 'fast'" in message for message in provider)


def reversed_ranks():
    """A wrong plan: every rank takes the shard of its mirror image, so units are added in another order."""
    import torch.distributed as dist
    from h3_adapter_diffusers import tensor_parallel

    real = tensor_parallel.local_shard
    tensor_parallel.local_shard = lambda w, rule, size, rank: (
        real(w, rule, size, size - 1 - rank) if rule.style is Style.ROW else real(w, rule, size, rank)
    )
    return step("model", dist.get_world_size(), dist.get_rank())


def test_a_wrong_shard_plan_is_caught():
    reference = step("model")
    for result in run_ranks(reversed_ranks, 2):
        assert (result["video"] != reference["video"]).any()


def refusals():
    import torch.distributed as dist

    messages = []
    for config in ({"num_attention_heads": 9, "attention_head_dim": 16}, {"ffn_dim": 300}):
        from h3_adapter_diffusers.testing.tiny import TINY

        with pytest.raises(InstallError) as caught:
            shard(build({**TINY, **config}))
        messages.append(str(caught.value))
    model = build()
    add_lora(model, 1, 0)
    with pytest.raises(InstallError) as caught:
        shard(model)
    dist.barrier()
    return [*messages, str(caught.value)]


def test_what_cannot_be_sharded_is_refused():
    heads, features, wrapped = run_ranks(refusals, 8)[0]
    assert "9 heads do not divide by tp=8" in heads
    assert re.search(r"ff\.net\.0\.proj.* and 4 more: 300 features do not divide by tp=8", features)
    assert "already wrapped by LoRA" in wrapped


def diffusers_plan():
    model = build()
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        model.enable_parallelism(config=TensorParallelConfig(tp_degree=2))
    return str(caught.value)


def test_diffusers_itself_refuses_tensor_parallelism_for_h3():
    """Why `shard` exists: the model has no plan. When Diffusers gains one, this test says so."""
    assert "MiniMaxH3Transformer3DModel" in run_ranks(diffusers_plan, 2)[0]
