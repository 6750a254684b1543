"""The CUDA kernels of SiLU and of the angle tables in Triton's interpreter: the bits of the CPU's written order.

Run by test_nodes_elementary.py in a process of its own with TRITON_INTERPRET=1, because the interpreter is chosen when
a kernel is defined.
"""

from __future__ import annotations

import pytest
import torch
from h3_kernels import nodes
from h3_kernels.testing import assert_bitwise_equal, count_differing
from h3_kernels.triton import elementary

# The interpreter's numpy warns where a cast gives infinity and where -inf * 0 gives NaN; both are the answer.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning"),
]


def spread(*shape: int, scale: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_silu_and_its_gradient(scale):
    x, dy = spread(3, 501, scale=scale).requires_grad_(), spread(3, 501, scale=1.0, seed=1)
    y = nodes.silu(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert_bitwise_equal(elementary.launch_silu(x.detach()), y.detach())
    assert_bitwise_equal(elementary.launch_silu_backward(dy, x.detach(), needs=(True,))[0], dx)


def test_silu_at_the_ends_of_its_range():
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 88.73, -88.73, 1e-40])
    found, expected = elementary.launch_silu(x), nodes.silu(x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert_bitwise_equal(found[~found.isnan()], expected[~expected.isnan()])


@pytest.mark.parametrize(("axes", "count"), [(3, 16), (1, 128)])
def test_angle_tables(axes, count):
    values, frequencies = (
        spread(37, axes, scale=300.0),
        torch.rand(count, generator=torch.Generator().manual_seed(2)),
    )
    found = elementary.launch_angle_table(values, frequencies, dtype=torch.float32)
    assert_bitwise_equal(found, nodes.angle_table(values, frequencies, torch.float32))


def test_a_polynomial_of_one_degree_less_is_caught():
    """Negative twin: the comparison above sees the last coefficient of exp."""
    x = spread(3, 501, scale=5.0)
    kept, elementary.EXP = elementary.EXP, elementary.tl.constexpr((*elementary.written._EXP[:7], *[0.0] * 6))
    try:
        assert count_differing(elementary.launch_silu(x), nodes.silu(x)) > 0
    finally:
        elementary.EXP = kept
