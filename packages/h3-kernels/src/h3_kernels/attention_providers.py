"""Providers of the attention forward on CUDA: who may run it, who is asked first, and the proof each has to give.

The contract of `nodes.attention` fixes no schedule across providers, only that a (row, head) keeps its bits
whatever the head split, the documents packed beside it, padding and repetition. `probe` checks exactly that on the
device, and that the output and lse are right, before a provider is used. Two engines that must agree bit for bit
must run the same provider: name it (the `provider` argument, or H3_ATTENTION in the environment) where their
installations differ.

Measured on an H200, 56 heads x 128, 8349 rows: fa3 714 TFLOP/s, aten-flash 357; cuDNN is not offered because its
bits change under a mask, and FlashAttention 2's dense form because they change with the head split.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from h3_kernels.binding import Probe
from h3_kernels.errors import ProviderError
from h3_kernels.providers import capability

ENVIRONMENT = "H3_ATTENTION"
FA3_DENSE_ROWS = 16384
"""Most rows of one document that FA3 runs dense. 56 heads, dense / varlen on an H200: 70 rows 0.81, 925 rows 0.89, 8349
rows 0.986, 37,000 rows 1.026."""
PROBE_DOCUMENTS = (70, 1, 925, 130)
"""Rows of the documents the probe packs: shorter than a block, one row, several blocks and a tail, a block and two."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a provider needs to know to accept a call: sizes, dtype and device, no data."""

    heads: int
    head_dim: int
    dtype: torch.dtype
    device_type: str
    capability: tuple[int, int] | None

    @classmethod
    def of(cls, q: Tensor) -> AttentionCall:
        """The call class of q [T, heads, head_dim]."""
        return cls(q.shape[1], q.shape[2], q.dtype, q.device.type, capability(q.device))


class AttentionProvider(Protocol):
    """One forward of packed attention."""

    @property
    def name(self) -> str:
        """Name to ask for, and to report."""
        ...

    def refuses(self, call: AttentionCall) -> str | None:
        """Why this provider cannot serve `call`, or None if it can."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """out [T, heads, D] and lse [heads, T] fp32 (natural logarithm) of q, k, v [T, heads, D]."""
        ...


@functools.cache
def _fa3() -> Any:
    """The wheel's operator itself: its Python wrapper, an op of its own, takes the host 0.15 ms a call (measured)."""
    importlib.import_module("fa3_fwd_interface")
    return torch.ops.fa3_fwd.fwd


class Fa3:
    """FlashAttention 3 (the `fa3-fwd` wheel, vLLM-Omni's own default on Hopper), one split.

    Varlen; a document that is all rows runs dense, which has the same bits (on an H200, 1 to 37,000 rows, 7 and 56
    heads; the probe compares packed documents with each alone).
    Padding behind a document must be finite: an infinity or NaN there reaches the document's last rows (measured).
    """

    name = "fa3"

    def refuses(self, call: AttentionCall) -> str | None:
        """Hopper, bf16, and the wheel installed."""
        if call.capability is None or call.capability[0] != 9:
            return f"needs a device of capability 9.x, got {call.capability}"
        if call.dtype != torch.bfloat16 or call.head_dim not in (64, 128, 256):
            return f"takes bf16 heads of 64, 128 or 256, got {call.dtype} and {call.head_dim}"
        return _import_failure("fa3_fwd_interface")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See AttentionProvider.forward."""
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        if cu_seqlens.shape[0] == 2 and max_seqlen == q.shape[0] <= FA3_DENSE_ROWS:
            out, lse, *_ = _fa3()(q[None], k[None], v[None], softmax_scale=scale, num_splits=1)
            return out[0], lse[0]
        out, lse, *_ = _fa3()(
            q, k, v,
            cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen,
            softmax_scale=scale, num_splits=1,
        )  # fmt: skip
        return out, lse


class AtenFlash:
    """FlashAttention 2 as torch carries it, varlen (the dense form splits keys when heads are few)."""

    name = "aten-flash"

    def refuses(self, call: AttentionCall) -> str | None:
        """Any CUDA device from capability 8.0, half precision, heads of at most 256."""
        if call.capability is None or call.capability < (8, 0):
            return f"needs a device of capability 8.0 or later, got {call.capability}"
        if call.dtype not in (torch.bfloat16, torch.float16) or call.head_dim > 256 or call.head_dim % 8:
            return f"takes half-precision heads of at most 256, a multiple of 8, got {call.dtype} and {call.head_dim}"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See AttentionProvider.forward."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, False, False, scale=scale
        )
        return out, lse


class TritonAttention:
    """The portable kernel of `h3_kernels.triton.attention`."""

    name = "triton"

    def refuses(self, call: AttentionCall) -> str | None:
        """Any CUDA device Triton supports, half precision, heads of 16, 32, 64 or 128."""
        if call.device_type != "cuda":
            return f"runs on CUDA, got {call.device_type}"
        if call.dtype not in (torch.bfloat16, torch.float16) or call.head_dim not in (16, 32, 64, 128):
            return f"takes half-precision heads of 16, 32, 64 or 128, got {call.dtype} and {call.head_dim}"
        return _import_failure("triton")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See AttentionProvider.forward."""
        run: Any = importlib.import_module("h3_kernels.triton.attention").attention_forward
        out, lse = run(q, k, v, cu_seqlens, max_seqlen, scale)
        return out, lse


_PROVIDERS: dict[str, AttentionProvider] = {p.name: p for p in (Fa3(), AtenFlash(), TritonAttention())}

