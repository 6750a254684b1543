"""The providers that run on a CUDA device; registered when the first CUDA operand arrives (providers.py).

The chain by one plain Triton tile defines the bits of a device. Every provider, Triton's tuned tiles included, proves
on that device, once per call, that it gives the same bits on random and on cancellation inputs, or is refused.
"""

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from h3_kernels import tuning
from h3_kernels.binding import Probe
from h3_kernels.fused import FusedGemm, fma_gemm, fma_refuses, tree_reduce
from h3_kernels.providers import GemmCall, Unproven, register

BMM_SCRATCH = 256 << 20
"""Bytes of unit partials ``bmm-tree`` holds at once. 16 MB would be 97 rows of out_proj: every chunk reads the whole
weight again, 4 times stock at 925 rows. 256 MB hold 1560 rows."""


class TritonProvider:
    """The portable kernel (triton/gemm.py); any bf16 or fp32 operands on CUDA."""

    name = "triton"

    def refuses(self, call: GemmCall) -> str | None:
        """Only what is not on a CUDA device."""
        return _elsewhere(call)

    def run(self, a: Tensor, b: Tensor, *, units: int, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        """See ``h3_kernels.triton.gemm.gemm``."""
        from h3_kernels.triton.gemm import gemm

        dtypes = {"fp32": a.dtype == torch.float32, "fp32_result": out_dtype == torch.float32}
        tile = tuning.triton_tile(a.shape[0], b.shape[0], units, **dtypes)
        with torch.cuda.device(a.device):
            return gemm(a, b, units=units, out_dtype=out_dtype, bias=bias, tile=tile)

    def probe(self, call: GemmCall, device: torch.device) -> Probe:
        """Compare the tuned tile with the plain one that defines the device's bits."""
        return _probe(self.run, call, device)


def plain(a: Tensor, b: Tensor, *, units: int, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """The chain and tree by one small, unpersistent Triton tile: what every provider is compared with."""
    from h3_kernels.triton.gemm import gemm

    with torch.cuda.device(a.device):
        return gemm(a, b, units=units, out_dtype=out_dtype, bias=bias, tile=tuning.TRITON_PLAIN)


class CublasLtProvider:
    """cuBLASLt with split-K off: one chain per element. Torch's matmul settings change for the call alone."""

    name = "cublaslt"

    def refuses(self, call: GemmCall) -> str | None:
        """Trees, and dtypes other than bf16 in and out."""
        if call.units != 1:
            return f"computes one chain, the call has {call.units} units"
        if call.a_dtype != torch.bfloat16 or call.out_dtype != torch.bfloat16:
            return f"multiplies bf16 to bf16, the call is {call.a_dtype} to {call.out_dtype}"
        return _elsewhere(call)

    def run(self, a: Tensor, b: Tensor, *, units: int, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        """a times b transposed by ``torch.mm``; operands with gaps between rows are copied (see ``packed``).

        A bf16 bias by ``torch.addmm``, whose epilogue adds it to the fp32 chain; one of another dtype by Triton.
        """
        a, b = packed(a), packed(b)
        if bias is not None and bias.dtype != torch.bfloat16:
            return TritonProvider().run(a, b, units=units, out_dtype=out_dtype, bias=bias)
        with no_split_k():
            return torch.mm(a, b.t()) if bias is None else torch.addmm(bias, a, b.t())

    def probe(self, call: GemmCall, device: torch.device) -> Probe:
        """Compare with the Triton chain: cuBLASLt picks a kernel per shape, so each shape is proven."""
        return _probe(self.run, call, device)


class FmaProvider:
    """fp32 operands by the CUDA extension: chains of fused multiply-adds (csrc/fma_gemm.cu)."""

    name = "fma"

    def refuses(self, call: GemmCall) -> str | None:
        """Trees, dtypes other than fp32 in and out, transposed operands; a missing nvcc is a reason too."""
        if call.units != 1:
            return f"computes one chain, the call has {call.units} units"
        if call.a_dtype != torch.float32 or call.out_dtype != torch.float32:
            return f"multiplies fp32 to fp32, the call is {call.a_dtype} to {call.out_dtype}"
        if (call.a_layout, call.b_layout) != ("k", "k"):
            return f"reads rows along K, the operands lie along {call.a_layout} and {call.b_layout}"
        return _elsewhere(call) or fma_refuses(call.capability)

    def run(self, a: Tensor, b: Tensor, *, units: int, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        """See ``h3_kernels.fused.fma_gemm``; a bias of another dtype by Triton."""
        if bias is not None and bias.dtype != torch.float32:
            return TritonProvider().run(a, b, units=units, out_dtype=out_dtype, bias=bias)
        return fma_gemm(a, b, bias)

    def probe(self, call: GemmCall, device: torch.device) -> Probe:
        """Compare with the Triton chain."""
        return _probe(self.run, call, device)


class BmmTreeProvider:
    """One batched cuBLAS product over the units into fp32 partials, then the tree kernel."""

    name = "bmm-tree"

    def refuses(self, call: GemmCall) -> str | None:
        """Single chains and fp32 operands."""
        if call.units == 1:
            return "computes trees, the call is one chain"
        if call.a_dtype != torch.bfloat16:
            return f"multiplies bf16, the operands are {call.a_dtype}"
        return _elsewhere(call)

    def run(self, a: Tensor, b: Tensor, *, units: int, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        """Rows in chunks of BMM_SCRATCH bytes of partials; operands with gaps are copied (see ``packed``)."""
        a, b = packed(a), packed(b)
        (m, _), n = a.shape, b.shape[0]
        rows = max(1, BMM_SCRATCH // (4 * units * n))
        b_UKN = _by_unit(b, units).transpose(1, 2)
        y = torch.empty(m, n, dtype=out_dtype, device=a.device)
        with torch.cuda.device(a.device), no_split_k():
            for start in range(0, m, rows):
                partials = torch.bmm(_by_unit(a[start : start + rows], units), b_UKN, out_dtype=torch.float32)
                tree_reduce(partials, y[start : start + rows], bias)
        return y

    def probe(self, call: GemmCall, device: torch.device) -> Probe:
        """Compare with the Triton units and tree: cuBLAS picks a kernel per shape, so each shape is proven."""
        return _probe(self.run, call, device)


class FusedSm90Provider:
    """The CUDA extension's GEMM with the tree inside (csrc/tree_gemm_sm90.cuh), on compute capability 9.0."""

    name = "fused-sm90"

    def __init__(self) -> None:
        self._gemm = FusedGemm()

    def refuses(self, call: GemmCall) -> str | None:
        """Other devices, fp32 operands, and shapes no configuration covers; a missing nvcc is a reason too."""
        if call.capability != (9, 0):
            return f"is written for compute capability 9.0, the device has {call.capability}"
        if call.a_dtype != torch.bfloat16:
            return f"multiplies bf16, the operands are {call.a_dtype}"
        return _elsewhere(call) or self._gemm.refuses(call)

    def run(self, a: Tensor, b: Tensor, *, units: int, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        """One launch; scratch of at most ``tuning.SCRATCH_LIMIT`` bytes a stream."""
        return self._gemm.run(a, b, units=units, out_dtype=out_dtype, bias=bias)

    def probe(self, call: GemmCall, device: torch.device) -> Probe:
        """Compare with the Triton chain and tree."""
        return _probe(self.run, call, device)


def register_all() -> None:
    """Offer the CUDA providers; tuning.py ranks them per call."""
    providers = (TritonProvider(), CublasLtProvider(), FmaProvider(), BmmTreeProvider(), FusedSm90Provider())
    for provider in providers:
        register(provider, functools.partial(_rank, provider.name))


def _rank(name: str, call: GemmCall) -> int:
    return tuning.rank(name, call.m, call.n, call.k, call.units)


def _elsewhere(call: GemmCall) -> str | None:
    return None if call.device_type == "cuda" else f"runs on CUDA, the operands are on {call.device_type}"


def _by_unit(t: Tensor, units: int) -> Tensor:
    """[units, rows, K / units] view of [rows, K]."""
    rows, k = t.shape
    width = k // units
    return t.as_strided((units, rows, width), (width * t.stride(1), t.stride(0), t.stride(1)))


def packed(t: Tensor) -> Tensor:
    """[rows, K] without gaps, in the same order of dimensions: cuBLAS picks its kernel by the leading dimension too,
    and a probe proves the one of packed operands."""
    if t.is_contiguous() or t.t().is_contiguous():
        return t
    return t.contiguous() if t.stride(1) == 1 else t.t().contiguous().t()


# torch calls the setting below experimental, once a process; inside an autograd function it says so only after the
# function returned, where no catch_warnings of ours reaches.
warnings.filterwarnings("ignore", message=".*preferred_blas_library is an experimental feature")

_SETTINGS = threading.Lock()
"""Held while the process's matmul settings are ours: two threads (autograd has one a device) that saved and restored
them at once could leave split-K on under the other's product."""


@contextmanager
def no_split_k() -> Iterator[None]:
    """cuBLASLt, and no split-K for bf16, until the block ends; the process's own settings return then.

    These are settings of the process: a bf16 product that another thread launches meanwhile runs without split-K too.
    One thread at a time is inside.
    """
    with _SETTINGS:
        yield from _without_split_k()


def _without_split_k() -> Iterator[None]:
    matmul, blas = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library
    library = blas()
    reduction = torch._C._get_cublas_allow_bf16_reduced_precision_reduction()  # (allowed, split-K allowed)
    blas("cublaslt")
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = reduction
        blas(library)


Run = Callable[..., Tensor]


def _probe(run: Run, call: GemmCall, device: torch.device) -> Probe:
    """Raises Unproven during a graph capture and where memory is short."""

    def product(how: Run, a: Tensor, b: Tensor) -> Tensor:
        bias = None
        if call.has_bias:
            generator = torch.Generator(device).manual_seed(call.n)
            bias = torch.randn(call.n, generator=generator, device=device).to(call.a_dtype)
        return how(a, b, units=call.units, out_dtype=call.out_dtype, bias=bias)

    return prove(
        functools.partial(product, run),
        functools.partial(product, plain),
        call,
        device,
        what="the plain chain",
    )


def prove(
    run: Callable[[Tensor, Tensor], Tensor],
    expected: Callable[[Tensor, Tensor], Tensor],
    call: GemmCall,
    device: torch.device,
    *,
    what: str,
) -> Probe:
    """Compare the bits of ``run(a, b)`` with ``expected(a, b)``, which ``what`` names, on the operands of ``call``.

    Raises Unproven during a graph capture and where memory is short.
    """
    if torch.cuda.is_current_stream_capturing():
        raise Unproven("cannot be proven during a graph capture: run this shape once before it")
    needed, free = _probe_bytes(call), _free_bytes(device)
    if needed > free:
        raise Unproven(f"a probe of this shape takes {needed} bytes of memory, {free} are free")
    compared = 0
    try:
        for kind in ("random", "cancellation"):
            a, b = _probe_inputs(call, device, cancel=kind == "cancellation")
            got, wanted = run(a, b), expected(a, b)
            integer = torch.int16 if call.out_dtype == torch.bfloat16 else torch.int32
            different = int((got.view(integer) != wanted.view(integer)).sum())
            if different:
                return Probe(ok=False, detail=f"{different} of {got.numel()} values differ on {kind} inputs")
            compared += got.numel()
    except torch.cuda.OutOfMemoryError as error:
        raise Unproven("not enough free memory to prove this shape") from error
    detail = f"equals {what} on {compared} values of random and cancellation inputs"
    return Probe(ok=True, detail=detail, compared=compared)


def _probe_bytes(call: GemmCall) -> int:
    """Least memory a probe takes: operands, both results, and the plain chain's unit partials. Known before anything is
    allocated, because an allocation that fails first empties torch's cache."""
    operands = (call.m + call.n) * call.k * call.a_dtype.itemsize
    results = 2 * call.m * call.n * call.out_dtype.itemsize
    return operands + results + (4 * call.units * call.m * call.n if call.units > 1 else 0)


def _free_bytes(device: torch.device) -> int:
    """Memory that allocations may take: what the device has free, and what torch has cached."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def _probe_inputs(call: GemmCall, device: torch.device, *, cancel: bool) -> tuple[Tensor, Tensor]:
    """a [m, k] and b [n, k] in the call's layouts. Cancelling: the second half of K repeats the first with a's sign
    flipped and small differences, so that what is left shows the order of the sum."""
    generator = torch.Generator(device).manual_seed(call.k)

    def operand(rows: int, across: bool) -> Tensor:
        shape = (call.k, rows) if across else (rows, call.k)
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).to(call.a_dtype)
        return values.t() if across else values

    a, b = operand(call.m, call.a_layout != "k"), operand(call.n, call.b_layout != "k")
    half = call.k // 2
    if cancel and half:
        a[:, half : 2 * half] = -a[:, :half]
        b[:, half : 2 * half] = b[:, :half] * (1 + 2.0**-6)
    return a, b
