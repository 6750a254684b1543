"""On a GPU: fc1 and SwiGLU in one launch give the bits of the plain chain followed by the SwiGLU node.

The chain is Triton's plain tile, which every provider of fc1 is compared with (test_gpu_gemm.py), so one launch equals
any provider and the node, and with it both engines' orders of the halves, any rows and any shard.
"""

import pytest
import torch
from h3_kernels import fc1_swiglu as subject
from h3_kernels import nodes, tuning
from h3_kernels.cuda_providers import plain
from h3_kernels.providers import tree_gemm
from h3_kernels.testing import count_differing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a CUDA device of capability 9.0",
    ),
]

K, FEATURES = 5376, 14336
BF16 = torch.bfloat16


def make(kind, rows):
    generator = torch.Generator("cuda").manual_seed(rows)
    x, weight = (torch.randn(n, K, device="cuda", generator=generator).to(BF16) for n in (rows, 2 * FEATURES))
    weight *= K**-0.5
    if kind == "cancellation":
        half = K // 2
        x[:, half:] = -x[:, :half]
        weight[:, half:] = weight[:, :half] * (1 + 2.0**-6)
    if kind == "large":
        x *= 2.0**60
    x[0], weight[0] = 0, -weight[0].abs()  # zeros of both signs
    return x, weight


def apart(x, weight, gate_first=True):
    first, second = plain(x, weight, units=1, out_dtype=BF16, bias=None).chunk(2, dim=1)
    return nodes.swiglu(first, second) if gate_first else nodes.swiglu(second, first)


def one(x, weight, gate_first=True):
    return subject.fc1_swiglu(x, weight, gate_first=gate_first)


@pytest.mark.parametrize("kind", ["random", "cancellation", "large"])
@pytest.mark.parametrize("rows", [1, 70, 129, 925, 8349])
def test_one_launch_has_the_bits_of_the_two_nodes(rows, kind):
    x, weight = make(kind, rows)
    for gate_first in (True, False):
        y = one(x, weight, gate_first)
        assert y.shape == (rows, FEATURES)
        assert count_differing(y, apart(x, weight, gate_first)) == 0
    if rows > 1:  # row 0 is zero
        assert count_differing(one(x, weight), apart(x, weight, gate_first=False)) > 0  # twin: halves swapped


def test_another_split_of_k_is_caught():
    """Twin of the chain: fc1 as two chains, whose sums round elsewhere."""
    x, weight = make("cancellation", 129)
    first, second = tree_gemm(x, weight, units=2, out_dtype=BF16, provider="triton").chunk(2, dim=1)
    assert count_differing(nodes.swiglu(first, second), one(x, weight)) > 0


def test_rows_keep_their_bits_in_any_company_and_order():
    x, weight = make("cancellation", 925)
    y = one(x, weight)
    for rows in (torch.arange(1), torch.arange(127, 200), torch.randperm(925)):
        assert count_differing(one(x[rows.cuda()], weight), y[rows.cuda()]) == 0
    padded = torch.cat([x, torch.full((91, K), 1e30, device="cuda", dtype=BF16)])
    assert count_differing(one(padded, weight)[:925], y) == 0
    assert all(count_differing(one(x, weight), y) == 0 for _ in range(20))


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_shards_have_the_columns_of_the_whole(tp):
    x, weight = make("cancellation", 300)
    y, width = one(x, weight), FEATURES // tp
    for rank in range(tp):
        columns = slice(rank * width, (rank + 1) * width)
        shard = torch.cat([half[columns] for half in weight.chunk(2)])
        assert count_differing(one(x, shard), y[:, columns]) == 0


def test_it_proves_itself_and_replays_from_a_graph():
    x, weight = make("random", tuning.FC1_SWIGLU_ROWS + 1)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        unproved = subject.served(x, weight, gate_first=True)
        x.clone()  # torch warns of empty graphs
    assert not unproved  # nothing can be compared during a capture
    assert subject.served(x, weight, gate_first=True)
    call = subject._call(x, weight)
    assert subject.proof(call, True, x.device).compared == 2 * len(x) * FEATURES
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = one(x, weight)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert count_differing(y, apart(x, weight)) == 0


def test_a_launch_that_differs_is_not_served(monkeypatch):
    """Twin of the proof: the halves the wrong way round."""
    x, weight = make("random", tuning.FC1_SWIGLU_ROWS + 2)
    right = subject.fc1_swiglu
    monkeypatch.setattr(
        subject, "fc1_swiglu", lambda x, weight, *, gate_first: right(x, weight, gate_first=not gate_first)
    )
    assert not subject.served(x, weight, gate_first=True)
