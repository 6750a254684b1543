"""Both real engines on a GPU, with the kernels and the attention each ships: bound by the same call, the same bits.

Needs vLLM's CUDA build or the site that tools/h200_site packs.
"""

import warnings

import pytest
import torch
from h3_adapter_diffusers import base_state, install_h3_training
from h3_adapter_diffusers.testing.native import engine_lora, native_adapters, native_inputs
from h3_adapter_diffusers.testing.packings import packings
from h3_adapter_diffusers.testing.tiny import build, velocities
from h3_kernels.testing import count_differing
from h3_kernels.testing.tiny import SMALL
from h3_mapper.apply import diffusers_to_native
from peft import LoraConfig

DEVICE, RANK = "cuda", 16
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # the engines' CUDA builds warn; that is not what is tested
]


@pytest.fixture(scope="module")
def engine():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from h3_adapter_vllm.testing import engine as module
    with module.engine():
        yield module


@pytest.fixture
def engines(engine):
    """(trainer, rollout) on the same random weights, with the heads and rows of the release."""
    trainer, rollout = build(SMALL, device=DEVICE), engine.build(SMALL, device=DEVICE)
    state = diffusers_to_native(base_state(trainer), layout="release", config=dict(trainer.config))
    assert rollout.load_weights(state.items()) == set(rollout.state_dict())
    return trainer, rollout


def requests():
    return [request.to(DEVICE) for request in packings(SMALL)]


def differing(trainer, rollout, batch, padding=0):
    """Values of all video and audio velocities that differ; the trainer runs each request alone."""
    alone = [velocities(trainer, request) for request in batch]
    ours = [torch.cat(rows) for rows in zip(*alone, strict=True)]
    with torch.no_grad():
        theirs = rollout(**native_inputs(batch, padding=padding, device=DEVICE))
    return sum(count_differing(a, b) for a, b in zip(ours, theirs, strict=True))


def bind(trainer, rollout):
    from h3_adapter_vllm import install_h3_rollout

    return install_h3_training(trainer), install_h3_rollout(rollout)


def test_stock_engines_differ(engines):
    """Negative twin of all below: even one request, alone and without padding."""
    assert differing(*engines, requests()[:1]) > 0


@pytest.mark.parametrize("padding", [0, 57])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["t2va", "fl2va", "ref2va"])
def test_one_request(engines, which, padding):
    bind(*engines)
    assert differing(*engines, [requests()[which]], padding) == 0


def test_packed_requests(engines):
    handles = bind(*engines)
    assert differing(*engines, requests(), padding=5) == 0
    ours, theirs = (handle.report() for handle in handles)
    assert not ours.refused()
    assert not theirs.refused()
    node = "blocks.0.attn.attention"
    assert ours[node].provider == theirs[node].provider


def test_lora(engines):
    trainer, rollout = engines
    torch.manual_seed(3)
    trainer.add_adapter(
        LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, init_lora_weights=False)
    )
    for name, parameter in trainer.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(DEVICE, torch.bfloat16)
    bind(*engines)
    base = differing(trainer, rollout, requests()[1:2])
    engine_lora(rollout, native_adapters(trainer), rank=RANK)
    assert base > 0
    assert differing(trainer, rollout, requests()[1:2], padding=57) == 0


def test_a_weight_off_by_one_ulp_is_seen(engines):
    trainer, rollout = engines
    bind(*engines)
    rollout.get_parameter("blocks.1.norm2.weight").data.view(torch.int16)[3] += 1
    assert differing(trainer, rollout, requests()[:1]) > 0
