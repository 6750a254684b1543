"""The contracts on the CPU, and the fp64 truth they are judged against.

One product at a time, k ascending: ``product = fp32(a * b)`` (exact for bf16 operands), ``acc = fp32(acc +
product)``, never fused. Every step is an elementwise operation over [M, N], so no bit of an element can depend on M,
N, its position, its neighbours or the number of threads. ``cpu_chain`` runs the same order compiled; both give the
same bits.

CPU and GPU bits are not promised to be equal to each other: a GPU adds 16 products per step inside the tensor core.
"""

import torch
from torch import Tensor

from h3_kernels import cpu_chain
from h3_kernels.contract import unit_bounds

# The accumulator and the product of one block stay in a 1 MiB L2 cache.
_BLOCK_ELEMENTS = 1 << 16


def tree_gemm(
    a: Tensor,
    b: Tensor,
    *,
    units: int,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    compiled: bool = True,
) -> Tensor:
    """[M, N] product of a [M, K] and b [N, K], both bf16 or fp32, any strides, on the CPU.

    K is cut into ``units`` equal chains, the canonical fp32 tree adds them, ``bias`` [N] is added in fp32 at the
    root, and the root is rounded once to ``out_dtype``. ``compiled=False`` keeps to torch operations.
    """
    kernel = cpu_chain.load() if compiled and not traced() else None
    root = fold_tree(unit_partials(a, b, units)) if kernel is None else kernel(a, b, units)
    return finish(root, bias, out_dtype)


def traced() -> bool:
    """Whether a tracer or a dispatch mode records what torch does: it sees no kernel that writes through a pointer."""
    return torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack() > 0


def finish(root: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Add ``bias`` [N] to the fp32 ``root`` [M, N] in fp32 and round once, to nearest even, to ``out_dtype``."""
    if bias is not None:
        root = root + bias.float()
    return root.to(out_dtype)


def unit_partials(a: Tensor, b: Tensor, units: int) -> Tensor:
    """fp32 partials [units, M, N]: one chain per unit, in torch operations."""
    m, k, n = a.shape[0], a.shape[1], b.shape[0]
    # Device and dtype are stated: the process may have others as defaults (engines set them while they load).
    partials = torch.zeros(units, m, n, dtype=torch.float32, device="cpu")
    if k == 0:
        return partials
    a_KM = a.float().t().contiguous()
    b_KN = b.float().t().contiguous()
    width = max(1, _BLOCK_ELEMENTS // max(m, 1))
    for unit, (start, stop) in enumerate(unit_bounds(k, units)):
        for left in range(0, n, width):
            _chain_into(
                partials[unit, :, left : left + width],
                a_KM[start:stop],
                b_KN[start:stop, left : left + width],
            )
    return partials


def _chain_into(acc: Tensor, a_KM: Tensor, b_KN: Tensor) -> None:
    """acc [M, N] += a_KM^T b_KN, one rounded product and one rounded addition per k, in ascending k."""
    block = acc.contiguous()
    product = torch.empty_like(block)
    for a_M, b_N in zip(a_KM.unsqueeze(2).unbind(), b_KN.unbind(), strict=True):
        torch.mul(a_M, b_N, out=product)
        block.add_(product)
    acc.copy_(block)


def fold_tree(partials: Tensor) -> Tensor:
    """fp32 sum of [U, ...] over its first dimension in canonical tree order; U is a power of two. Not in place."""
    while partials.shape[0] > 1:
        partials = partials[0::2] + partials[1::2]
    return partials[0]


def truth(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """fp64 product [M, N] of a [M, K] and b [N, K] plus bias: what errors are measured against."""
    product = a.double() @ b.double().t()
    return product if bias is None else product + bias.double()
