"""The real engine on a GPU, with its own attention and fused kernels: the promises the CPU tests make, there.

Needs vLLM's CUDA build or the site that tools/h200_site packs. Head and rotary sizes are the release's, so that the
engine takes its fused paths.
"""

import pytest
import torch
from h3_adapter_vllm import install_h3_rollout
from h3_adapter_vllm.testing import engine as tiny
from h3_kernels.projection import projection
from h3_kernels.row_parallel import row_parallel
from h3_kernels.testing.tiny import SMALL

DEVICE = "cuda"
SCOPES = ("linears", "projections", "model")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings(
        "default"
    ),  # the engines' CUDA builds warn; what they say is not what is tested
]


@pytest.fixture
def model(engine):
    built = engine.build(SMALL, device=DEVICE)
    engine.randomise(built)
    return built


def request(seed=1, rows=70):
    text, audio = rows // 5, rows // 10
    return tiny.request(seed, text=text, audio=audio, video=rows - text - audio, config=SMALL)


def differing(a, b):
    kinds = {4: torch.int32, 2: torch.int16}
    pairs = [(x.contiguous(), y.contiguous()) for x, y in zip(a, b, strict=True)]
    return sum(int((x.view(kinds[x.itemsize]) != y.view(kinds[y.itemsize])).sum()) for x, y in pairs)


@pytest.mark.parametrize("rows", [1, 70, 333])
def test_bound_linears_are_h3_kernels_and_row_invariant(model, rows):
    others = 57
    with install_h3_rollout(model, scope="projections") as handle, torch.no_grad():
        for name, layer in handle.linears.items():
            x = torch.randn(rows + others, layer.input_size, device=DEVICE).to(layer.weight.dtype)
            together, _ = layer(x)
            alone, _ = layer(x[others:])
            direct = row_parallel if type(layer).__name__ == "RowParallelLinear" else projection
            assert differing([together], [direct(x, layer.weight, layer.bias)]) == 0, name
            assert differing([together[others:]], [alone]) == 0, name


@pytest.mark.parametrize("scope", SCOPES)
def test_report_names_a_proven_provider_for_every_bound_node(model, engine, scope):
    with install_h3_rollout(model, scope=scope) as handle:
        engine.velocities(model, [request()])
        report = handle.report()
    assert not report.refused()
    linears = [
        state
        for state in report.bound().values()
        if state.contract.startswith(("h3-projection", "h3-parallel"))
    ]
    assert len(linears) == (16 if scope == "linears" else 26)
    assert all(state.probe.ok for state in linears)


@pytest.mark.parametrize("scope", SCOPES)
def test_forwards_repeat_and_removal_restores(model, engine, scope):
    stock = engine.velocities(model, [request()])
    with install_h3_rollout(model, scope=scope):
        bound = engine.velocities(model, [request()])
        assert differing(bound, engine.velocities(model, [request()])) == 0
    assert differing(stock, engine.velocities(model, [request()])) == 0
    for a, b in zip(stock, bound, strict=True):
        assert (a - b).norm() <= 2e-2 * a.norm()


def test_whole_model_is_invariant_to_padding_and_packing(model, engine):
    requests = [request(seed=1, rows=70), request(seed=2, rows=333)]
    with install_h3_rollout(model, scope="model"):
        alone = [engine.velocities(model, [r]) for r in requests]
        assert differing(alone[0], engine.velocities(model, requests[:1], padding=57)) == 0
        both = tuple(torch.cat(streams) for streams in zip(*alone, strict=True))
        assert differing(both, engine.velocities(model, requests)) == 0


@pytest.mark.parametrize("scope", SCOPES)
def test_a_captured_forward_replays_the_eager_bits(model, engine, scope):
    """Also after the weights changed in place: a graph reads them where they are."""
    inputs = engine.forward_inputs([request()], device=DEVICE)
    with install_h3_rollout(model, scope=scope), torch.no_grad():
        for _ in range(3):
            eager = model(**inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = model(**inputs)
        graph.replay()
        assert differing(outputs, eager) == 0
        model.blocks[0].mlp.fc2.weight.mul_(2)
        graph.replay()
        assert differing(outputs, model(**inputs)) == 0
        assert differing(outputs, eager) > 0


def test_audit_counts_against_the_engines_own_linears(model, engine):
    stock = engine.velocities(model, [request()])
    with install_h3_rollout(model, mode="audit", scope="projections") as handle:
        assert differing(stock, engine.velocities(model, [request()])) == 0
        assert all(row.compared > 0 for row in handle.audit())
