"""Providers: what may compute ``tree_gemm``, who is asked first, and why a candidate was refused.

``tree_gemm`` is the one arithmetic primitive of the package; every linear, forward and backward, is one or two calls
of it. A provider is legal for a call only if its bits equal the fixed-order chain's; ``probe`` proves it on the
device.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from h3_kernels import reference
from h3_kernels.binding import Probe
from h3_kernels.contract import UNIT_COUNTS
from h3_kernels.errors import H3KernelsError, InputError, ProviderError

Layout = Literal["k", "m", "n"]
DTYPES = (torch.bfloat16, torch.float32)
ALIGNMENT = 16
"""Bytes. Vector loads and the copy engine read memory in steps of 16 (CUDA programming guide, memory accesses)."""


@dataclass(frozen=True, slots=True)
class GemmCall:
    """What a provider needs to know to accept a call: sizes, dtypes, layouts and the device, no data.

    ``a_layout`` is "k" if a's rows are contiguous along K, "m" if its columns are contiguous along M; ``b_layout``
    likewise "k" or "n". ``capability`` is the CUDA compute capability, None on the CPU.
    """

    m: int
    n: int
    k: int
    units: int
    a_dtype: torch.dtype
    out_dtype: torch.dtype
    a_layout: Layout
    b_layout: Layout
    has_bias: bool
    device_type: str
    capability: tuple[int, int] | None


class Unproven(H3KernelsError):
    """A probe cannot be made now (no free memory, a graph capture): nothing is known of the provider's bits yet."""


