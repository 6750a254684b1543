"""The additions of a collective: the canonical tree over roots in memory, the bias, one rounding."""

import torch
from torch import Tensor

from h3_kernels.reference import finish

_KERNEL_DTYPES = (torch.float32, torch.bfloat16)


def fold(partials: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """``out`` [T, N] = tree over contiguous fp32 ``partials`` [ranks, T, N], plus ``bias`` [N] in fp32, rounded once.

    Returns ``out``. ``partials`` may be overwritten. On CUDA one kernel reads every root once; torch's additions read
    and write intermediate sums again, 2.5 times the bytes at 8 ranks.
    """
    if out.numel() == 0:
        return out
    if not partials.is_cuda or out.dtype not in _KERNEL_DTYPES:
        return out.copy_(finish(_fold_in_place(partials), bias, out.dtype))
    from h3_kernels.fused import tree_reduce

    if bias is not None:
        bias = (bias if bias.dtype in _KERNEL_DTYPES else bias.float()).contiguous()
    with torch.cuda.device(partials.device):
        tree_reduce(partials, out, bias)
    return out


def _fold_in_place(partials: Tensor) -> Tensor:
    """``fold_tree`` of memory nobody else reads: no second copy of the roots."""
    while partials.shape[0] > 1:
        partials = partials[0::2].add_(partials[1::2])
    return partials[0]
