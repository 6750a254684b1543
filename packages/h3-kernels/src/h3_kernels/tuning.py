"""Which tile serves which call: data, with the measurement beside each row. Bits never depend on a choice made here.

Measured on an H200 (torch 2.11, Triton 3.6, CUDA 13.0), L2 flushed, CUDA graphs, interleaved with stock ``F.linear``;
ratios are ours / stock in the same run. benchmarks/gemm_h200.py repeats them; docs/measured-facts.md tells the story.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

SCRATCH_LIMIT = 16 << 20
"""Most scratch the fused GEMM may take, in bytes; a plan that needs more is not considered."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How the Triton GEMM runs: tile sizes, pipeline depth, warps, and tile rows walked together for L2.

    ``tail`` narrows the tiles after the last whole wave of a persistent grid; 0 keeps ``n``.
    """

    m: int
    n: int
    k: int
    stages: int
    warps: int
    persistent: bool = False
    flatten: bool = False
    band: int = 8
    tail: int = 0


TRITON_LARGE = Tile(128, 256, 64, 3, 8, persistent=True, flatten=True, tail=64)
"""More than 128 rows. 925 rows: qkv_proj 1.15 (1.20 without the tail: 672 tiles are 5.09 waves of 132), fc1 1.10.
8349 rows: 1.02 and 1.00. 256 x 128, 128 x 128 and 64 x 256 tiles were 2 to 30% slower in every cell."""

TRITON_FP32_RESULT = Tile(128, 128, 64, 4, 8)
"""More than 128 rows with fp32 results (unit partials, subtree roots): their staging leaves no shared memory for a
wider tile (278552 bytes at 256 columns, a block has 232448)."""

TRITON_SMALL = (
    (112, Tile(128, 256, 64, 3, 8)),
    (84, Tile(128, 256, 32, 6, 8)),
    (84, Tile(128, 128, 64, 4, 8)),
    (0, Tile(128, 64, 64, 6, 4)),
)
"""Up to 128 rows: (programs at least, tile), widest first; the first row whose tile makes that many programs is taken.
70 rows, medians of five allocations: qkv_proj (84 programs of 256 columns) 1.110 in 6 stages of 32, 1.146 in 5, 1.154
in 3 of 64; fc1 (112) 1.072 in 3 stages of 64, 1.077 in 5 of 32, 1.070 in 6 but up to 1.128. Older runs: qkv_proj 1.19
on a persistent grid, 1.26 at 128 columns, 1.4 at 64."""

TRITON_PLAIN = Tile(64, 64, 32, 2, 4)
"""What probes compare with: every element by the shortest path, no persistent grid, no narrow tail."""

FC1_SWIGLU = Tile(128, 128, 64, 4, 8, persistent=True, flatten=True)
"""fc1 with SwiGLU in its epilogue; 128 features are 256 weight rows. Of cuBLASLt's fc1 and the SwiGLU node: 1.003 at
8349 rows, 0.971 at 37,000 (3 stages of 64: 1.003, 0.983; 7 of 32: 1.013, 1.012; bands of 16: 1.002, 1.024)."""

FC1_SWIGLU_ROWS = 4096
"""Up to this many rows fc1 and SwiGLU run apart: 1.001 at 4096 rows, 1.002 at 2048, 1.09 at 925."""

TRITON_FP32 = tuple((least, Tile(size, size, 32, 3, 4)) for least, size in ((66, 64), (66, 32), (0, 16)))
"""fp32 operands (time embedder, patch and output projections), rows as in TRITON_SMALL: fused multiply-adds, no tensor
cores. An output head is 2 columns of 64, so that at 70 rows two programs would walk its whole K alone; 66 programs are
half of the multiprocessors."""

FMA = ((396, 64), (396, 32), (0, 16))
"""The extension's fp32 GEMM, rows as in TRITON_SMALL: (blocks at least, rows and columns of one). 396 blocks are three
a multiprocessor, so that no wave is left over."""

Choice = TypeVar("Choice")


def fma_tile(m: int, n: int) -> int:
    """The block of the extension's fp32 GEMM for an [m, n] product."""
    return _first(FMA, lambda size: math.ceil(m / size) * math.ceil(n / size))


