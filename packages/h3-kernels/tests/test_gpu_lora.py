"""On a GPU the LoRA term is one pass over its output, with the bits of the product and the addition apart."""

from __future__ import annotations

import pytest
import torch
from h3_kernels import lora, lora_expand
from h3_kernels.lora import lora_linear
from h3_kernels.testing import assert_bitwise_equal, count_differing, random_inputs
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDTHS = {"qkv": (7168, 5376), "out_proj": (5376, 7168), "fc1": (28672, 5376), "ragged": (1000, 256)}


def term(scaling: float, name: str, rows: int, rank: int) -> list[Tensor]:
    """y, dx, d base, dA and dB of a strided base."""
    n, k = WIDTHS[name]
    x, a = random_inputs(rows, rank, k, device="cuda", seed=1)
    wide, b = (
        random_inputs(rows, n, 2 * n, device="cuda", seed=2)[0],
        random_inputs(n, 1, rank, device="cuda")[0],
    )
    dy = random_inputs(rows, 1, n, device="cuda", seed=3)[0]
    leaves = [t.requires_grad_() for t in (x, wide[:, n:].detach(), a, b)]
    y = lora_linear(*leaves, scaling)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("rows", [1, 70, 333])
@pytest.mark.parametrize("name", WIDTHS)
def test_one_pass_has_the_bits_of_product_and_addition(
    name: str, rows: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = []
    stock = lora_expand.served
    monkeypatch.setattr(lora, "served", lambda *x: served.append(stock(*x)) or served[-1])
    one = term(2.0, name, rows, rank)
    assert served == [True]
    monkeypatch.setattr(lora, "served", lambda *_: False)
    for found, expected in zip(one, term(2.0, name, rows, rank), strict=True):
        assert_bitwise_equal(found, expected)


def test_twin_a_rounded_term_has_other_bits() -> None:
    x, b = random_inputs(333, 7168, 64, device="cuda")
    base = random_inputs(333, 1, 7168, device="cuda", seed=1)[0]
    fused = lora_expand.expand(base, x, b, None, 8, "auto", "")
    assert count_differing(fused, base + x @ b.t()) > base.numel() // 20


def test_other_scales_and_ranks_take_the_long_way() -> None:
    base = random_inputs(4, 1, 256, device="cuda")[0]
    h, b = random_inputs(4, 256, 64, device="cuda")
    assert lora_expand.served(base, h, b, 0.5)
    assert not lora_expand.served(base, h, b, 0.3)
    assert not lora_expand.served(base, h[:, :24], b[:, :24], 0.5)
