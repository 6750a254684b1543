"""Wrong orders, so that a test can prove it would notice, and a probe that names the order of an unknown product.

A negative twin is a sum a plausible implementation might compute instead of the contract's. Tests assert that the
contract and the twin differ on the inputs they use; otherwise equality on those inputs would prove nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from h3_kernels.contract import UNITS, unit_bounds
from h3_kernels.reference import fold_tree, unit_partials

Fold = Callable[[Tensor], Tensor]


def left_fold(partials: Tensor) -> Tensor:
    """((u0 + u1) + u2) + ...: what a loop over units, or a ring all-reduce, computes. [U, ...] -> [...] fp32."""
    total = partials[0].clone()
    for partial in partials[1:]:
        total += partial
    return total


def reversed_fold(partials: Tensor) -> Tensor:
    """Left fold from the last unit down."""
    return left_fold(partials.flip(0))


def strided_tree(partials: Tensor) -> Tensor:
    """Tree of units half the count apart, (u0 + u4) + ...: what a shuffle-down reduction computes."""
    while partials.shape[0] > 1:
        half = partials.shape[0] // 2
        partials = partials[:half] + partials[half:]
    return partials[0]


def rounded_tree(partials: Tensor) -> Tensor:
    """The canonical tree over partials rounded to bf16: what ranks that exchange bf16 tensors compute."""
    return fold_tree(partials.bfloat16().float())


def swapped_units(partials: Tensor) -> Tensor:
    """The canonical tree with units 1 and 2 exchanged: two ranks in the wrong place."""
    order = list(range(partials.shape[0]))
    order[1], order[2] = order[2], order[1]
    return fold_tree(partials[order])


NEGATIVE_FOLDS: Mapping[str, Fold] = {
    "left fold": left_fold,
    "reversed fold": reversed_fold,
    "strided tree": strided_tree,
    "tree of bf16 partials": rounded_tree,
    "tree with two units swapped": swapped_units,
}
"""Wrong ways to add the partials of 4 or 8 units, by name."""


def twin_gemm(a: Tensor, b: Tensor, fold: Fold, *, units: int, out_dtype: torch.dtype) -> Tensor:
    """[M, N] of CPU operands a [M, K] and b [N, K] with the contract's units and another ``fold``."""
    return fold(unit_partials(a, b, units)).to(out_dtype)


def split_k_gemm(a: Tensor, b: Tensor, *, splits: int, out_dtype: torch.dtype) -> Tensor:
    """Twin of the chain: K in ``splits`` parts whose fp32 sums are added left to right, as a split-K GEMM does."""
    return twin_gemm(a, b, left_fold, units=splits, out_dtype=out_dtype)


@dataclass(frozen=True, slots=True)
class OrderProbe:
    """Operands x [256, K] and weight [1, K] whose unit sums are exact on any device, and the result of each order."""

    x: Tensor
    weight: Tensor
    expected: Mapping[str, Tensor]

    def identify(self, y: Tensor) -> str:
        """Name of the order that gives y [256, 1], or "unknown"; y is fp32 or bf16."""
        got = y.detach().cpu()
        matches = [name for name, root in self.expected.items() if torch.equal(root.to(got.dtype), got)]
        return matches[0] if matches else "unknown"


def order_probe(k: int, *, units: int = UNITS, device: str = "cpu", seed: int = 0) -> OrderProbe:
    """A probe for products over K in ``units`` (4 or 8) units.

    Each unit holds one non-zero product, a bf16 number, so its chain is exact in any hardware and the result depends
    on the tree alone. Three partials in four cancel in pairs of units chosen per row, so that orders differ in most
    rows.
    """
    generator, rows = torch.Generator("cpu").manual_seed(seed), 256
    stated: Any = {"generator": generator, "device": "cpu", "dtype": torch.float32}
    partials = torch.randn(rows, units, **stated)
    large = torch.randn(rows, units // 2, **stated).bfloat16().float() * 2.0**20
    shuffled = torch.rand(rows, units, **stated).argsort(dim=1)
    for pair in range(3 * units // 8):
        partials.scatter_(1, shuffled[:, 2 * pair : 2 * pair + 1], large[:, pair : pair + 1])
        partials.scatter_(1, shuffled[:, 2 * pair + 1 : 2 * pair + 2], -large[:, pair : pair + 1])
    partials = partials.bfloat16().float()
    x = torch.zeros(rows, k, device="cpu", dtype=torch.float32)
    x[:, [(start + stop) // 2 for start, stop in unit_bounds(k, units)]] = partials
    leaves = partials.t().unsqueeze(2)
    # Leaves are bf16 numbers already, so rounding them first is no other order.
    folds = {"canonical tree": fold_tree} | {n: f for n, f in NEGATIVE_FOLDS.items() if f is not rounded_tree}
    expected = {name: fold(leaves) for name, fold in folds.items()}
    bf16 = torch.bfloat16
    return OrderProbe(x.to(device, bf16), torch.ones(1, k, device=device, dtype=bf16), expected)