def triton_tile(m: int, n: int, units: int, *, fp32: bool, fp32_result: bool) -> Tile:
    """The Triton tile for an [m, n] product in ``units`` units of fp32 or bf16 operands."""

    def programs(tile: Tile) -> int:
        return math.ceil(m / tile.m) * math.ceil(n / tile.n) * units

    if fp32:
        return _first(TRITON_FP32, programs)
    if m > TRITON_LARGE.m:
        return TRITON_FP32_RESULT if units > 1 or fp32_result else TRITON_LARGE
    widest = TRITON_FP32_RESULT.n if units > 1 or fp32_result else TRITON_LARGE.n
    return _first([row for row in TRITON_SMALL if row[1].n <= widest], programs)


def _first(rows: Sequence[tuple[int, Choice]], programs: Callable[[Choice], int]) -> Choice:
    """The tile of the first row that makes enough programs; the last row asks for none."""
    return next(tile for least, tile in rows if programs(tile) >= least)


@dataclass(frozen=True, slots=True)
class FusedTile:
    """One configuration compiled into csrc/tree_gemm_sm90.cu, named by its properties, and what it costs.

    ``stage_ns`` is the time of one 64-deep stage in steady state, ``tile_us`` what a tile costs on top (epilogue,
    tree), both fitted to fc2 and out_proj at 925 rows; those of 192-column trees also to which width wins at 8349.
    ``leaf``: "chain" (K whole), "unit" or "pair" (units >= 2).
    ``swap``: the kernel's A is the weight and its B the tokens; ``a_transposed`` and ``b_transposed`` are the kernel's.
    """

    n: int
    leaf: str
    cluster: int
    stages: int
    stage_ns: float
    tile_us: float
    a_transposed: bool = False
    b_transposed: bool = False
    swap: bool = False
    halves: int = 1
    split: int = 0
    band: int = 4

    @property
    def key(self) -> tuple[int, ...]:
        """The properties the library lists for its configurations."""
        leaf = ("chain", "unit", "pair").index(self.leaf)
        flags = (self.a_transposed, self.b_transposed, self.swap)
        return (self.n, leaf, self.cluster, *map(int, flags), self.halves, self.stages)

    def reads(self, a_transposed: bool, b_transposed: bool) -> bool:
        """Whether the kernel reads tokens a and weight b as they are stored."""
        stored = (b_transposed, a_transposed) if self.swap else (a_transposed, b_transposed)
        return stored == (self.a_transposed, self.b_transposed)


def _trees(**layout: bool) -> tuple[FusedTile, ...]:
    """The tiles of trees for one layout of the weight."""
    narrow = FusedTile(160, "pair", 2, 5, 437, 6.9, swap=True, **layout)
    return (narrow, replace(narrow, split=2), FusedTile(192, "pair", 2, 4, 525, 9.2, swap=True, **layout))


FUSED = (
    *_trees(),
    *_trees(a_transposed=True),
    FusedTile(72, "chain", 1, 7, 400, 3.0, swap=True),
    FusedTile(256, "chain", 2, 4, 646, 7.0),
    FusedTile(192, "chain", 2, 5, 500, 6.0),
    FusedTile(224, "chain", 1, 5, 700, 3.0),
    FusedTile(168, "chain", 1, 6, 600, 3.0),
    FusedTile(256, "chain", 2, 4, 646, 7.0, b_transposed=True),
    FusedTile(128, "chain", 1, 7, 450, 4.0, b_transposed=True),
    FusedTile(256, "chain", 2, 4, 646, 7.0, a_transposed=True, b_transposed=True),
    FusedTile(128, "chain", 1, 7, 450, 4.0, a_transposed=True, b_transposed=True),
)
"""For more than 128 rows, and for chains; the cheapest by ``cost`` is taken. Trees swap the operands: 925 rows are 6
tiles of 160 tokens (4% of them empty) and 2 even waves, but 8 of 128 (11% empty): out_proj 1.19 against 1.24. 8349 rows
are 14 even waves of 192 columns, which win where units are long (fc2 1.015 against 1.035, dX) and lose in out_proj
(1.087 against 1.062). 2048 rows of out_proj: 192 columns 1.258, 160 uncut 1.285; cut at pairs they are predicted at
1.18 and have not been timed."""