class Provider(Protocol):
    """One way to compute ``tree_gemm``."""

    @property
    def name(self) -> str:
        """Name to ask for, and to report."""
        ...

    def refuses(self, call: GemmCall) -> str | None:
        """Why this provider cannot serve ``call``, or None if it can."""
        ...

    def run(self, a: Tensor, b: Tensor, *, units: int, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        """The product, in the contract's order. Called only with what ``refuses`` accepted."""
        ...

    def probe(self, call: GemmCall, device: torch.device) -> Probe:
        """Compare bits with the fixed-order chain on ``device`` for calls of this class.

        Raises Unproven if that cannot be done now; the provider is then passed over for this call alone.
        """
        ...


class ReferenceProvider:
    """The CPU order of reference.py; it defines the bits, so it has nothing to prove."""

    name = "reference"

    def refuses(self, call: GemmCall) -> str | None:
        """Anything on the CPU is legal."""
        return (
            None if call.device_type == "cpu" else f"runs on the CPU, the operands are on {call.device_type}"
        )

    def run(self, a: Tensor, b: Tensor, *, units: int, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        """See ``reference.tree_gemm``."""
        return reference.tree_gemm(a, b, units=units, out_dtype=out_dtype, bias=bias)

    def probe(self, call: GemmCall, device: torch.device) -> Probe:
        """Holds by definition."""
        return Probe(ok=True, detail="defines the CPU bits")


Priority = Callable[[GemmCall], int]
_registry: dict[str, tuple[Priority, Provider]] = {}


def register(provider: Provider, priority: int | Priority) -> None:
    """Offer ``provider`` to ``choose``; the higher priority, which may depend on the call, is asked first.

    A name registered again is replaced.
    """
    _registry[provider.name] = (priority if callable(priority) else lambda _: priority, provider)
    _chosen.cache_clear()


def registered(call: GemmCall) -> list[Provider]:
    """Providers in the order ``choose`` asks them for ``call``."""
    ordered = sorted(_registry.values(), key=lambda entry: (-entry[0](call), entry[1].name))
    return [provider for _, provider in ordered]


def unknown_provider(wanted: str, device_type: str) -> str | None:
    """Why ``wanted`` names no provider on devices of ``device_type``, with the names there are; None if it does."""
    if device_type == "cuda":
        _load_cuda_providers()
    known = ("auto", *sorted(_registry))
    if wanted in known:
        return None
    return f"no provider is named {wanted!r} on {device_type}; known: {', '.join(known)}"


def choose(call: GemmCall, wanted: str = "auto", device: torch.device | None = None) -> Provider:
    """First legal provider for ``call``, or the one named ``wanted`` if it is legal.

    A provider is legal if it does not refuse the call and its probe on ``device`` (the current device of the call's
    type by default) succeeds. Choices are remembered per call, name and device. Raises ProviderError with the reason
    of every candidate if none is legal.
    """
    return _choice(call, wanted, device)[0]


def proof(call: GemmCall, wanted: str = "auto", device: torch.device | None = None) -> Probe:
    """The probe by which ``choose`` took its provider for ``call``: remembered, so a report computes nothing again.

    Raises ProviderError as ``choose`` does.
    """
    return _choice(call, wanted, device)[1]


Choice = tuple[Provider, Probe]


class _Interim(Exception):
    """A choice for one call only: a provider before it could not be probed. Raised, so that no cache keeps it."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice


def _choice(call: GemmCall, wanted: str, device: torch.device | None) -> Choice:
    try:
        return _chosen(call, wanted, device or torch.device(call.device_type))
    except _Interim as interim:
        return interim.choice


@functools.lru_cache(maxsize=4096)
def _chosen(call: GemmCall, wanted: str, device: torch.device) -> Choice:
    unknown = unknown_provider(wanted, call.device_type)
    if unknown:
        raise ProviderError(unknown)
    candidates = [p for p in registered(call) if wanted in ("auto", p.name)]
    trace = []
    unproven = False
    for provider in candidates:
        reason = provider.refuses(call)
        if reason is None:
            try:
                with torch.autocast(call.device_type, enabled=False):
                    probe = provider.probe(call, device)
            except Unproven as error:
                unproven = True
                trace.append(f"{provider.name}: {error}")
                continue
            if probe.ok and unproven:
                raise _Interim((provider, probe))
            if probe.ok:
                return provider, probe
            reason = f"probe failed: {probe.detail}"
        trace.append(f"{provider.name}: {reason}")
    raise ProviderError(f"no legal provider for {call}: " + "; ".join(trace))


@functools.cache
def _load_cuda_providers() -> None:
    """Registered when the first CUDA operand arrives, so that importing this package never touches CUDA."""
    importlib.import_module("h3_kernels.cuda_providers").register_all()


def tree_gemm(
    a: Tensor,
    b: Tensor,
    *,
    units: int,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    provider: str = "auto",
) -> Tensor:
    """[M, N] = a [M, K] times b [N, K] transposed, in the order ``units`` states, by the provider that ``choose``
    gives.

    a and b share a device and a dtype, bf16 or fp32 (fp32 products are never TF32). An operand with neither dimension
    contiguous is copied first. ``bias`` [N] is added in fp32 before the one rounding to ``out_dtype`` (bf16 or fp32).
    Raises InputError for operands outside this, ProviderError if no provider is legal.
    """
    _check(a, b, units, out_dtype, bias)
    if a.shape[0] == 0 or b.shape[0] == 0 or a.shape[1] == 0:
        root = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
        return reference.finish(root, bias, out_dtype)
    a, a_layout = _operand(a, "m")
    b, b_layout = _operand(b, "n")
    bias = None if bias is None else bias.contiguous()
    call = GemmCall(
        m=a.shape[0],
        n=b.shape[0],
        k=a.shape[1],
        units=units,
        a_dtype=a.dtype,
        out_dtype=out_dtype,
        a_layout=a_layout,
        b_layout=b_layout,
        has_bias=bias is not None,
        device_type=a.device.type,
        capability=capability(a.device),
    )
    run = choose(call, provider, a.device).run
    if torch.is_autocast_enabled(a.device.type):
        # It would cast the operands of a provider's own products.
        with torch.autocast(a.device.type, enabled=False):
            return run(a, b, units=units, out_dtype=out_dtype, bias=bias)
    return run(a, b, units=units, out_dtype=out_dtype, bias=bias)


def _operand(t: Tensor, across: Literal["m", "n"]) -> tuple[Tensor, Layout]:
    """The operand and its layout, copied unless its memory lies as a fresh tensor's does.

    No GEMM reads two strides above 1 or overlapping rows; and for what begins or steps off 16 bytes a library picks
    other kernels than those a probe has seen.
    """
    rows, columns = t.shape
    if t.data_ptr() % ALIGNMENT == 0:
        if t.stride(1) == 1 and _in_lines(rows, columns, t.stride(0), t.element_size()):
            return t, "k"
        if t.stride(0) == 1 and _in_lines(columns, rows, t.stride(1), t.element_size()):
            return t, across
    return t.clone(memory_format=torch.contiguous_format), "k"


def _in_lines(count: int, width: int, step: int, size: int) -> bool:
    """Whether ``count`` lines of ``width`` elements, ``step`` apart and ``size`` bytes each, are dense or aligned."""
    return count == 1 or step == width or (step > width and step * size % ALIGNMENT == 0)


@functools.cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """CUDA compute capability of a device, as ``GemmCall`` takes it; None for another kind of device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _check(a: Tensor, b: Tensor, units: int, out_dtype: torch.dtype, bias: Tensor | None) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise InputError(f"operands of shape {list(a.shape)} and {list(b.shape)}; expected [M, K] and [N, K]")
    if a.dtype != b.dtype or a.dtype not in DTYPES or out_dtype not in DTYPES:
        raise InputError(
            f"dtypes {a.dtype}, {b.dtype} -> {out_dtype}; expected one operand dtype, bf16 or fp32"
        )
    if a.device != b.device:
        raise InputError(f"operands on {a.device} and {b.device}; move them to one device")
    if units not in UNIT_COUNTS or a.shape[1] % units:
        raise InputError(f"K={a.shape[1]} in {units} units; units must be one of {UNIT_COUNTS} and divide K")
    if bias is None:
        return
    if bias.shape != (b.shape[0],) or bias.dtype not in DTYPES or bias.device != a.device:
        raise InputError(
            f"bias {list(bias.shape)} {bias.dtype} on {bias.device}; "
            f"expected [{b.shape[0]}] bf16 or fp32 on {a.device}"
        )


register(ReferenceProvider(), priority=0)
