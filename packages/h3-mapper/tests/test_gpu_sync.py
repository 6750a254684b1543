"""A sync and its digests on a CUDA device: the bits and the digests of the CPU, at the released widths."""

from dataclasses import replace

import pytest
import torch
from h3_mapper import H3Config, Layout, plan, tensors
from h3_mapper.sync import WeightSync
from h3_mapper.sync_proof import DifferentWeightsError, LiveDigest, assert_same, combine
from h3_mapper.tp import shard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = replace(H3Config(), num_layers=1, num_refiner_layers=1)
KINDS = {"BF16": torch.bfloat16, "F32": torch.float32}


def trainer():
    """Random bits, NaNs of every payload among them, on the device."""
    made = {}
    generator = torch.Generator("cuda").manual_seed(0)
    for spec in tensors(CONFIG, Layout.DIFFUSERS):
        words = torch.randint(
            -(2**15), 2**15, (*spec.shape, 2), dtype=torch.int16, device="cuda", generator=generator
        )
        kind = KINDS[spec.dtype]
        made[spec.name] = words.view(torch.int32).view(kind)[..., :1].reshape(spec.shape).contiguous()
    return made


def same(one, two):
    return torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8).to(one.device))


def digest(values, layout, tp=1, rank=0):
    found = LiveDigest(CONFIG, layout, tp=tp, rank=rank)
    for name, value in values.items():
        found.add(name, value)
    return found.partials()


def pushed(values, target):
    sync = WeightSync(CONFIG, target, components={"transformer": ""})
    made = dict(sync.push(values.items()))
    sync.finish()
    return made


def test_cuda_gives_the_cpu_s_bits_and_one_digest_on_both_in_every_layout():
    values = trainer()
    host = {name: value.cpu() for name, value in values.items()}
    truth = combine(CONFIG, [digest(host, Layout.DIFFUSERS)])
    assert_same(truth, combine(CONFIG, [digest(values, Layout.DIFFUSERS)]))
    for target in (Layout.RELEASE, Layout.MODULE):
        made, wanted = pushed(values, target), pushed(host, target)
        assert made.keys() == wanted.keys()
        for name, value in wanted.items():
            assert same(made[name], value), (target, name)
        assert_same(truth, combine(CONFIG, [digest(made, target)]))
    scrambled = combine(CONFIG, [digest(pushed(values, Layout.RELEASE), Layout.MODULE)])
    with pytest.raises(
        DifferentWeightsError, match=r"qkv_proj\.weight\[q\]: trainer and engine hold different bits"
    ):
        assert_same(truth, scrambled)


def test_shards_on_cuda_are_the_slices_and_one_ulp_is_named():
    values = trainer()
    whole = pushed(values, Layout.MODULE)
    partials = []
    for rank in range(8):
        targets = shard(plan(CONFIG, Layout.DIFFUSERS, Layout.MODULE), 8, rank).targets
        live = {t.name: torch.zeros(t.shape, dtype=KINDS[t.dtype], device="cuda") for t in targets}
        sync = WeightSync(CONFIG, Layout.MODULE, components={"transformer": ""}, tp=8, rank=rank)
        sync.load_into(values.items(), live)
        sync.finish()
        fc2, low = whole["blocks.0.mlp.fc2.weight"], rank * CONFIG.ffn_dim // 8
        assert same(live["blocks.0.mlp.fc2.weight"], fc2[:, low : low + CONFIG.ffn_dim // 8])
        if rank == 5:
            spoiled = {name: value.clone() for name, value in live.items()}
            spoiled["blocks.0.mlp.fc2.weight"].view(torch.int16)[3, 5] += 1
        partials.append(digest(live, Layout.MODULE, 8, rank))
    truth = combine(CONFIG, [digest(values, Layout.DIFFUSERS)])
    assert_same(truth, combine(CONFIG, partials))
    partials[5] = digest(spoiled, Layout.MODULE, 8, 5)
    with pytest.raises(DifferentWeightsError, match=r"^blocks\.0\.mlp\.fc2\.weight: .*1 of"):
        assert_same(truth, combine(CONFIG, partials))
