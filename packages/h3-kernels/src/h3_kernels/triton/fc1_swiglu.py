"""fc1 and SwiGLU in one kernel, for Hopper, with the bits of `triton.gemm`'s chain followed by `triton.swiglu`.

A tile is 128 tokens by 128 features: 256 weight rows, the gate's and the value's of the same features, so that one
``wgmma`` of 256 columns holds both. Warps are specialised (Gluon, Triton's lower level): one warp copies operands into
a ring of stages, two groups of four warps multiply 64 tokens each, and two warps apply SwiGLU and store. The
multipliers hand over a tile rounded to bf16, as fc1 writes it, through shared memory and go on with the next one, so
exp and division run under its products: in the multipliers' own epilogue they would take 3% of a tile's time.

Order per element: that of `triton.gemm` (ascending 16-wide steps of one chain, one rounding), then `swiglu_terms`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from h3_kernels import tuning
from h3_kernels.triton.rows import launcher
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

if TYPE_CHECKING:
    from h3_kernels.tuning import Tile
    from torch import Tensor

sync = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # named thread_barrier up to Triton 3.6

HALF = 64
"""Tokens of one group of multipliers: the rows of a wgmma."""
STORE_WARPS = 2
STORE_ROWS = 32
"""Rows that the storing warps hold at once."""
OPTIONS = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": False}
"""Of the first group of multipliers; with the second, the storing warps and the copying one there are 384 threads."""
MULTIPLIER_REGISTERS = 216
OTHER_REGISTERS = 72
"""A thread's. 2 x 128 x 216 + 128 x 72 are the 64512 of 384 threads; 128 of a multiplier's are its accumulators."""


@gluon.jit
def corner(tile, tiles_m, tiles_f, BM: gl.constexpr, BF: gl.constexpr, BAND: gl.constexpr):
    """First token and feature of a tile; tiles go in bands of BAND tile rows, for L2."""
    band_tiles = BAND * tiles_f
    first = tile // band_tiles * BAND
    height = gl.minimum(tiles_m - first, BAND)
    return (first + tile % band_tiles % height) * BM, tile % band_tiles // height * BF


@gluon.jit
def copy_operands(
    x, weight, ring, tiles_m, tiles_f, F, steps, BM: gl.constexpr, BF: gl.constexpr, BK: gl.constexpr,
    BAND: gl.constexpr, STAGES: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Fill the ring: a stage holds BM tokens and BF rows of either half of the weight, BK deep."""
    a, b, full, empty = ring
    stage = 0
    phase = 1  # an empty ring may be filled at once
    for tile in range(gl.program_id(0), tiles_m * tiles_f, PROGRAMS):
        m, f = corner(tile, tiles_m, tiles_f, BM, BF, BAND)
        for step in range(steps):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, (BM + 2 * BF) * BK * 2)
            tma.async_copy_global_to_shared(x, [m, step * BK], bar, a.index(stage))
            tma.async_copy_global_to_shared(weight, [f, step * BK], bar, b.index(stage).slice(0, BF))
            tma.async_copy_global_to_shared(weight, [F + f, step * BK], bar, b.index(stage).slice(BF, BF))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def multiply(
    ring, handover, tiles, steps, GROUP: gl.constexpr, ROWS: gl.constexpr, BF: gl.constexpr, STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Chains of ROWS tokens, rounded to bf16 into the handover's GROUP. One product is always in flight."""
    a, b, full, empty = ring
    first, second, ready, drained = handover
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BF, 16])
    stage = 0
    phase = 0
    turn = 1  # nothing to drain before the first tile
    for _ in range(gl.program_id(0), tiles, PROGRAMS):
        acc = warpgroup_mma_init(gl.zeros((ROWS, 2 * BF), gl.float32, layout))
        before = stage
        for step in range(steps):
            mbarrier.wait(full.index(stage), phase)
            tokens = a.index(stage).slice(ROWS * GROUP, ROWS)
            acc = warpgroup_mma(tokens, b.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[acc]))
            sync()
            mbarrier.arrive(empty.index(before), pred=step > 0)
            before = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        chains = warpgroup_mma_wait(0, deps=[acc])
        sync()
        mbarrier.arrive(empty.index(before))
        upper, lower = chains.to(gl.bfloat16).reshape((ROWS, 2, BF)).permute((0, 2, 1)).split()
        mbarrier.wait(drained.index(GROUP), turn)
        turn ^= 1
        first.index(GROUP).store(upper)
        second.index(GROUP).store(lower)
        sync()
        mbarrier.arrive(ready.index(GROUP))


@gluon.jit
def swiglu_terms(gate, value):
    """`triton.swiglu`'s steps."""
    s = 1.0 / (1.0 + gl.exp(-gate))
    return gate * s * value


