"""Tensor parallelism: the same bytes at tp 1, 2, 4 and 8, in real gloo groups."""

import pytest
import torch
from h3_adapter_vllm import InstallError, handle_of, install_h3_rollout
from h3_adapter_vllm.testing import engine as tiny
from h3_kernels.collectives import TorchDistributedCollective

pytestmark = pytest.mark.engine

DEGREES = (2, 4, 8)


def loaded(path):
    model = tiny.build()
    assert model.load_weights(torch.load(path).items()) == set(model.state_dict())
    return model


def velocities(path, scope, padding=0):
    """Worker: velocities of one forward, bound to ``scope`` (None: the engine as shipped)."""
    model = loaded(path)
    if scope is not None:
        install_h3_rollout(model, scope=scope)
    return [t.numpy() for t in tiny.velocities(model, [tiny.request()], padding=padding)]


def bound_outputs(path, bound):
    """Worker: every linear on its own, on inputs all degrees share; outputs whole, by name."""
    model = loaded(path)
    handle = install_h3_rollout(model, scope="projections")
    layers = handle.linears
    if not bound:
        handle.remove()
    return {name: whole_output(layer) for name, layer in layers.items()}


def whole_output(layer):
    """The layer's output on all ranks' columns, in the order of the unsharded weight."""
    from vllm.distributed import tensor_model_parallel_all_gather

    x = torch.randn(6, layer.input_size, generator=torch.Generator().manual_seed(7)).to(layer.weight.dtype)
    if getattr(layer, "input_is_parallel", False):
        width = layer.input_size_per_partition
        x = x[:, layer.tp_rank * width : (layer.tp_rank + 1) * width].contiguous()
    y, _ = layer(x)
    if not getattr(layer, "gather_output", True):
        parts = y.split(layer.output_partition_sizes, -1)
        y = torch.cat([tensor_model_parallel_all_gather(part.contiguous()) for part in parts], -1)
    return y.float().numpy()


def report_of(path):
    """Worker: the report after a forward, and what the engine's all-reduce was asked for."""
    from unittest import mock

    from vllm.distributed import get_tp_group

    model = loaded(path)
    group = get_tp_group()
    with (
        install_h3_rollout(model, scope="linears") as handle,
        mock.patch.object(group, "all_reduce", wraps=group.all_reduce) as spy,
    ):
        tiny.velocities(model, [tiny.request()])
        shapes = [tuple(call.args[0].shape) for call in spy.call_args_list]
        return str(handle.report()), len(handle.report().bound()), shapes


def refusals(path):
    """Worker: messages of installs that do not fit this group."""
    from h3_kernels.collectives import LocalCollective

    model = loaded(path)
    messages = []
    for arguments in ({"tp": 1}, {"collective": LocalCollective()}, {"contract": "h3-parallel-v1-u1"}):
        with pytest.raises(InstallError) as caught:
            install_h3_rollout(model, **{"scope": "linears", **arguments})
        messages.append(str(caught.value))
    model.blocks[0].mlp.fc2.reduce_results = False
    with pytest.raises(InstallError) as caught:
        install_h3_rollout(model, scope="linears")
    return [*messages, str(caught.value)]


def disagreement(path, arguments):
    """Worker: the refusal when each rank installs with its own arguments, and whether anything was left bound."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tp_group

    model = loaded(path)
    mine = arguments[get_tensor_model_parallel_rank()]
    if mine and "form" in mine:
        mine = {"collective": TorchDistributedCollective(get_tp_group().cpu_group, form=mine["form"])}
    if mine is None:
        del model.blocks[1].mlp.fc2.weight
        mine = {}
    with pytest.raises(InstallError) as caught:
        install_h3_rollout(model, **{"scope": "linears", **mine})
    return str(caught.value), handle_of(model) is None


def fused_collective(path):
    """Worker: the refusal under vLLM's fused all-reduce and norm."""
    from vllm.config import get_current_vllm_config

    model = loaded(path)
    get_current_vllm_config().compilation_config.pass_config.fuse_allreduce_rms = True
    with pytest.raises(InstallError) as caught:
        install_h3_rollout(model, scope="linears")
    return str(caught.value)


def engine_sequence_parallel(path, tp, sequence):
    """Worker: velocities under the engine's own Ulysses hooks, and how many rows a block saw."""
    from vllm_omni.diffusion.config import set_current_diffusion_config
    from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig
    from vllm_omni.diffusion.distributed.sp_plan import SequenceParallelConfig
    from vllm_omni.diffusion.forward_context import set_forward_context
    from vllm_omni.diffusion.hooks.sequence_parallel import apply_sequence_parallel

    parallel = DiffusionParallelConfig(
        ulysses_degree=sequence, sequence_parallel_size=sequence, tensor_parallel_size=tp
    )
    config = OmniDiffusionConfig(model="tiny", parallel_config=parallel)
    with set_forward_context(omni_diffusion_config=config), set_current_diffusion_config(config):
        model = tiny.build(ulysses_degree=sequence)
        model.load_weights(torch.load(path).items())
        apply_sequence_parallel(model, SequenceParallelConfig(ulysses_degree=sequence), model._sp_plan)
        handle = install_h3_rollout(model, scope="projections")
        outputs = [t.numpy() for t in tiny.velocities(model, [tiny.request()])]
    return outputs, handle.linears["blocks.0.mlp.fc1"].quant_method.ran.rows


