"""Choosing a provider: priority, refusals and probes decide; a failure lists every candidate and its reason."""

import pytest
import torch
from h3_kernels import providers
from h3_kernels.binding import Probe
from h3_kernels.errors import InputError, ProviderError
from h3_kernels.providers import (
    GemmCall,
    ReferenceProvider,
    Unproven,
    choose,
    proof,
    register,
    registered,
    tree_gemm,
    unknown_provider,
)
from h3_kernels.testing import random_inputs


class Recorder(ReferenceProvider):
    """A CPU provider that can be told to refuse or to fail its probe, and counts."""

    def __init__(self, name, refusal=None, probe=Probe(ok=True, detail="equal", compared=1)):  # noqa: B008
        self.name, self.refusal, self.outcome, self.calls, self.probes = name, refusal, probe, [], 0

    def refuses(self, call):
        return self.refusal

    def run(self, a, b, **settings):
        self.calls.append((a, b, settings))
        return super().run(a, b, **settings)

    def probe(self, call, device):
        self.probes += 1
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture(autouse=True)
def restored_registry():
    before = dict(providers._registry)
    yield
    providers._registry.clear()
    providers._registry.update(before)
    providers._chosen.cache_clear()


def call_of(x, weight, **settings):
    return tree_gemm(x, weight, units=settings.pop("units", 8), out_dtype=x.dtype, **settings)


def test_the_highest_priority_that_is_legal_serves_and_is_probed_once():
    first, second = Recorder("first", refusal="M below 64"), Recorder("second")
    register(first, 20)
    register(second, 10)
    x, weight = random_inputs(3, 4, 16)
    call = GemmCall(3, 4, 16, 8, x.dtype, x.dtype, "k", "k", False, "cpu", None)
    assert [p.name for p in registered(call)][:2] == ["first", "second"]
    for _ in range(3):
        call_of(x, weight)
    assert (len(first.calls), len(second.calls), second.probes) == (0, 3, 1)
    assert proof(call, device=x.device) is second.outcome
    assert second.probes == 1, "a proof is remembered with the choice"
    call_of(x, weight, provider="reference")
    assert len(second.calls) == 3


def test_a_priority_may_depend_on_the_call():
    few, many = Recorder("few"), Recorder("many")
    register(few, lambda call: 20 if call.m < 8 else 5)
    register(many, 10)
    for rows in (3, 40):
        call_of(*random_inputs(rows, 4, 16))
    assert (len(few.calls), len(many.calls)) == (1, 1)


def test_a_failed_probe_refuses_and_the_next_candidate_serves():
    wrong = Recorder("wrong", probe=Probe(ok=False, detail="3 of 64 differ, first at [0, 1]"))
    register(wrong, 20)
    x, weight = random_inputs(3, 4, 16)
    call_of(x, weight)
    assert not wrong.calls
    with pytest.raises(ProviderError, match=r"wrong: probe failed: 3 of 64 differ, first at \[0, 1\]"):
        call_of(x, weight, provider="wrong")


def test_a_choice_made_while_a_probe_was_impossible_is_not_remembered():
    """Memory that is short, or a graph capture, says nothing of a provider's bits."""
    short, spare = Recorder("short", probe=Unproven("not enough free memory")), Recorder("spare")
    register(short, 20)
    register(spare, 10)
    x, weight = random_inputs(3, 4, 16)
    for _ in range(2):
        call_of(x, weight)
    assert (len(short.calls), len(spare.calls), short.probes) == (0, 2, 2)
    with pytest.raises(ProviderError, match="short: not enough free memory"):
        call_of(x, weight, provider="short")
    short.outcome = Probe(ok=True, detail="equal", compared=1)
    for _ in range(2):
        call_of(x, weight)
    assert (len(short.calls), len(spare.calls), short.probes) == (2, 2, 4)


def test_a_choice_made_after_a_failed_probe_is_remembered():
    """The twin: bits that differ once are not asked for again."""
    wrong, spare = Recorder("wrong", probe=Probe(ok=False, detail="1 of 64 differ")), Recorder("spare")
    register(wrong, 20)
    register(spare, 10)
    x, weight = random_inputs(3, 4, 16)
    for _ in range(2):
        call_of(x, weight)
    assert (len(spare.calls), wrong.probes) == (2, 1)


