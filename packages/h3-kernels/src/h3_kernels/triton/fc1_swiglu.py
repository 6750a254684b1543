"""fc1 and SwiGLU in one kernel, for Hopper, with the bits of `triton.gemm`'s chain followed by `triton.swiglu`.

The weight [2 F, K] is read as [2, F, K]: a block of 2 x 128 x 64 lies in shared memory as one of 256 x 64, so that one
``wgmma`` of 256 columns holds gate and value of the same 128 features, and a thread both of each. Order per element:
that of `triton.gemm` (ascending 16-wide steps of one chain, one rounding to bf16), then that of `triton.swiglu`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from h3_kernels import tuning
from h3_kernels.triton.gemm import processors
from h3_kernels.triton.rows import launcher
from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from h3_kernels.tuning import Tile
    from torch import Tensor


@triton.jit
def fc1_swiglu_kernel(
    x, weight, y, M, F, K, BM: tl.constexpr, BF: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
    PROGRAMS: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """y [M, F] of x [M, K] and weight [2, F, K], in tiles of BM x BF, in bands of BAND tile rows.

    The grid must hold exactly PROGRAMS programs: each takes every PROGRAMS-th tile.
    """
    tiles_m = tl.cdiv(M, BM)
    tiles_f = tl.cdiv(F, BF)
    steps = tl.cdiv(K, BK)
    band_tiles = BAND * tiles_f
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_f, PROGRAMS, flatten=True):
        top = tile // band_tiles * BAND
        height = min(tiles_m - top, BAND)
        m = (top + tile % band_tiles % height) * BM
        f = tile % band_tiles // height * BF
        acc = tl.zeros((BM, 2 * BF), tl.float32)
        for step in range(steps):
            a = x.load([m, step * BK])
            b = weight.load([0, f, step * BK]).reshape(2 * BF, BK)
            acc = tl.dot(a, b.T, acc)
        first, second = acc.reshape(BM, 2, BF).permute(0, 2, 1).split()
        first = first.to(y.dtype).to(tl.float32)
        second = second.to(y.dtype).to(tl.float32)
        if GATE_FIRST:
            gate, value = first, second
        else:
            gate, value = second, first
        s = 1.0 / (1.0 + tl.exp(-gate))
        y.store([m, f], (gate * s * value).to(y.dtype))


@launcher
def launch(x: Tensor, weight: Tensor, *, gate_first: bool, tile: Tile = tuning.FC1_SWIGLU) -> Tensor:
    """y [T, F] of x [T, K] and weight [2 F, K], bf16, contiguous, K and F multiples of 8."""
    (rows, k), features = x.shape, weight.shape[0] // 2
    y = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y

    def described(t: Tensor, *block: int) -> Any:
        return TensorDescriptor.from_tensor(t, list(block))

    programs = processors(x.device)
    fc1_swiglu_kernel[(programs,)](
        described(x, tile.m, tile.k), described(weight.view(2, features, k), 2, tile.n, tile.k),
        described(y, tile.m, tile.n), rows, features, k,
        BM=tile.m, BF=tile.n, BK=tile.k, BAND=tile.band, PROGRAMS=programs, GATE_FIRST=gate_first,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return y