def different(a, b):
    return sum(int((x.view("i4") != y.view("i4")).sum()) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def one(engine, release):
    """Velocities at tp=1 in this process, by scope."""

    def run(scope):
        model = engine.build()
        model.load_weights(release.items())
        if scope is not None:
            install_h3_rollout(model, scope=scope)
        return [t.numpy() for t in engine.velocities(model, [engine.request()])]

    return {scope: run(scope) for scope in (None, "linears", "projections")}


@pytest.mark.parametrize("tp", DEGREES)
def test_velocities_have_the_bytes_of_tp_1(pool, weights, one, tp):
    """Every linear bound: all ranks return tp=1's velocities bit for bit."""
    for rank_result in pool.run(velocities, weights, "projections", tp=tp):
        assert different(rank_result, one["projections"]) == 0


@pytest.mark.parametrize("tp", DEGREES)
def test_without_the_adapter_they_differ(pool, weights, one, tp):
    """Negative twin; and binding the block linears alone leaves the last bits of the engine's fp32 projections."""
    stock = pool.run(velocities, weights, None, tp=tp)[0]
    assert different(stock, one[None]) > 50
    assert max(abs(a - b).max() for a, b in zip(stock, one[None], strict=True)) > 1e-3
    linears = pool.run(velocities, weights, "linears", tp=tp)[0]
    assert max(abs(a - b).max() for a, b in zip(linears, one["linears"], strict=True)) < 1e-5


@pytest.mark.parametrize("tp", DEGREES)
def test_every_bound_linear_has_the_bytes_of_tp_1(pool, weights, tp):
    """Node by node, on equal inputs; its twin is the engine's own linears, most of whose row-parallel sums differ."""
    (expected,) = pool.run(bound_outputs, weights, True, tp=1)
    for rank_result in pool.run(bound_outputs, weights, True, tp=tp):
        assert rank_result.keys() == expected.keys()
        for name, y in rank_result.items():
            assert different([y], [expected[name]]) == 0, name
    (stock,) = pool.run(bound_outputs, weights, False, tp=1)
    sharded = pool.run(bound_outputs, weights, False, tp=tp)[0]
    rows = [name for name in stock if name.endswith(("out_proj", "fc2", "proj_out"))]
    assert sum(different([sharded[name]], [stock[name]]) > 0 for name in rows) > len(rows) // 2


def test_report_at_tp_names_the_degree_and_the_engine_keeps_no_row_parallel_sum(pool, weights):
    """The engine's all-reduce serves the time embedder alone ([2 timesteps, 32]); the report says which is whose."""
    for rank, (text, bound, shapes) in enumerate(pool.run(report_of, weights, tp=4)):
        assert f"tp=4, auto TorchDistributedCollective, rank {rank}, 1 forwards" in text
        assert bound == 16
        assert shapes == [(2, 32)]
        assert "time_embedder.proj_out" in text


def test_groups_that_do_not_fit_are_refused(pool, weights):
    for messages in pool.run(refusals, weights, tp=2):
        degree, collective, units, owned = messages
        assert "built for tp=2, but tp=1 was asked for" in degree
        assert "collective is rank 0 of 1, the call says" in collective
        assert "tp=2 does not divide 1 units" in units
        assert "blocks.0.mlp.fc2: reduce_results is already False" in owned


@pytest.mark.parametrize(
    "other",
    [{"contract": "h3-parallel-v1-u4"}, {"mode": "audit"}, {"scope": "projections"}, {"form": "gather"}],
)
def test_ranks_that_would_bind_differently_all_refuse(pool, weights, other):
    """Unequal unit counts would mix partial sums of two trees in silence; unequal collectives would never finish."""
    results = pool.run(disagreement, weights, [{}, other], tp=2)
    for rank, (message, clean) in enumerate(results):
        assert f"rank {1 - rank} of tp=2 installs something else than" in message
        assert clean


def test_one_rank_that_cannot_bind_stops_the_others(pool, weights):
    """Instead of leaving them waiting in the first forward."""
    (ours, clean), (theirs, _) = pool.run(disagreement, weights, [{}, None], tp=2)
    assert "rank 1 of tp=2 refused; its own error says why" in ours
    assert clean
    assert "blocks.1.mlp.fc2: has no weight" in theirs


@pytest.mark.parametrize("contract", ["h3-parallel-v1-u16", "h3-parallel-v1-u1"])
def test_one_rank_whose_contract_does_not_exist_or_fit_stops_the_others(pool, weights, contract):
    (ours, clean), (theirs, _) = pool.run(disagreement, weights, [{}, {"contract": contract}], tp=2)
    assert "rank 1 of tp=2 refused; its own error says why" in ours
    assert clean
    assert "h3-parallel-v1-u16" in theirs or "tp=2 does not divide 1 units" in theirs


def test_fused_all_reduce_is_refused(pool, weights):
    for message in pool.run(fused_collective, weights, tp=2):
        assert "vLLM pass fuse_allreduce_rms is on" in message


@pytest.mark.parametrize(("tp", "sequence"), [(1, 2), (2, 2), (2, 4)])
def test_the_engines_sequence_parallelism_keeps_the_bytes(pool, weights, one, tp, sequence):
    """Rows sharded by the engine's hooks, heads exchanged around its attention, every linear bound."""
    for outputs, rows in pool.run(engine_sequence_parallel, weights, tp, sequence, tp=tp, sequence=sequence):
        assert rows == 20 // sequence
        assert different(outputs, one["projections"]) == 0
