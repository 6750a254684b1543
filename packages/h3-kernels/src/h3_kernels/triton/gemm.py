"""The portable GEMM: one fixed-order chain per output element and unit, on any GPU Triton compiles for.

A program owns one tile of one unit and walks that unit's K range in ascending blocks; inside a block ``tl.dot`` issues
ascending 16-wide tensor-core steps into one fp32 accumulator. Tile shape, warps and stages therefore never change bits
(docs/measured-facts.md; tests/test_gpu_gemm.py proves it), and tuning.py is free to choose them. fp32 operands use
``input_precision="ieee"``: fused multiply-adds in ascending k, never TF32.

bf16 tiles have at least 64 rows and 4 warps: below that Triton would leave ``wgmma`` for an older instruction, whose
order inside a step is another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from h3_kernels.triton.tree import tree_reduce
from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from h3_kernels.tuning import Tile
    from torch import Tensor


@triton.jit
def load_block(source, row, column, rows, k_end, stride, R: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr,
               TRANSPOSED: tl.constexpr):  # fmt: skip
    """[R, BK] block of an operand at (row, k = column); zero outside. TRANSPOSED: stored [K, rows]."""
    if TMA:
        if TRANSPOSED:
            block = source.load([column, row]).T
        else:
            block = source.load([row, column])
    else:
        r = row + tl.arange(0, R)
        k = column + tl.arange(0, BK)
        inside = (r[:, None] < rows) & (k[None, :] < k_end)
        if TRANSPOSED:
            offsets = k[None, :].to(tl.int64) * stride + r[:, None]
        else:
            offsets = r[:, None].to(tl.int64) * stride + k[None, :]
        block = tl.load(source + offsets, mask=inside, other=0.0)
    return block


@triton.jit
def walk_tiles(
    a, b, y, bias, M, N, K, a_stride, b_stride, n_first, n_last,
    UNITS: tl.constexpr, TMA: tl.constexpr, A_T: tl.constexpr, B_T: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr, PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    """Columns [n_first, n_last) in tiles of BM x BN, in bands of BAND tile rows, unit by unit.

    With PROGRAMS > 0 the grid must hold exactly that many programs: each takes every PROGRAMS-th tile.
    """
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(n_last - n_first, BN)
    tiles = tiles_m * tiles_n
    unit_k = K // UNITS
    steps = tl.cdiv(unit_k, BK)
    band_tiles = BAND * tiles_n
    for work in tl.range(
        tl.program_id(0), tiles * UNITS, PROGRAMS if PROGRAMS > 0 else tiles * UNITS, flatten=FLATTEN
    ):
        unit = work // tiles
        tile = work % tiles
        first = tile // band_tiles * BAND
        height = min(tiles_m - first, BAND)
        m = (first + tile % band_tiles % height) * BM
        n = n_first + tile % band_tiles // height * BN
        k0 = unit * unit_k
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(steps):
            k = k0 + step * BK
            a_block = load_block(a, m, k, M, k0 + unit_k, a_stride, BM, BK, TMA, A_T)
            b_block = load_block(b, n, k, N, k0 + unit_k, b_stride, BN, BK, TMA, B_T)
            acc = tl.dot(a_block, b_block.T, acc, input_precision="ieee")
        columns = n + tl.arange(0, BN)
        if BIAS:
            acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        if TMA and UNITS == 1:
            y.store([m, n], acc.to(y.dtype))
        else:
            rows = m + tl.arange(0, BM)
            offsets = (unit.to(tl.int64) * M + rows[:, None]) * N + columns[None, :]
            tl.store(
                y + offsets, acc.to(y.dtype.element_ty), mask=(rows[:, None] < M) & (columns[None, :] < N)
            )


@triton.jit
def gemm_kernel(
    a, b, y, b_tail, y_tail, bias, M, N, K, a_stride, b_stride, n_tail,
    UNITS: tl.constexpr, TMA: tl.constexpr, A_T: tl.constexpr, B_T: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TAIL: tl.constexpr, BAND: tl.constexpr,
    PROGRAMS: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """y [M, N], or fp32 partials [UNITS, M, N]. Columns from n_tail on go in narrower tiles, TAIL columns wide."""
    walk_tiles(
        a, b, y, bias, M, N, K, a_stride, b_stride, 0, n_tail,
        UNITS, TMA, A_T, B_T, BIAS, BM, BN, BK, BAND, PROGRAMS, FLATTEN,
    )  # fmt: skip
    if TAIL > 0:
        walk_tiles(
            a, b_tail, y_tail, bias, M, N, K, a_stride, b_stride, n_tail, N,
            UNITS, TMA, A_T, B_T, BIAS, BM, TAIL, BK, BAND, PROGRAMS, FLATTEN,
        )  # fmt: skip


def gemm(
    a: Tensor, b: Tensor, *, units: int, out_dtype: torch.dtype, bias: Tensor | None, tile: Tile
) -> Tensor:
    """[M, N] = a [M, K] times b [N, K] transposed: ``units`` chains per element, the canonical tree, one rounding.

    a and b are both bf16 or both fp32, each contiguous along K or along M/N. With ``units`` > 1 the fp32 partials take
    ``4 * units * M * N`` bytes of scratch.
    """
    m, n = a.shape[0], b.shape[0]
    if units == 1:
        y = torch.empty(m, n, dtype=out_dtype, device=a.device)
        launch(a, b, y, units=1, bias=bias, tile=tile)
        return y
    partials = torch.empty(units, m, n, dtype=torch.float32, device=a.device)
    launch(a, b, partials, units=units, bias=None, tile=tile)
    return tree_reduce(partials, out_dtype=out_dtype, bias=bias)


def launch(a: Tensor, b: Tensor, y: Tensor, *, units: int, bias: Tensor | None, tile: Tile) -> Any:
    """Run the kernel into y [M, N], or into fp32 partials [units, M, N]; returns Triton's compiled kernel."""
    (m, k), n = a.shape, b.shape[0]
    a, a_transposed = _stored(a)
    b, b_transposed = _stored(b)
    tma = _tma_reads(a, b, k, units, tile) and (units > 1 or _tma_legal(y))
    programs = processors(a.device) if tile.persistent else 0
    n_tail = whole_columns(m, n, tile, programs) if tma and units == 1 else n
    tail = tile.tail if n_tail < n else 0

    def described(t: Tensor, rows: int, transposed: bool) -> Any:
        return TensorDescriptor.from_tensor(t, [tile.k, rows] if transposed else [rows, tile.k]) if tma else t

    def target(columns: int) -> Any:
        return TensorDescriptor.from_tensor(y, [tile.m, columns]) if tma and units == 1 else y

    work = triton.cdiv(m, tile.m) * triton.cdiv(n_tail, tile.n) * units
    return gemm_kernel[(programs or work,)](
        described(a, tile.m, a_transposed), described(b, tile.n, b_transposed), target(tile.n),
        described(b, tail or tile.n, b_transposed), target(tail or tile.n),
        bias if bias is not None else y, m, n, k, a.stride(0), b.stride(0), n_tail,
        UNITS=units, TMA=tma, A_T=a_transposed, B_T=b_transposed, BIAS=bias is not None,
        BM=tile.m, BN=tile.n, BK=tile.k, TAIL=tail, BAND=tile.band, PROGRAMS=programs, FLATTEN=tile.flatten,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def whole_columns(m: int, n: int, tile: Tile, programs: int) -> int:
    """Columns that fill whole waves of ``programs`` tiles; the few left over would keep the chip waiting for one more.

    n itself for a tile without a tail, when there is less than one whole wave, or when more than a third of a wave is
    left, which narrow tiles would not finish sooner.
    """
    if not tile.tail or not programs:
        return n
    tiles_m = triton.cdiv(m, tile.m)
    waves, left = divmod(tiles_m * triton.cdiv(n, tile.n), programs)
    if not waves or not left or 3 * left > programs:
        return n
    return min(n, int(waves * programs // tiles_m) * tile.n)


def _stored(t: Tensor) -> tuple[Tensor, bool]:
    """The operand as its memory lies: rows contiguous, and whether that is the transpose."""
    return (t, False) if t.stride(1) == 1 else (t.t(), True)


def _tma_legal(t: Tensor) -> bool:
    """The copy engine needs 16-byte aligned rows (CUDA driver API, cuTensorMapEncodeTiled)."""
    return t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0


def _tma_reads(a: Tensor, b: Tensor, k: int, units: int, tile: Tile) -> bool:
    """Whether the copy engine may read the operands; its blocks must not reach into the next unit."""
    if torch.cuda.get_device_capability(a.device) < (9, 0):
        return False
    return (units == 1 or k // units % tile.k == 0) and _tma_legal(a) and _tma_legal(b)


def processors(device: torch.device) -> int:
    """Multiprocessors of ``device``: the programs of a persistent grid."""
    return torch.cuda.get_device_properties(device).multi_processor_count
