"""On a GPU: every provider and configuration of ``tree_gemm`` gives one set of bits, at least 40 million values an op.

Transitivity: each provider equals the Triton chain and tree on the same operands; the Triton kernel equals itself under
every tile; ranks' roots equal subtrees. So any provider, tile, tp, row subset, order, padding or repeat gives the same
bytes. Each claim has a twin that must fail.
"""

import pytest
import torch
from h3_kernels import tuning
from h3_kernels.contract import UNITS
from h3_kernels.providers import tree_gemm
from h3_kernels.reference import finish, fold_tree
from h3_kernels.testing import count_differing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16, F32 = torch.bfloat16, torch.float32
SHAPES = {"qkv_proj": (21504, 5376), "fc1": (28672, 5376), "out_proj": (5376, 7168), "fc2": (5376, 14336)}
ROWS = 8349  # 8349 x 5376 is 44.9 million values


def make(kind: str, rows: int, n: int, k: int):
    generator = torch.Generator("cuda").manual_seed(n + k)
    x, weight = (torch.randn(size, k, device="cuda", generator=generator).to(BF16) for size in (rows, n))
    weight *= k**-0.5
    if kind == "cancellation":
        half = k // 2
        x[:, half:] = -x[:, :half]
        weight[:, half:] = weight[:, :half] * (1 + 2.0**-6)
    if kind == "large":
        x *= 2.0**60
    x[0], x[1, 1:], weight[0] = 0, 0, -weight[0].abs()  # zeros of both signs
    return x, weight


def product(a, b, units, provider, out=BF16, bias=None):
    return tree_gemm(a, b, units=units, out_dtype=out, provider=provider, bias=bias)


@pytest.fixture(params=["random", "cancellation", "large"])
def kind(request):
    return request.param


@pytest.mark.parametrize("op", ["qkv_proj", "fc1"])
def test_projection_providers_agree(op, kind):
    n, k = SHAPES[op]
    x, weight = make(kind, ROWS, n, k)
    y = product(x, weight, 1, "triton")
    for provider in ("cublaslt", "fused-sm90"):
        assert count_differing(product(x, weight, 1, provider), y) == 0, provider
    assert (
        count_differing(product(x, weight, 8 if k % 512 == 0 else 2, "triton"), y) > 0
    )  # twin: another split of K