_FASTEST_FIRST: dict[tuple[int, int] | None, tuple[str, ...]] = {(9, 0): ("fa3", "triton", "aten-flash")}
"""Order of asking by compute capability, where it was measured; elsewhere as registered."""


def registered(capability: tuple[int, int] | None = None) -> tuple[AttentionProvider, ...]:
    """The providers in the order `choose` asks them on a device of `capability`."""
    return tuple(_PROVIDERS[name] for name in _FASTEST_FIRST.get(capability, tuple(_PROVIDERS)))


def requested(wanted: str) -> str:
    """``wanted``, or what H3_ATTENTION names in the place of "auto"."""
    return os.environ.get(ENVIRONMENT, wanted) if wanted == "auto" else wanted


def choose(call: AttentionCall, wanted: str, device: torch.device) -> AttentionProvider:
    """The first provider that serves `call` and proves its bits on `device`, or the one named `wanted` if it does.

    "auto" means the provider named by H3_ATTENTION if that is set. Choices are remembered per call and device; a first
    choice reads results back, so make it before a graph is captured. Raises ProviderError with the reason of every
    candidate if none is legal.
    """
    return _chosen(call, requested(wanted), device)


@functools.lru_cache(maxsize=256)
def _chosen(call: AttentionCall, wanted: str, device: torch.device) -> AttentionProvider:
    if wanted not in ("auto", *_PROVIDERS):
        raise ProviderError(f"attention: no provider is called {wanted!r}; there are {', '.join(_PROVIDERS)}")
    trace = []
    for provider in registered(call.capability):
        if wanted not in ("auto", provider.name):
            continue
        reason = provider.refuses(call)
        if reason is None:
            proof = probe(provider, call, device)
            if proof.ok:
                return provider
            reason = f"probe failed: {proof.detail}"
        trace.append(f"{provider.name}: {reason}")
    raise ProviderError(f"attention: no provider may serve {call}; " + "; ".join(trace))


def probe(provider: AttentionProvider, call: AttentionCall, device: torch.device) -> Probe:
    """Prove on `device` that `provider` keeps the bits of every (row, head), and that it computes attention.

    Documents of PROBE_DOCUMENTS rows packed together against each alone, all heads against halves and one head, a
    second run, and padding of large values behind the last document; then out and lse against fp64.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    heads, rows = call.heads, sum(PROBE_DOCUMENTS)
    q, k, v = (
        torch.randn((rows, heads, call.head_dim), generator=generator, device=device).to(call.dtype)
        for _ in range(3)
    )
    bounds = list(itertools.accumulate(PROBE_DOCUMENTS, initial=0))
    scale = call.head_dim**-0.5

    def run(x: tuple[Tensor, Tensor, Tensor], at: list[int]) -> tuple[Tensor, Tensor]:
        cu = torch.tensor(at, dtype=torch.int32, device=device)
        longest = max(b - a for a, b in itertools.pairwise(at))
        out, lse = provider.forward(*x, cu, longest, scale)
        return out, lse.transpose(0, 1)

    packed = run((q, k, v), bounds)
    checks = {"repeated": (packed, run((q, k, v), bounds))}
    for a, b in itertools.pairwise(bounds):
        alone = run((q[a:b], k[a:b], v[a:b]), [0, b - a])
        checks[f"document of {b - a} rows alone"] = ((packed[0][a:b], packed[1][a:b]), alone)
    for part in {1, max(1, heads // 2)}:
        split = run((q[:, :part].contiguous(), k[:, :part].contiguous(), v[:, :part].contiguous()), bounds)
        checks[f"{part} of {heads} heads"] = ((packed[0][:, :part], packed[1][:, :part]), split)
    foreign = torch.full_like(q[:64], 1e4)
    padded = run(
        (torch.cat([q, foreign]), torch.cat([k, foreign]), torch.cat([v, foreign])), [*bounds, rows + 64]
    )
    checks["padding"] = (packed, (padded[0][:rows], padded[1][:rows]))
    for what, (left, right) in checks.items():
        if not all(torch.equal(a, b) for a, b in zip(left, right, strict=True)):
            return Probe(ok=False, detail=f"{what}: bits differ")
    return _accuracy(packed, (q, k, v), bounds, scale)


def _accuracy(
    found: tuple[Tensor, Tensor], x: tuple[Tensor, Tensor, Tensor], bounds: list[int], scale: float
) -> Probe:
    error = torch.zeros((), dtype=torch.float64, device=found[0].device)
    for a, b in itertools.pairwise(bounds):
        q, k, v = (t[a:b].double().transpose(0, 1) for t in x)
        scores = q @ k.transpose(1, 2) * scale
        lse = scores.logsumexp(-1, keepdim=True)
        out = (scores - lse).exp() @ v
        error = torch.maximum(error, (found[0][a:b].transpose(0, 1) - out).norm() / out.norm())
        error = torch.maximum(error, (found[1][a:b].transpose(0, 1) - lse[..., 0]).abs().max())
    limit = 2.0**-7 if x[0].dtype == torch.bfloat16 else 2.0**-10
    if not float(error) < limit:
        return Probe(
            ok=False, detail=f"relative error to fp64 {float(error):.2e}, expected below {limit:.2e}"
        )
    detail = f"bits kept under packing, head split, padding and repetition; error to fp64 {float(error):.1e}"
    return Probe(ok=True, detail=detail, compared=found[0].numel())


@functools.lru_cache(maxsize=16)
def _import_failure(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        return f"{module} does not import: {error}"
    return None
