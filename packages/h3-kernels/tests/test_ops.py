"""Theorem: the linears are opaque ops, so compiling, checkpointing or autocasting a model changes no bit.

Sharding its parameters is in test_collectives.py, with real ranks.
"""

import pytest
import torch
from h3_kernels import autograd
from h3_kernels.lora import lora_linear
from h3_kernels.projection import projection, projection_group
from h3_kernels.row_parallel import row_parallel
from h3_kernels.testing import assert_bitwise_equal, cancellation_inputs, count_differing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
ROWS, N, K = 10, 48, 32
OPS = torch.ops.h3_kernels


def leaves(dtype=torch.bfloat16, seed=0):
    x, weight = cancellation_inputs(ROWS, N, K, dtype=dtype, seed=seed)
    return x.requires_grad_(), weight.requires_grad_(), torch.zeros(N, dtype=dtype, requires_grad=True)


ORDER = torch.tensor([3, 1, 0, 9])
CASES = {
    "column_parallel": lambda x, w, b: (x, w, b, ORDER, [2, 0, 1], 8, 0, torch.bfloat16, "auto", ""),
    "row_parallel": lambda x, w, b: (x, w, b, None, 8, False, "auto", ""),
    "input_grad": lambda x, w, b: (x @ w.t(), w, [0], 8, False, "auto", ""),
    "weight_grad": lambda x, w, b: (x @ w.t(), x, ORDER, "auto"),
    "bias_grad": lambda x, w, b: (x, None, torch.float32, "auto"),
    "gather_rows": lambda x, w, b: (x, ROWS, ""),
    "scaled_add": lambda x, w, b: (x, x.detach().float().requires_grad_(), 0.3),
    "scale": lambda x, w, b: (x, 0.3, torch.float32),
}
DIFFERENTIABLE = ("column_parallel", "row_parallel", "scaled_add")


@pytest.mark.parametrize("name", CASES)
def test_registrations_are_complete_and_consistent(name):
    """torch.library.opcheck: schema, fake kernel against the real one, autograd registration, AOT dispatch."""
    tensors = leaves() if name in DIFFERENTIABLE else [t.detach() for t in leaves()]
    arguments = CASES[name](*tensors)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(OPS, name).default, arguments, test_utils=tests)


def model(x, weight, bias):
    """Every public linear once, with nonlinearities that a compiler likes to fuse between them."""
    hidden = projection(x, weight, bias, parts=(0, 1, 2))
    q, k, v = projection_group(x, weight.chunk(3), bias.chunk(3))
    hidden = hidden + torch.cat([q, k, v], dim=-1)
    hidden = lora_linear(x, hidden, weight[:4], weight[:, :4], 0.5)
    return row_parallel(hidden, weight.t())


def value_and_gradients(call, dtype=torch.bfloat16):
    tensors = leaves(dtype)
    y = call(*tensors)
    dy, _ = cancellation_inputs(ROWS, 1, K, dtype=dtype, seed=5)
    y.backward(dy)
    return [y.detach(), *(t.grad for t in tensors)]


def assert_same(got, expected):
    for name, a, b in zip(("y", "dx", "dw", "db")[: len(expected)], got, expected, strict=True):
        assert_bitwise_equal(a, b, name)


# Inductor keeps fp32 between fused elementwise operations, such as the sum of the gradients of an input's several uses,
# where eager rounds to bf16 each time; the option gives eager's bits back, but those of such a sum not with torch
# 2.11 (with 2.13 and 2.15 it does). The linears themselves need nothing.
COMPILERS = {
    "aot_eager": {"backend": "aot_eager"},
    "aot_eager dynamic": {"backend": "aot_eager", "dynamic": True},
    "inductor": {"backend": "inductor", "options": {"emulate_precision_casts": True}},
}


# Both warnings are torch's own: Dynamo on any autograd.Function, and Inductor's imports.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_equals_eager(compiler):
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, **COMPILERS[compiler])
    compared = 1 if compiler == "inductor" and TORCH < (2, 13) else 4
    got, expected = value_and_gradients(compiled)[:compared], value_and_gradients(model)[:compared]
    assert_same(got, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_equals_plain(reentrant):
    assert_same(
        value_and_gradients(lambda *t: checkpoint(model, *t, use_reentrant=reentrant)),
        value_and_gradients(model),
    )


def test_autocast_casts_nothing():
    def under_autocast(*tensors):
        with torch.autocast("cpu", torch.bfloat16):
            return model(*tensors)

    assert_same(value_and_gradients(under_autocast, torch.float32), value_and_gradients(model, torch.float32))


def test_modes_without_gradients_agree_with_the_op():
    tensors = leaves()
    y = model(*tensors)
    with torch.no_grad():
        assert_bitwise_equal(model(*tensors), y.detach())
    with torch.inference_mode():
        assert_bitwise_equal(model(*tensors).clone(), y.detach())
    assert not model(*(t.detach() for t in tensors)).requires_grad


class Watched(TorchDispatchMode):
    """A mode that lets everything through."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CASES)
def test_without_the_dispatcher_values_and_gradients_are_the_op_s(name, monkeypatch):
    """Without it the op is never asked; where a mode watches what torch does, it is."""
    op, direct, asked = getattr(OPS, name), getattr(autograd, name.upper()), []
    monkeypatch.setattr(direct, "_op", lambda *a: asked.append(1) or op(*a))
    trained, results = name in DIFFERENTIABLE, []
    for call in (op, direct):
        arguments = CASES[name](*(leaves() if trained else [t.detach() for t in leaves()]))
        y = call(*arguments)
        tensors = [t for t in arguments if isinstance(t, torch.Tensor) and t.requires_grad]
        results.append([y.detach(), *(torch.autograd.grad(y.float().sum(), tensors) if trained else ())])
    assert len(results[0]) == (1 if not trained else 3 if name == "scaled_add" else 4)
    for a, b in zip(*results, strict=True):
        assert_bitwise_equal(a, b, name)
    assert not asked
    with Watched():
        direct(*arguments)
    assert asked == [1]


def test_only_the_gradients_asked_for_are_computed():
    x, weight, bias = leaves()
    (dx,) = torch.autograd.grad(projection(x, weight.detach(), bias.detach()).sum(), x)
    (dw,) = torch.autograd.grad(projection(x.detach(), weight, bias.detach()).sum(), weight)
    both = torch.autograd.grad(projection(x, weight, bias).sum(), (x, weight))
    assert_same([dx, dw, dx, dw], [*both, *both])


def test_an_op_on_another_device_is_an_error():
    x, weight, _ = (t.detach() for t in leaves())
    with pytest.raises(ValueError, match="no provider runs on meta"):
        projection(x.to("meta"), weight.to("meta"))
    with pytest.raises(NotImplementedError):
        OPS.weight_grad(x.to_sparse(), x.to_sparse(), None, "auto")


def test_twin_stock_linears_differ_on_these_inputs():
    def stock(x, weight, bias):
        linear = torch.nn.functional.linear
        hidden = linear(x, weight, bias) * 2
        hidden = hidden + linear(linear(x, weight[:4]), weight[:, :4]) * 0.5
        return linear(hidden, weight.t())

    ours, theirs = value_and_gradients(model), value_and_gradients(stock)
    assert all(count_differing(a, b) for a, b in zip(ours[:3], theirs[:3], strict=True))
