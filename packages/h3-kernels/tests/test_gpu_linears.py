"""On a CUDA device: the public linears keep every promise of test_linears.py and test_gradients.py at real shapes.

The leaf order of a chain belongs to the hardware, so results are compared among themselves (subsets, degrees,
providers, layouts), the tree is identified by ``order_probe``, and accuracy is judged against fp64.
"""

import pytest
import torch
from h3_kernels.contract import parallel_id
from h3_kernels.logical_keys import LogicalKeys
from h3_kernels.lora import LoraSlice, lora_linear, lora_slices
from h3_kernels.projection import projection, projection_group
from h3_kernels.providers import GemmCall, registered, tree_gemm
from h3_kernels.row_parallel import row_parallel
from h3_kernels.testing import (
    assert_bitwise_equal,
    cancellation_inputs,
    count_differing,
    emulated_row_parallel,
    large_magnitude_inputs,
    order_probe,
    random_inputs,
    shard_parts,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16, F32 = torch.bfloat16, torch.float32
INPUTS = {"random": random_inputs, "cancellation": cancellation_inputs, "large": large_magnitude_inputs}
# name: (N, K) of the model's four linears.
SHAPES = {"qkv_proj": (21504, 5376), "fc1": (28672, 5376), "out_proj": (5376, 7168), "fc2": (5376, 14336)}
ROWS = (1, 70, 925)
FORWARD = {"qkv_proj": projection, "fc1": projection, "out_proj": row_parallel, "fc2": row_parallel}


def operands(name, rows, make, dtype=BF16):
    n, k = SHAPES[name]
    return make(rows, n, k, dtype=dtype, device="cuda", seed=rows)


def legal_providers(name, rows, units):
    """Names of the providers that accept this call on this device; each is then held to the same bits."""
    n, k = SHAPES[name]
    capability = torch.cuda.get_device_capability()
    call = GemmCall(rows, n, k, units, BF16, BF16, "k", "k", False, "cuda", capability)
    tree_gemm(
        *random_inputs(1, 8, 16, device="cuda"), units=1, out_dtype=BF16
    )  # registers the CUDA providers
    return [p.name for p in registered(call) if p.refuses(call) is None]


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_rows_do_not_depend_on_their_batch(name, make):
    linear = FORWARD[name]
    x, weight = operands(name, max(ROWS), make)
    y = linear(x, weight)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1)).cuda()
    for rows in (order[:1], order[:70], order):
        assert_bitwise_equal(linear(x[rows], weight), y[rows], f"{name} {len(rows)} rows")
    padded = torch.cat([x, torch.zeros(99, x.shape[1], dtype=BF16, device="cuda")])
    assert_bitwise_equal(linear(padded, weight)[: len(x)], y, f"{name} padding")
    assert_bitwise_equal(linear(x, weight), y, f"{name} again")


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_legal_provider_gives_the_same_bits(name, rows, make):
    x, weight = operands(name, rows, make)
    units = 1 if FORWARD[name] is projection else 8
    names = legal_providers(name, rows, units)
    assert "triton" in names
    results = {p: FORWARD[name](x, weight, provider=p) for p in names}
    for provider, y in results.items():
        assert_bitwise_equal(y, results["triton"], f"{name} {rows} rows {provider}")


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("units", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["out_proj", "fc2"])
def test_tensor_parallel_degrees_agree(name, units, make):
    x, weight = operands(name, 70, make)
    y = row_parallel(x, weight, contract=parallel_id(units))
    for tp in (1, 2, 4, 8):
        if tp <= units:
            assert_bitwise_equal(emulated_row_parallel(x, weight, tp=tp, units=units), y, f"{name} tp={tp}")


def test_twin_another_unit_count_is_another_result():
    x, weight = operands("out_proj", 70, cancellation_inputs)
    y = row_parallel(x, weight)
    for units in (1, 2, 4):
        assert count_differing(row_parallel(x, weight, contract=parallel_id(units)), y) > y.numel() // 4


@pytest.mark.parametrize("k", [7168, 14336])
def test_the_tree_is_the_canonical_one_for_every_provider(k):
    probe = order_probe(k, device="cuda")
    weight = probe.weight.expand(64, k).contiguous()
    for provider in ("auto", "triton"):
        y = row_parallel(probe.x, weight, provider=provider)
        assert probe.identify(y[:, :1]) == "canonical tree", provider
        assert probe.identify(y[:, 63:]) == "canonical tree", provider


def test_columns_shards_and_groups_equal_the_fused_weight():
    x, weight = operands("qkv_proj", 70, cancellation_inputs)
    y = projection(x, weight)
    assert_bitwise_equal(torch.cat(projection_group(x, weight.chunk(3)), dim=1), y)
    for tp in (2, 4, 8):
        for rank in (0, tp - 1):
            shard = projection(x, shard_parts(weight, tp, rank, parts=3))
            assert_bitwise_equal(shard, shard_parts(y, tp, rank, parts=3, dim=1), f"tp={tp} rank {rank}")