@pytest.mark.parametrize("op", ["out_proj", "fc2"])
def test_every_tp_and_provider_gives_the_bytes_of_one_process(op, kind):
    n, k = SHAPES[op]
    x, weight = make(kind, ROWS, n, k)
    y = product(x, weight, UNITS, "triton")
    for provider in ("fused-sm90", "bmm-tree", "fused-sm90"):
        assert count_differing(product(x, weight, UNITS, provider), y) == 0, provider
    wrong = product(x[:925], weight, 4, "fused-sm90")
    assert count_differing(wrong, y[:925]) > 0  # twin: another tree
    for tp in (2, 4, 8):
        width = k // tp
        roots = []
        for rank in range(tp):
            local = (t[:, rank * width : (rank + 1) * width] for t in (x[:925], weight))
            roots.append(product(*local, UNITS // tp, "auto", F32))
        assert count_differing(finish(fold_tree(torch.stack(roots)), None, BF16), y[:925]) == 0, tp
        if tp > 2:
            roots[0], roots[-1] = roots[-1], roots[0]
            swapped = finish(fold_tree(torch.stack(roots)), None, BF16)
            assert count_differing(swapped, y[:925]) > 0  # twin: two ranks in each other's place


@pytest.mark.parametrize("op", SHAPES)
def test_rows_do_not_depend_on_subset_order_padding_or_run(op, kind):
    n, k = SHAPES[op]
    units = UNITS if op in ("out_proj", "fc2") else 1
    x, weight = make(kind, ROWS, n, k)
    y = product(x, weight, units, "auto")
    assert count_differing(product(x, weight, units, "auto"), y) == 0
    order = torch.randperm(ROWS, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    for rows in (1, 15, 16, 17, 32, 70, 128, 129, 300, 925, 2048):
        assert count_differing(product(x[order[:rows]], weight, units, "auto"), y[order[:rows]]) == 0, rows
    padded = torch.cat([x[:925], torch.zeros(99, k, device="cuda", dtype=BF16)])
    assert count_differing(product(padded, weight, units, "auto")[:925], y[:925]) == 0
    columns = product(x[:925], weight[n // 2 : n // 2 + 1024], units, "auto")
    assert count_differing(columns, y[:925, n // 2 : n // 2 + 1024].contiguous()) == 0


@pytest.mark.parametrize("op", SHAPES)
def test_backward_products_agree(op, kind):
    n, k = SHAPES[op]
    x, weight = make(kind, 2048, n, k)
    dy = torch.randn(2048, n, device="cuda").to(BF16)
    units = UNITS if op in ("qkv_proj", "fc1") else 1
    for rows in (70, 925, 2048):
        dx = product(dy[:rows], weight.t(), units, "triton")
        assert count_differing(product(dy[:rows], weight.t(), units, "auto"), dx) == 0
        assert count_differing(product(dy[:rows], weight.t(), units, "fused-sm90"), dx) == 0
    dw = product(dy.t(), x.t(), 1, "triton")
    assert count_differing(product(dy.t(), x.t(), 1, "auto"), dw) == 0
    assert count_differing(product(dy.t(), x.t(), 1, "fused-sm90"), dw) == 0
    assert (
        count_differing(product(dy.flip(0).t(), x.flip(0).t(), 1, "fused-sm90"), dw) > 0
    )  # twin: reversed tokens


@pytest.mark.parametrize(
    "tile", [*tuning.FUSED, *tuning.FUSED_SMALL], ids=lambda t: "-".join(map(str, t.key))
)
def test_every_fused_configuration_gives_the_same_bits(tile):
    from h3_kernels.fused import FusedGemm

    fused = FusedGemm()
    n, k = 1344, 2048
    layouts = (tile.a_transposed, tile.b_transposed)
    across_a, across_b = layouts[::-1] if tile.swap else layouts
    for rows in (8, 72, 304) if across_a else (1, 70, 300):
        x, weight = make("random", rows if rows > 1 else 2, n, k)
        x = x[:rows]
        a = x.t().contiguous().t() if across_a else x
        b = weight.t().contiguous().t() if across_b else weight
        for units in (1,) if tile.leaf == "chain" else (2, 4, 8):
            for bias in (None, torch.randn(n, device="cuda")):
                for out in (BF16, F32):
                    expected = product(x, weight, units, "triton", out, bias)
                    got = fused.run(a, b, units=units, out_dtype=out, bias=bias, tile=tile)
                    assert count_differing(got, expected) == 0, (rows, units, out)


@pytest.mark.parametrize(
    "tile", [t for t in tuning.FUSED if t.leaf == "pair"], ids=lambda t: "-".join(map(str, (*t.key, t.split)))
)
@pytest.mark.parametrize("stages", [1, 2, 9])  # a unit's: fewer than are begun ahead, as many, and more
def test_clusters_that_walk_several_tiles_give_the_same_bits(tile, stages):
    """A tile ends while the next one starts, and its last level returns through the ring behind its operands."""
    from h3_kernels.fused import FusedGemm

    fused, n, rows = FusedGemm(), 5376, 2496  # 273 tiles or more for 66 clusters
    for units in (2, 4, 8):
        x, weight = make("cancellation", rows, n, units * 64 * stages)
        b = weight.t().contiguous().t() if tile.a_transposed else weight
        expected = product(x, weight, units, "triton")
        for _ in range(3):
            got = fused.run(x, b, units=units, out_dtype=BF16, bias=None, tile=tile)
            assert count_differing(got, expected) == 0, units
        other = product(x, weight, units // 2, "triton")
        assert count_differing(other, expected) > 0  # twin: another tree


@pytest.mark.parametrize("units", [1, 8])
def test_graph_replays_give_the_same_bits(units):
    x, weight = make("random", 925, 5376, 7168)
    y = product(x, weight, units, "auto")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [product(x, weight, units, "auto") for _ in range(2)]
    for _ in range(3):
        graph.replay()
    assert all(count_differing(z, y) == 0 for z in captured)


def test_settings_of_the_process_return_after_a_call():
    matmul = torch.backends.cuda.matmul
    before = (torch.backends.cuda.preferred_blas_library(), matmul.allow_bf16_reduced_precision_reduction)
    product(*make("random", 70, 512, 1024), 1, "cublaslt")
    after = (torch.backends.cuda.preferred_blas_library(), matmul.allow_bf16_reduced_precision_reduction)
    assert after == before


def test_fp32_operands_never_use_tf32():
    a, b = (torch.randn(size, 256, device="cuda") for size in (70, 96))
    exact = a.double() @ b.double().t()
    y = product(a, b, 1, "auto", F32)
    assert ((y.double() - exact).norm() / exact.norm()) < 1e-6  # TF32 would be near 3e-4
