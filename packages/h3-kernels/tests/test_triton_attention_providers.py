"""Attention providers: the probe accepts exactly what keeps its bits and computes attention; choices are explained.

Providers are written here in torch and probed on the CPU; the probes of the real ones run in test_gpu_nodes.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from h3_kernels import attention_providers as providers
from h3_kernels.errors import ProviderError
from torch import Tensor

CALL = providers.AttentionCall(4, 16, torch.bfloat16, "cpu", None)
CPU = torch.device("cpu")


class Exact:
    """Each document and head by itself, in fp32."""

    name = "exact"

    def refuses(self, call: providers.AttentionCall) -> str | None:
        return None

    def spans(self, bounds: list[int]) -> list[tuple[int, int]]:
        return list(itertools.pairwise(bounds))

    def one(self, q: Tensor, k: Tensor, v: Tensor, scale: float, heads: int) -> tuple[Tensor, Tensor]:
        scores = q @ k.T * scale
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
        for start, end in self.spans(cu_seqlens.tolist()):
            for head in range(q.shape[1]):
                x = (t[start:end, head].float() for t in (q, k, v))
                out[start:end, head], lse[head, start:end] = self.one(*x, scale, q.shape[1])
        return out, lse


class SplitsKeysWhenHeadsAreFew(Exact):
    """What dense flash does: another order of the sum below some number of heads."""

    def one(self, q: Tensor, k: Tensor, v: Tensor, scale: float, heads: int) -> tuple[Tensor, Tensor]:
        order = torch.arange(len(k)) if heads >= 4 else torch.arange(len(k) - 1, -1, -1)
        return super().one(q, k[order], v[order], scale, heads)


class ReadsPastTheDocument(Exact):
    """Keys padded to a multiple of 64 with whatever lies behind."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        bounds = cu_seqlens.tolist()
        if bounds[-1] < len(q) or len(bounds) > 2:
            k = k.roll(1, 0)
        return super().forward(q, k, v, cu_seqlens, max_seqlen, scale)


class DependsOnTheCallCount(Exact):
    """An atomic's order: another rounding every second time."""

    calls = 0

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        self.calls += 1
        out, lse = super().forward(q, k, v, cu_seqlens, max_seqlen, scale)
        return out, lse.nextafter(lse + 1) if self.calls % 2 else lse


class ForgetsTheScale(Exact):
    """Invariant, and wrong."""

    def one(self, q: Tensor, k: Tensor, v: Tensor, scale: float, heads: int) -> tuple[Tensor, Tensor]:
        return super().one(q, k, v, 1.0, heads)


class NeedsAnotherDevice(Exact):
    """Refuses before any probe."""

    name = "elsewhere"

    def refuses(self, call: providers.AttentionCall) -> str | None:
        return "needs a device of capability 9.x, got None"


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv(providers.ENVIRONMENT, raising=False)
    providers._chosen.cache_clear()
    yield monkeypatch
    providers._chosen.cache_clear()


def test_the_probe_accepts_an_invariant_provider() -> None:
    proof = providers.probe(Exact(), CALL, CPU)
    assert proof.ok, proof.detail
    assert proof.compared == sum(providers.PROBE_DOCUMENTS) * 4 * 16


@pytest.mark.parametrize(
    ("provider", "reason"),
    [
        (SplitsKeysWhenHeadsAreFew(), "of 4 heads: bits differ"),
        (ReadsPastTheDocument(), "bits differ"),
        (DependsOnTheCallCount(), "repeated: bits differ"),
        (ForgetsTheScale(), "relative error to fp64"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Exact) else "",
)
def test_the_probe_refuses_every_broken_promise(provider: Exact, reason: str) -> None:
    """Negative twins: one provider for each promise, that breaks it alone."""
    proof = providers.probe(provider, CALL, CPU)
    assert not proof.ok
    assert reason in proof.detail


def test_the_first_legal_provider_is_chosen_and_remembered(offer: pytest.MonkeyPatch) -> None:
    exact = Exact()
    offer.setattr(providers, "_PROVIDERS", {"elsewhere": NeedsAnotherDevice(), "exact": exact})
    assert providers.choose(CALL, "auto", CPU) is exact
    offer.setattr(exact, "forward", None)  # a second choice does not probe again
    assert providers.choose(CALL, "auto", CPU) is exact


def test_a_refusal_names_every_candidate_and_reason(offer: pytest.MonkeyPatch) -> None:
    offer.setattr(providers, "_PROVIDERS", {"elsewhere": NeedsAnotherDevice(), "exact": ForgetsTheScale()})
    with pytest.raises(
        ProviderError, match=r"elsewhere: needs a device.*; exact: probe failed: relative error"
    ):
        providers.choose(CALL, "auto", CPU)


def test_a_named_provider_is_taken_or_refused_never_replaced(offer: pytest.MonkeyPatch) -> None:
    offer.setattr(providers, "_PROVIDERS", {"exact": Exact(), "elsewhere": NeedsAnotherDevice()})
    with pytest.raises(ProviderError, match=r"elsewhere: needs a device"):
        providers.choose(CALL, "elsewhere", CPU)
    offer.setenv(providers.ENVIRONMENT, "elsewhere")
    with pytest.raises(ProviderError, match=r"elsewhere: needs a device"):
        providers.choose(CALL, "auto", CPU)
    assert providers.choose(CALL, "exact", CPU).name == "exact"
    with pytest.raises(ProviderError, match=r"no provider is called 'cudnn'; there are exact, elsewhere"):
        providers.choose(CALL, "cudnn", CPU)


def test_real_providers_refuse_the_cpu_with_a_reason(offer: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProviderError, match=r"fa3: .*; aten-flash: .*; triton: runs on CUDA, got cpu"):
        providers.choose(CALL, "auto", CPU)


def test_the_order_of_asking_is_measured_where_it_was_measured() -> None:
    assert [p.name for p in providers.registered((9, 0))] == ["fa3", "triton", "aten-flash"]
    assert [p.name for p in providers.registered((8, 0))] == ["fa3", "aten-flash", "triton"]
    assert {p.name for p in providers.registered((9, 0))} == set(providers._PROVIDERS)


@pytest.mark.parametrize(
    ("call", "fits"),
    [
        (providers.AttentionCall(56, 128, torch.bfloat16, "cuda", (9, 0)), {"aten-flash", "triton"}),
        (providers.AttentionCall(56, 128, torch.float32, "cuda", (9, 0)), set()),
        (providers.AttentionCall(56, 96, torch.bfloat16, "cuda", (8, 0)), {"aten-flash"}),
        (providers.AttentionCall(56, 128, torch.float16, "cuda", (7, 5)), {"triton"}),
    ],
)
def test_what_each_provider_takes(call: providers.AttentionCall, fits: set[str]) -> None:
    """Beside fa3, which also needs its wheel."""
    assert {p.name for p in providers.registered() if p.refuses(call) is None} - {"fa3"} == fits
