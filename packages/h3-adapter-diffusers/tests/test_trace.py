"""Traces of the real model: strict equals strict, and every planted deviation is found at the node it was
planted in.

The probes are those of RFC #420's ablation overlay: A0 strict against strict, A1 RoPE, A2 QK-norm eps and
cast, A3 the document mask, A6 the accumulator, and the unit order of tensor parallelism.
"""

import pytest
import torch
from h3_adapter_diffusers.errors import BoundModelError
from h3_adapter_diffusers.install import install_h3_training
from h3_adapter_diffusers.testing.packings import fl2va
from h3_adapter_diffusers.testing.tiny import build, velocities
from h3_kernels import nodes
from h3_kernels.row_parallel import row_parallel
from h3_kernels.trace import Recorder, first_divergence

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def request_():
    return fl2va()


def trace_of(model, request, overlay=None, steps=2):
    recorder = Recorder("run")
    with install_h3_training(model, scope="model", overlay=overlay) as handle:
        recorder.trace.fingerprint = handle.fingerprint()
        with handle.trace(recorder):
            for step in range(steps):
                velocities(model, request, video_t=0.3 + 0.2 * step)
    return recorder.trace


def later(step, function):
    """A deviation that begins with the given step."""
    calls = []

    def replacement(strict, *inputs):
        calls.append(None)
        return function(strict, *inputs) if len(calls) > step else strict(*inputs)

    return replacement


def rotated_by_the_next_row(strict, q, k, table):
    return strict(q, k, table.roll(1, 0))


def position_off_by_one(strict, positions):
    moved = positions.clone()
    moved[11, 0] += 1
    return strict(moved)


def split_document(strict, q, k, v, cu_seqlens):
    last = int(cu_seqlens[-1])
    return strict(q, k, v, torch.tensor([0, last // 2, last], dtype=torch.int32))


def bf16_accumulator(model):
    weight = model.transformer_blocks[0].ff.net[2].weight

    def accumulate(strict, f):
        y = torch.zeros(f.shape[0], weight.shape[0], dtype=torch.bfloat16)
        for k in range(0, f.shape[1], 16):
            y = y + f[:, k : k + 16] @ weight[:, k : k + 16].t()
        return (y,)

    return accumulate


def other_eps(model):
    attention = model.transformer_blocks[1].attn

    def norm(strict, q, k, table):
        heads = [x.view(x.shape[0], -1, attention.head_dim) for x in (q, k)]
        return nodes.qk_norm_rope(*heads, attention.norm_q.weight, attention.norm_k.weight, table, 1e-6)

    return norm


def left_half_first(model):
    """Four units in the place of eight: another tree over the same products."""
    linear = model.time_embedder.linear_2
    return lambda strict, x: (row_parallel(x, linear.weight, linear.bias, contract="h3-parallel-v1-u4"),)


PLANTED = {
    "rope position": ("rope", lambda m: position_off_by_one),
    "rope rows": ("blocks.1.attn.qk_norm_rope", lambda m: rotated_by_the_next_row),
    "qk eps": ("blocks.1.attn.qk_norm_rope", other_eps),
    "qk cast": ("blocks.0.attn.qk_norm_rope", lambda m: None),  # Diffusers rounds each product
    "document mask": ("blocks.1.attn.attention", lambda m: split_document),
    "refiner mask": ("token_refiner.blocks.0.attn.attention", lambda m: split_document),
    "accumulator": ("blocks.0.mlp.fc2", bf16_accumulator),
    "unit order": ("time_embedder.proj_out", left_half_first),
    "norm rounding": ("blocks.0.norm2", lambda m: None),
}


def test_a0_strict_equals_strict(model, request_):
    assert first_divergence(trace_of(model, request_), trace_of(model, request_)) is None


@pytest.mark.parametrize("probe", PLANTED)
def test_a_planted_deviation_is_found_at_its_node(probe, model, request_):
    node, make = PLANTED[probe]
    found = first_divergence(trace_of(model, request_), trace_of(model, request_, {node: make(model)}))
    assert found is not None
    assert (found.step, found.node) == (0, node), str(found)
    assert found.operators[0] != found.operators[1]


def test_the_row_and_the_step_are_found(model, request_):
    deviation = {"rope": later(1, position_off_by_one)}
    found = first_divergence(trace_of(model, request_), trace_of(model, request_, deviation))
    assert (found.step, found.node, found.row) == (1, "rope", 11)


def test_a_changed_weight_is_seen_by_the_fingerprint_and_at_its_node(request_):
    """One norm weight off by one bf16 ulp: no log-probability gate would see it."""
    model, other = build(), build()
    weight = other.transformer_blocks[1].norm2.weight.data
    weight.view(torch.int16)[7] += 1
    found = first_divergence(trace_of(model, request_), trace_of(other, request_))
    assert found.node == "blocks.1.norm2"
    prints = []
    for m in (model, other):
        with install_h3_training(m, scope="model") as handle:
            prints.append(handle.fingerprint(weights=True, variant="FL2VA"))
    assert prints[0]["architecture"] == prints[1]["architecture"]
    assert prints[0]["id"] != prints[1]["id"]


def test_only_the_graph_can_be_traced(request_):
    with (
        install_h3_training(build(), scope="projections") as handle,
        pytest.raises(BoundModelError, match="install with scope='model'"),
        handle.trace(Recorder("x")),
    ):
        pass