FUSED_SMALL = (
    FusedTile(16, "unit", 1, 10, 0, 0, swap=True, split=2),
    FusedTile(32, "unit", 1, 8, 0, 0, swap=True, halves=2),
    FusedTile(72, "unit", 1, 7, 0, 0, swap=True, halves=2),
    FusedTile(128, "unit", 1, 5, 0, 0, swap=True, halves=2),
    FusedTile(72, "unit", 1, 7, 0, 0, swap=True, halves=2, a_transposed=True),
    FusedTile(128, "unit", 1, 5, 0, 0, swap=True, halves=2, a_transposed=True),
)
"""For up to 128 rows in 2 units or more: the narrowest that holds the rows, so that weights are read once. 70 rows, u8:
out_proj 1.10, dX of qkv_proj 1.02. Roots through plain stores to distributed shared memory and a released arrival
instead of counted stores: 1.15; through global flags 1.14 in an older run, 112-column tiles without the swap 1.34."""

PREFERRED = {
    # (n, k, units): (rows up to, providers first to last)
    (28672, 5376, 1): ((128, ("fused-sm90", "cublaslt")),),  # fc1, 70 rows: 0.95 to 0.99 against 0.997
}
"""Exceptions to the order of ``rank``."""


def cost(tile: FusedTile, m: int, n: int, k: int, units: int, clusters: int) -> float:
    """Predicted microseconds of the busiest cluster when ``clusters`` are resident."""
    first, second = (n, m) if tile.swap else (m, n)
    tiles = math.ceil(first / (128 * tile.cluster)) * math.ceil(second / tile.n)
    left = tiles % clusters
    chunk = (
        math.ceil(left * units / tile.split / clusters) * tile.split
        if tile.split and tile.split < units
        else units
    )
    busiest = tiles // clusters * units + (min(chunk, units) if left else 0)
    unit_stages = math.ceil(k / units / 64)
    return busiest * unit_stages * tile.stage_ns / 1e3 + math.ceil(tiles / clusters) * tile.tile_us


def fused_candidates(m: int, units: int, *, a_transposed: bool, b_transposed: bool) -> Sequence[FusedTile]:
    """Configurations that read these layouts and hold ``units``, small-row ones alone where they apply."""
    if m <= 128 and units > 1 and not a_transposed:
        return [next(tile for tile in FUSED_SMALL if tile.n >= m and tile.reads(a_transposed, b_transposed))]
    leaves = ("chain",) if units == 1 else ("unit", "pair")
    return [tile for tile in FUSED if tile.leaf in leaves and tile.reads(a_transposed, b_transposed)]


def rank(provider: str, m: int, n: int, k: int, units: int) -> int:
    """Where ``provider`` stands for a call: the highest is asked first.

    One chain: cuBLASLt without split-K is 1.00 of stock at 70, 925 and 8349 rows of qkv_proj and fc1, the fused chain
    0.98 to 1.11, Triton 1.00 to 1.15; of fp32 operands Triton's is 3 to 8, and ``fma`` is asked first. A tree: fused
    0.97 to 1.14, batched cuBLAS 1.07 to 1.78, Triton units 1.28 to 2.42.
    """
    order = (
        ("fma", "cublaslt", "fused-sm90", "triton") if units == 1 else ("fused-sm90", "bmm-tree", "triton")
    )
    for rows, exception in PREFERRED.get((n, k, units), ()):
        if m <= rows:
            order = (*exception, "triton")
            break
    return 10 + len(order) - order.index(provider) if provider in order else 1