def test_without_a_legal_provider_every_reason_is_listed():
    register(Recorder("first", refusal="needs sm_90"), 20)
    call = GemmCall(1, 1, 8, 1, torch.float32, torch.float32, "k", "k", False, "mps", None)
    with pytest.raises(
        ProviderError, match=r"first: needs sm_90; reference: runs on the CPU, the operands are on mps"
    ):
        choose(call)


def test_registering_again_replaces_and_forgets_choices():
    register(Recorder("mine"), 20)
    x, weight = random_inputs(3, 4, 16)
    call_of(x, weight)
    register(Recorder("mine", refusal="no longer"), 20)
    with pytest.raises(ProviderError, match="no longer"):
        call_of(x, weight, provider="mine")


def test_layouts_reach_the_provider_without_a_copy_and_odd_strides_are_copied():
    seen = Recorder("seen")
    register(seen, 20)
    x, weight = random_inputs(6, 4, 16)
    wide = torch.cat([x, x], dim=1)
    for a, layout, same in (
        (x, "k", True),
        (x.t().contiguous().t(), "m", True),
        (wide[:, :16], "k", True),
        (wide[:, ::2], "k", False),
        (x[:1].expand(6, 16), "k", False),
        (wide.flatten()[1:97].view(6, 16), "k", False),  # begins off 16 bytes
        (torch.zeros(6, 20, dtype=x.dtype)[:, :16], "k", False),  # rows 40 bytes apart
        (torch.zeros(6, 20, dtype=x.dtype), "k", True),  # dense, as a probe's operands are
    ):
        found, kind = providers._operand(a, "m")
        assert (kind, found.data_ptr() == a.data_ptr()) == (layout, same)
    assert providers._operand(weight.t().contiguous().t(), "n")[1] == "n"


def test_a_bias_reaches_the_provider_contiguous():
    """Kernels read it through a pointer; a column of a table and an expanded scalar are biases too."""
    seen = Recorder("seen")
    register(seen, 20)
    x, weight = random_inputs(6, 4, 16)
    for bias in (weight[:, 0], torch.ones(1).expand(4)):
        assert not bias.is_contiguous()
        expected = call_of(
            x, weight, bias=bias.clone(memory_format=torch.contiguous_format), provider="reference"
        )
        assert torch.equal(call_of(x, weight, bias=bias), expected)
        assert seen.calls[-1][2]["bias"].is_contiguous()


@pytest.mark.parametrize(
    ("a", "b", "settings", "message"),
    [
        (torch.ones(2, 8), torch.ones(2, 9), {}, r"\[2, 8\] and \[2, 9\]"),
        (torch.ones(8), torch.ones(2, 8), {}, r"expected \[M, K\] and \[N, K\]"),
        (torch.ones(2, 8), torch.ones(2, 8).bfloat16(), {}, "expected one operand dtype"),
        (torch.ones(2, 8).double(), torch.ones(2, 8).double(), {}, "expected one operand dtype"),
        (torch.ones(2, 8), torch.ones(2, 8, device="meta"), {}, "cpu and meta"),
        (torch.ones(2, 8), torch.ones(2, 8), {"units": 3}, "K=8 in 3 units"),
        (torch.ones(2, 12), torch.ones(2, 12), {"units": 8}, "K=12 in 8 units"),
        (torch.ones(2, 8), torch.ones(2, 8), {"bias": torch.ones(3)}, r"bias \[3\]"),
    ],
)
def test_operands_outside_the_contract_are_refused(a, b, settings, message):
    with pytest.raises(InputError, match=message):
        call_of(a, b, **settings)


def test_a_name_that_no_provider_has_is_told_with_the_known_ones() -> None:
    providers._registry.clear()
    register(Recorder("second"), 20)
    register(Recorder("first"), 10)
    assert unknown_provider("fast", "cpu") == "no provider is named 'fast' on cpu; known: auto, first, second"
    assert unknown_provider("auto", "cpu") is None
    assert unknown_provider("second", "cpu") is None
