"""FSDP2 around an installed model and an install into a sharded one: bits and gradients of the unsharded
model."""

import pytest
import torch
from h3_adapter_diffusers.errors import BoundModelError
from h3_adapter_diffusers.install import install_h3_training
from h3_adapter_diffusers.testing.packings import fl2va
from h3_adapter_diffusers.testing.ranks import run_ranks
from h3_adapter_diffusers.testing.tiny import build
from h3_adapter_diffusers.training import velocity
from peft import LoraConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.engine

WORLD = 2
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]


def lora_model():
    model = build()
    torch.manual_seed(7)
    model.add_adapter(LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, init_lora_weights=False))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.bfloat16()
    return model.train()


def shard(model, **policy):
    """Blocks, then the model, as trainers do."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in [*model.transformer_blocks, *model.token_refiner.refiner_blocks]:
        fully_shard(block, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)
    return model


def step(model, handle):
    request = fl2va()
    video, audio = velocity(
        model, request.packed, request.video, request.audio, request.text, 0.6, 0.2, handle=handle
    )
    (video.square().sum() + audio.square().sum()).backward()
    grads = {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad)
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return {name: t.detach().float().numpy() for name, t in {"video": video, "audio": audio, **grads}.items()}


def sharded_step(scope, install_first, checkpoint):
    model = lora_model()
    handle = install_h3_training(model, scope=scope) if install_first else None
    shard(model)
    handle = handle or install_h3_training(model, scope=scope)
    if checkpoint:
        model.enable_gradient_checkpointing()
    result = step(model, handle)
    assert not handle.report().refused()
    handle.remove()
    return result


def plain_step(scope):
    model = lora_model()
    return step(model, install_h3_training(model, scope=scope))


@pytest.mark.parametrize(
    ("scope", "install_first", "checkpoint"),
    [
        ("projections", True, True),
        ("projections", False, False),
        ("model", True, False),
        ("model", False, True),
    ],
)
def test_sharded_bits_are_the_unsharded_ones(scope, install_first, checkpoint):
    """Both ranks step on the same sample, so the mean over ranks is exactly the unsharded gradient."""
    reference = plain_step(scope)
    for result in run_ranks(sharded_step, WORLD, scope, install_first, checkpoint):
        assert result.keys() == reference.keys()
        different = [name for name, value in result.items() if not (value == reference[name]).all()]
        assert not different, different


def cast_step(scope):
    model = lora_model()
    handle = install_h3_training(model, scope=scope)
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with pytest.raises(BoundModelError) as caught:
        step(model, handle)
    return str(caught.value)


@pytest.mark.parametrize("scope", ["projections", "model"])
def test_a_policy_that_casts_the_fp32_parameters_is_refused(scope):
    """FSDP2's param_dtype would round the twelve fp32 tensors; near t = 1 that is a 40% error of sigma."""
    for message in run_ranks(cast_step, WORLD, scope):
        assert "was torch.float32 at install" in message


def inner_call():
    model = shard(lora_model())
    install_h3_training(model, scope="projections")
    with pytest.raises(BoundModelError) as caught:
        model.transformer_blocks[0].attn.to_out[0].base_layer(torch.zeros(1, 256, dtype=torch.bfloat16))
    return str(caught.value)


def test_a_linear_called_outside_its_unit_is_refused():
    for message in run_ranks(inner_call, WORLD):
        assert "sharded DTensor at the call" in message


def tensor_parallel_weights():
    from h3_adapter_diffusers.errors import InstallError
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = build()
    mesh = init_device_mesh("cpu", (WORLD,))
    parallelize_module(model.transformer_blocks[0], mesh, {"attn.to_q": ColwiseParallel()})
    with pytest.raises(InstallError) as caught:
        install_h3_training(model, scope="projections")
    return str(caught.value)


def test_torch_tensor_parallelism_is_refused():
    for message in run_ranks(tensor_parallel_weights, WORLD):
        assert "attn.to_q: weight is a DTensor of torch tensor parallelism" in message