@pytest.mark.parametrize("linear", [projection, row_parallel])
def test_memory_layouts_agree(linear):
    x, weight = cancellation_inputs(70, 256, 1024, device="cuda")
    y = linear(x, weight)
    layouts = {
        "transposed": lambda t: t.t().contiguous().t(),
        "wider": lambda t: torch.cat([t, t], dim=1)[:, : t.shape[1]],
        "odd offset": lambda t: torch.cat([t[:, :1], t], dim=1)[:, 1:],
        "every second column": lambda t: torch.stack([t, t], dim=-1).flatten(-2)[:, ::2],
    }
    for name, lay in layouts.items():
        assert_bitwise_equal(linear(lay(x), weight), y, f"x {name}")
        assert_bitwise_equal(linear(x, lay(weight)), y, f"weight {name}")


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("k", [512, 1024, 2048, 4096])
@pytest.mark.parametrize("linear", [projection, row_parallel])
def test_powers_of_two_are_not_special(linear, k, dtype):
    """Where batch-invariant kernels have failed before; 32 x 128 x 1024 has also lost a tile to a persistent loop."""
    x, weight = cancellation_inputs(257, 128, k, dtype=dtype, device="cuda")
    y = linear(x, weight)
    for rows in (1, 32, 256):
        assert_bitwise_equal(linear(x[:rows], weight), y[:rows], f"{rows} rows")


def test_fp32_operands_are_not_tf32():
    x = torch.full((16, 64), 1 + 2.0**-20, device="cuda")
    assert_bitwise_equal(projection(x, torch.eye(64, device="cuda")), x)


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_do_not_depend_on_row_order_or_padding(name):
    linear = FORWARD[name]
    settings = {"parts": (0, 1, 2)} if name == "qkv_proj" else {}
    x, weight = operands(name, 131, cancellation_inputs)
    dy = torch.randn(131, len(weight), generator=torch.Generator().manual_seed(0)).to("cuda", BF16)
    keys = torch.stack([torch.arange(131) // 50, torch.arange(131) % 50], dim=1).cuda()

    def grads(rows):
        leaves = [x[rows].requires_grad_(), weight.clone().requires_grad_()]
        padded_keys = torch.where((rows >= 0)[:, None], keys[rows], -1)
        y = linear(*leaves, logical_keys=LogicalKeys(padded_keys), **settings)
        return torch.autograd.grad(y, leaves, dy[rows])

    dx, dw = grads(torch.arange(131, device="cuda"))
    order = torch.randperm(131, generator=torch.Generator().manual_seed(1)).cuda()
    rows = torch.cat([order[:60], torch.full((29,), -1, device="cuda"), order[60:]])
    dx2, dw2 = grads(rows)
    assert_bitwise_equal(dw2, dw, name)
    assert_bitwise_equal(dx2[rows >= 0], dx[order], name)


@pytest.mark.parametrize("name", SHAPES)
def test_errors_are_not_above_those_of_torch(name):
    x, weight = operands(name, 70, random_inputs)
    truth = x.double() @ weight.double().t()

    def error(y):
        return float((y.double() - truth).square().mean().sqrt())

    assert error(FORWARD[name](x, weight)) <= 1.001 * error(torch.nn.functional.linear(x, weight))


def test_graph_capture_and_compile_give_the_eager_bits():
    x, weight = operands("out_proj", 70, cancellation_inputs)
    y = row_parallel(x, weight)
    graph, captured = torch.cuda.CUDAGraph(), None
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = row_parallel(x, weight)
    captured.zero_()
    graph.replay()
    assert_bitwise_equal(captured, y, "graph")
    compiled = torch.compile(row_parallel, backend="aot_eager", fullgraph=True)
    assert_bitwise_equal(compiled(x, weight), y, "compile")


def test_a_captured_backward_gives_the_eager_bits():
    """[value; gate] in the order of [gate; value]: the reordering of dX must not need the host either."""
    x, weight = (t.requires_grad_() for t in cancellation_inputs(70, 512, 256, device="cuda"))
    dy, _ = random_inputs(70, 1, 512, device="cuda")

    def step():
        return torch.autograd.grad(projection(x, weight, parts=(1, 0)), (x, weight), dy)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for t in captured:
        t.zero_()
    graph.replay()
    for got, eager in zip(captured, expected, strict=True):
        assert_bitwise_equal(got, eager)


def test_lora_slices_equal_separate_adapters():
    x, a = cancellation_inputs(70, 64, 5376, device="cuda")
    base, b = random_inputs(70, 7168, 64, device="cuda")
    base = projection(base, b)
    fused = lora_slices(
        x, torch.cat([base, base], dim=1), [LoraSlice(a, b, 7168, 2.0), LoraSlice(a[:32], b[:, :32], 0, 0.5)]
    )
    assert_bitwise_equal(fused[:, :7168], lora_linear(x, base, a[:32], b[:, :32], 0.5))
    assert_bitwise_equal(fused[:, 7168:], lora_linear(x, base, a, b, 2.0))
