"""Theorem: no bit depends on the state of the process: default dtype and device, autocast, tracers, modes, compiler.

Engines set these while they load and run models, and none of them reaches the arithmetic of a call.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from h3_kernels import nodes, providers, reference
from h3_kernels.audit import Auditor, sampled_rows
from h3_kernels.binding import Probe
from h3_kernels.errors import InputError
from h3_kernels.projection import projection
from h3_kernels.row_parallel import row_parallel
from h3_kernels.testing import assert_bitwise_equal, cancellation_inputs, count_differing, random_inputs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

BF16, F32 = torch.bfloat16, torch.float32


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


STATES = {
    "default dtype bf16": lambda: default_dtype(BF16),
    "default dtype fp64": lambda: default_dtype(torch.float64),
    "default device meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.float16),
    "inference mode": torch.inference_mode,
}


def attend() -> Tensor:
    x, y = random_inputs(7, 7, 16)
    q, k = x.view(7, 2, 8), y.view(7, 2, 8)
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32, device="cpu")
    return nodes.attention(q, k, q, bounds, 4, 8**-0.5)


X, WEIGHT = cancellation_inputs(5, 16, 64)
CALLS: dict[str, Callable[[], Tensor]] = {
    "compiled chain": lambda: reference.tree_gemm(X, WEIGHT, units=8, out_dtype=BF16),
    "chain in torch": lambda: reference.tree_gemm(X, WEIGHT, units=8, out_dtype=BF16, compiled=False),
    "no products": lambda: providers.tree_gemm(
        X[:, :0], WEIGHT[:, :0], units=1, out_dtype=F32, bias=WEIGHT[:, 0]
    ),
    "projection": lambda: projection(X, WEIGHT),
    "row_parallel": lambda: row_parallel(X, WEIGHT),
    "rms_norm": lambda: nodes.rms_norm(X, WEIGHT[0], 1e-5),
    "swiglu": lambda: nodes.swiglu(X, X),
    "attention": attend,
    "rope frequencies": lambda: nodes.inverse_frequencies(16),
    "timestep frequencies": lambda: nodes.sinusoid_frequencies(256),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", CALLS)
def test_no_bit_depends_on_the_state_of_the_process(name, state):
    expected = CALLS[name]()
    with STATES[state]():
        got = CALLS[name]()
    assert got.device == expected.device
    assert_bitwise_equal(got, expected)


class StockProduct:
    """A provider as cuBLAS is: torch's own product, which autocast casts."""

    name = "stock product"

    def refuses(self, call):
        return None

    def run(self, a, b, *, units, out_dtype, bias):
        return torch.mm(a, b.t())

    def probe(self, call, device):
        probed = torch.mm(torch.ones(1, 1, dtype=BF16), torch.ones(1, 1, dtype=BF16))
        return Probe(ok=probed.dtype == BF16, detail=f"gave {probed.dtype}")


def test_autocast_reaches_neither_a_provider_nor_its_probe(monkeypatch):
    monkeypatch.setattr(providers, "_registry", dict(providers._registry))
    providers.register(StockProduct(), -1)
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.mm(X, WEIGHT.t()).dtype == torch.float16, "autocast must be at work"
        y = projection(X, WEIGHT, provider="stock product")
    providers._chosen.cache_clear()
    assert_bitwise_equal(y, torch.mm(X, WEIGHT.t()))


def linear(x: Tensor) -> Tensor:
    return projection(x, WEIGHT)


def attention(x: Tensor) -> Tensor:
    q = x.view(5, 2, 32)
    return nodes.attention(q, q, q, torch.tensor([0, 5], dtype=torch.int32), 5, 32**-0.5)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("function", [linear, attention])
def test_a_traced_call_computes_the_same_on_other_values(function, grad):
    """A kernel that writes through a pointer is invisible to a tracer, and its graph would return unset memory."""
    other = random_inputs(5, 1, 64, seed=3)[0]
    with torch.set_grad_enabled(grad):
        recorded = make_fx(function)(X)
        assert_bitwise_equal(recorded(other), function(other), "make_fx")
        if function is linear:
            traced = torch.jit.trace(function, (X,), check_trace=False)
            assert_bitwise_equal(traced(other), function(other), "jit.trace")


def test_a_dispatch_mode_sees_the_op():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Watch():
        y = projection(X, WEIGHT)
    assert seen == ["h3_kernels.column_parallel.default"]
    assert_bitwise_equal(y, projection(X, WEIGHT))


def test_lazily_negated_operands_keep_their_sign():
    negated = torch._neg_view(WEIGHT)
    with torch.no_grad():
        y = projection(X, negated)
    assert_bitwise_equal(y, projection(X, -WEIGHT))
    assert count_differing(y, projection(X, WEIGHT)), "the sign must show"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor's imports
def test_a_compiled_region_rounds_between_nodes():
    """Inductor reads the unrounded value of one node in the next, where it may."""
    x, y = (t.bfloat16() for t in torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(0)))

    def two(x: Tensor, y: Tensor) -> Tensor:
        return nodes.swiglu(nodes.residual(x, y), y)

    def stock(x: Tensor, y: Tensor) -> Tensor:
        g = (x.float() + y.float()).to(BF16).float()
        return (g * torch.sigmoid(g) * y.float()).to(BF16)

    assert_bitwise_equal(torch.compile(two)(x, y), two(x, y))
    assert count_differing(torch.compile(stock)(x, y), stock(x, y)), "the compiler must be at work"


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_nodes_refuse_what_fp32_cannot_hold(dtype):
    with pytest.raises(InputError, match="computes in fp32"):
        nodes.swiglu(torch.ones(2, 4, dtype=dtype), torch.ones(2, 4, dtype=dtype))


def test_an_audit_never_reads_the_device():
    """Fake tensors have no values: whatever would wait for the device raises."""
    with FakeTensorMode():
        x = torch.zeros(70, 4, dtype=BF16)
        rows = sampled_rows(x)
        Auditor().compare(x[rows], x[rows], rows)
