"""column_blocks: the outputs of a fused linear as views, and their gradients as one tensor."""

from __future__ import annotations

import pytest
import torch
from h3_kernels import nodes
from h3_kernels.errors import InputError
from h3_kernels.nodes.packing import _side_by_side
from h3_kernels.testing import assert_bitwise_equal


def test_blocks_are_views_and_the_gradient_is_that_of_slices() -> None:
    x = torch.randn(5, 12, requires_grad=True)
    weights = torch.randn(3, 5, 4)
    blocks = nodes.column_blocks(x, 3)
    assert all(b.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for b in blocks)
    (found,) = torch.autograd.grad(sum((b * w).sum() for b, w in zip(blocks, weights, strict=True)), x)
    slices = [x[:, i : i + 4] for i in (0, 4, 8)]
    (expected,) = torch.autograd.grad(sum((b * w).sum() for b, w in zip(slices, weights, strict=True)), x)
    assert_bitwise_equal(found, expected)


def test_an_unused_block_has_a_zero_gradient() -> None:
    x = torch.randn(5, 8, requires_grad=True)
    (found,) = torch.autograd.grad(nodes.column_blocks(x, 2)[1].sum(), x)
    assert_bitwise_equal(found, torch.cat([torch.zeros(5, 4), torch.ones(5, 4)], dim=1))


def test_without_gradients_blocks_are_plain_views() -> None:
    x = torch.randn(5, 8)
    assert nodes.column_blocks(x, 1)[0] is x
    assert all(b.grad_fn is None for b in nodes.column_blocks(x, 2))
    with pytest.raises(InputError, match=r"\[5, 8\] into 3 blocks"):
        nodes.column_blocks(x, 3)


def test_blocks_side_by_side_are_joined_without_a_copy() -> None:
    whole = torch.randn(5, 12)
    joined = _side_by_side(whole.chunk(3, dim=1))
    assert joined.data_ptr() == whole.data_ptr()
    assert_bitwise_equal(joined, whole)


@pytest.mark.parametrize(
    "blocks",
    [
        tuple(torch.randn(5, 8).chunk(2, dim=1)[::-1]),
        tuple(torch.randn(5, 16).chunk(4, dim=1)[:2]),
        (torch.randn(5, 4), torch.randn(5, 4)),
        (torch.randn(1, 1).expand(5, 4), torch.randn(5, 4)),
        tuple(torch.randn(10, 4).chunk(2, dim=0)),
    ],
    ids=["swapped", "of a wider tensor", "apart", "expanded", "stacked"],
)
def test_other_blocks_are_concatenated(blocks: tuple[torch.Tensor, ...]) -> None:
    """Negative twins: what only looks adjacent is not taken for one tensor."""
    assert_bitwise_equal(_side_by_side(blocks), torch.cat(blocks, dim=1))