@gluon.jit
def apply_and_store(
    y, handover, tiles_m, tiles_f, BM: gl.constexpr, BF: gl.constexpr, BAND: gl.constexpr,
    PROGRAMS: gl.constexpr, GATE_FIRST: gl.constexpr, ROWS: gl.constexpr, CHUNK: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """SwiGLU of each group's tile in the place of its first half, CHUNK rows of 128 bytes at a time; then its store."""
    first, second, ready, drained = handover
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_f, PROGRAMS):
        m, f = corner(tile, tiles_m, tiles_f, BM, BF, BAND)
        for group in gl.static_range(2):
            mbarrier.wait(ready.index(group), turn)
            for row in gl.static_range(0, ROWS, CHUNK):
                for column in gl.static_range(0, BF, 64):
                    here = first.index(group).slice(row, CHUNK).slice(column, 64, dim=1)
                    there = second.index(group).slice(row, CHUNK).slice(column, 64, dim=1)
                    upper = here.load(layout).to(gl.float32)
                    lower = there.load(layout).to(gl.float32)
                    if GATE_FIRST:
                        terms = swiglu_terms(upper, lower)
                    else:
                        terms = swiglu_terms(lower, upper)
                    here.store(terms.to(gl.bfloat16))
            fence_async_shared()
            sync()
            tma.async_copy_shared_to_global(y, [m + ROWS * group, f], first.index(group))
            tma.store_wait(0)
            sync()
            mbarrier.arrive(drained.index(group))
        turn ^= 1


@gluon.jit(do_not_specialize=["M"])
def fc1_swiglu_kernel(
    x, weight, y, M, F, K, BM: gl.constexpr, BF: gl.constexpr, BK: gl.constexpr, BAND: gl.constexpr,
    STAGES: gl.constexpr, PROGRAMS: gl.constexpr, GATE_FIRST: gl.constexpr, ROWS: gl.constexpr, CHUNK: gl.constexpr,
    STORE_WARPS: gl.constexpr, MULTIPLIER: gl.constexpr, OTHER: gl.constexpr,
):  # fmt: skip
    """y [M, F] of x [M, K] and weight [2 F, K]: descriptors of blocks [BM, BK], [BF, BK] and [ROWS, BF]; BM = 2 ROWS.

    The grid must hold exactly PROGRAMS programs: each takes every PROGRAMS-th tile. MULTIPLIER and OTHER: registers.
    """
    tiles_m = gl.cdiv(M, BM)
    tiles_f = gl.cdiv(F, BF)
    steps = gl.cdiv(K, BK)
    a = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], x.layout)
    b = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * BF, BK], weight.layout)
    first = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, BF], y.layout)
    second = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, BF], y.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    drained = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(drained.index(i), count=1)
    ring = (a, b, full, empty)
    handover = (first, second, ready, drained)
    tiles = tiles_m * tiles_f
    gl.warp_specialize(
        [
            (multiply, (ring, handover, tiles, steps, 0, ROWS, BF, STAGES, PROGRAMS)),
            (multiply, (ring, handover, tiles, steps, 1, ROWS, BF, STAGES, PROGRAMS)),
            (apply_and_store, (y, handover, tiles_m, tiles_f, BM, BF, BAND, PROGRAMS, GATE_FIRST, ROWS, CHUNK,
                               STORE_WARPS)),
            (copy_operands, (x, weight, ring, tiles_m, tiles_f, F, steps, BM, BF, BK, BAND, STAGES, PROGRAMS)),
        ],
        [4, STORE_WARPS, 1],
        [MULTIPLIER, OTHER, OTHER],
    )  # fmt: skip


def block_layout(rows: int, columns: int) -> Any:
    """How a [rows, columns] bf16 block lies in shared memory: swizzled, as the copy engine and wgmma read it."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)


def constants(tile: Tile, *, programs: int, gate_first: bool) -> dict[str, Any]:
    """Compile-time arguments of `fc1_swiglu_kernel`."""
    return {
        "BM": tile.m,
        "BF": tile.n,
        "BK": tile.k,
        "BAND": tile.band,
        "STAGES": tile.stages,
        "PROGRAMS": programs,
        "GATE_FIRST": gate_first,
        "ROWS": HALF,
        "CHUNK": STORE_ROWS,
        "STORE_WARPS": STORE_WARPS,
        "MULTIPLIER": MULTIPLIER_REGISTERS,
        "OTHER": OTHER_REGISTERS,
    }


@launcher
def launch(x: Tensor, weight: Tensor, *, gate_first: bool, tile: Tile = tuning.FC1_SWIGLU) -> Tensor:
    """y [T, F] of x [T, K] and weight [2 F, K], bf16, contiguous, K a multiple of 8 and F of ``tile.n``."""
    rows, features = x.shape[0], weight.shape[0] // 2
    y = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y

    def described(t: Tensor, *block: int) -> Any:
        return TensorDescriptor.from_tensor(t, list(block), block_layout(*block))

    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    fc1_swiglu_kernel[(programs,)](
        described(x, tile.m, tile.k), described(weight, tile.n, tile.k), described(y, HALF, tile.n),
        rows, features, x.shape[1], **constants(tile, programs=programs, gate_first=gate_first), **OPTIONS,
    )  # fmt: skip
    return y
