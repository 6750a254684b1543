"""The extension's fp32 GEMM on a GPU: every tile gives the bytes of the plain Triton chain."""

from __future__ import annotations

import pytest
import torch
from h3_kernels import cuda_providers, tuning
from h3_kernels.fused import fma_gemm
from h3_kernels.providers import tree_gemm
from h3_kernels.testing import assert_bitwise_equal, count_differing

pytestmark = pytest.mark.gpu

F32 = torch.float32
SHAPES = [  # (rows, features, K): edges, then the released model's heads, patches and time embedder
    (1, 1, 2),
    (33, 40, 97),
    (70, 65, 100),
    (49, 96, 5376),
    (834, 64, 5376),
    (5845, 96, 5376),
    (5845, 5376, 96),
    (2, 5376, 256),
]


def operands(m: int, n: int, k: int, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [m, k] with a gap between rows, weight [n, k], bias [n]; for ``cancellation`` sums far below their terms."""
    generator = torch.Generator("cuda").manual_seed(m + n + k)
    x, weight, bias = (
        torch.randn(shape, generator=generator, device="cuda") for shape in ((m, k + 4), (n, k), (n,))
    )
    x = x[:, :k]
    if kind == "cancellation" and k > 1:
        half = k // 2
        x[:, half : 2 * half], weight[:, half : 2 * half] = -x[:, :half], weight[:, :half] * (1 + 1e-6)
    return x, weight, bias


@pytest.mark.parametrize("kind", ["random", "cancellation"])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_every_tile_has_the_bytes_of_the_plain_chain(m, n, k, kind):
    x, weight, bias = operands(m, n, k, kind)
    for added in (None, bias):
        expected = cuda_providers.plain(x, weight, units=1, out_dtype=F32, bias=added)
        for _, tile in tuning.FMA:
            assert_bitwise_equal(fma_gemm(x, weight, added, tile), expected, f"tile {tile}")
    if k > 2:  # twin: the chain in descending k
        reverse = fma_gemm(x.flip(1).contiguous(), weight.flip(1).contiguous(), None)
        assert count_differing(reverse, fma_gemm(x, weight, None)) > 0


def test_rows_keep_their_bytes_alone_and_from_a_captured_graph():
    x, weight, bias = operands(648, 96, 5376, "random")
    whole = tree_gemm(x, weight, units=1, out_dtype=F32, bias=bias, provider="fma")
    part = tree_gemm(x[7:80], weight, units=1, out_dtype=F32, bias=bias, provider="fma")
    assert_bitwise_equal(part, whole[7:80], "rows 7 to 80 alone")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tree_gemm(x, weight, units=1, out_dtype=F32, bias=bias, provider="fma")
    graph.replay()
    assert_bitwise_equal(y, whole, "replayed")
