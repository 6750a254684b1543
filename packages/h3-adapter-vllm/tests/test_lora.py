"""LoRA: vLLM-Omni's wrappers around bound linears, put on and taken off at any time, at any tp."""

import json

import pytest
import torch
from h3_adapter_vllm import BoundModelError, install_h3_rollout
from h3_adapter_vllm.testing import engine as tiny
from h3_kernels.binding import Bound, External
from h3_kernels.lora import LoraSlice, lora_slices
from h3_kernels.projection import projection
from h3_kernels.row_parallel import row_parallel
from safetensors.torch import save_file
from torch import nn

pytestmark = pytest.mark.engine

TARGETS = [
    f"blocks.{i}.{s}" for i in (0, 1) for s in ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
]
PACKED = {"qkv_proj": ["q", "k", "v"], "fc1": ["0", "1"]}
RANK = 8


def adapter(name, layer, rank=RANK):
    """Random whole A [r, K] and B [N / slices, r] per slice of a linear."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    slices = len(PACKED.get(name.rpartition(".")[2], "x"))
    a = [torch.randn(rank, layer.input_size, generator=generator).bfloat16() for _ in range(slices)]
    b = [
        torch.randn(layer.output_size // slices, rank, generator=generator).bfloat16() / 8
        for _ in range(slices)
    ]
    return a, b


def wrap(model, targets=TARGETS, activate=True):
    """Put the engine's LoRA wrappers around ``targets`` as its manager does, and activate an adapter on each."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.utils import replace_submodule
    from vllm_omni.diffusion.lora.utils import from_layer_diffusion

    config = LoRAConfig(max_lora_rank=RANK, max_loras=1, max_cpu_loras=1, lora_dtype=torch.bfloat16)
    wrappers = {}
    for name in targets:
        layer = model.get_submodule(name)
        packed = PACKED.get(name.rpartition(".")[2], [])
        wrappers[name] = replace_submodule(model, name, from_layer_diffusion(layer, 1, config, packed))
        if activate:
            a, b = adapter(name, layer)
            wrappers[name].set_lora(0, a if packed else a[0], b if packed else b[0])
    return wrappers


def unwrap(model, wrappers):
    from vllm.lora.utils import replace_submodule

    for name, wrapper in wrappers.items():
        replace_submodule(model, name, wrapper.base_layer)


def direct(name, layer, x, tp_free=True):
    """The strict linear with its LoRA term, from h3-kernels alone."""
    row = name.endswith(("out_proj", "fc2"))
    y = (row_parallel if row else projection)(x, layer.weight)
    a, b = adapter(name, layer)
    starts = [i * len(b[0]) for i in range(len(b))]
    slices = [LoraSlice(*pair, start, 1.0) for *pair, start in zip(a, b, starts, strict=True)]
    from h3_kernels.lora import ColumnStyle, RowStyle

    return lora_slices(x, y, slices, style=RowStyle() if row else ColumnStyle())


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def request_(engine):
    return engine.request()


@pytest.mark.parametrize("wrap_first", [True, False])
def test_wrapped_linear_has_the_strict_term_whenever_it_was_wrapped(model, wrap_first):
    if wrap_first:
        wrappers = wrap(model)
        handle = install_h3_rollout(model, scope="linears")
    else:
        handle = install_h3_rollout(model, scope="linears")
        wrappers = wrap(model)
    for name, wrapper in wrappers.items():
        x = torch.randn(5, wrapper.base_layer.input_size, dtype=torch.bfloat16)
        output, bias = wrapper(x)
        assert bias is None
        assert torch.equal(output, direct(name, wrapper.base_layer, x)), name
    handle.remove()


def test_engines_own_lora_term_has_other_bits(model):
    """Negative twin: without the adapter the wrapper adds its term in another order and rounding."""
    wrappers = wrap(model)
    different = 0
    for name, wrapper in wrappers.items():
        x = torch.randn(5, wrapper.base_layer.input_size, dtype=torch.bfloat16)
        different += int((wrapper(x)[0] != direct(name, wrapper.base_layer, x)).sum())
    assert different > 0


def test_wrap_and_unwrap_under_an_install_leave_the_bound_bits(model, engine, request_):
    """Wrapped and inactive, suspended, reset or unwrapped: the base contract's bits; active: others."""
    with install_h3_rollout(model, scope="linears") as handle:
        base = engine.velocities(model, [request_])
        wrappers = wrap(model, activate=False)
        assert same(engine.velocities(model, [request_]), base)
        unwrap(model, wrappers)
        wrappers = wrap(model)
        tuned = engine.velocities(model, [request_])
        assert not same(tuned, base)
        for wrapper in wrappers.values():
            wrapper.suspend_lora()
        assert same(engine.velocities(model, [request_]), base)
        for wrapper in wrappers.values():
            wrapper.resume_lora()
        assert same(engine.velocities(model, [request_]), tuned)
        for wrapper in wrappers.values():
            wrapper.reset_lora(0)
        assert same(engine.velocities(model, [request_]), base)
        unwrap(model, wrappers)
        assert same(engine.velocities(model, [request_]), base)
        assert not handle.report().refused()


def test_report_names_the_lora_term(model, engine, request_):
    wrappers = wrap(model)
    with install_h3_rollout(model, scope="linears") as handle:
        engine.velocities(model, [request_])
        report = handle.report()
        assert {name for name in report if name.endswith(".lora")} == {f"{name}.lora" for name in TARGETS}
        assert isinstance(report["blocks.0.mlp.fc1.lora"], Bound)
        wrappers["blocks.0.mlp.fc1"].suspend_lora()
        assert "blocks.0.mlp.fc1.lora" not in handle.report()
    with install_h3_rollout(model, mode="audit", scope="linears") as handle:
        engine.velocities(model, [request_])
        node = handle.report()["blocks.0.mlp.fc2.lora"]
        assert node == External("vLLM-Omni DiffusionRowParallelLinearWithLoRA")


def test_remove_under_wrappers_restores_the_engines_lora(model, engine, request_):
    wrap(model)
    before = engine.velocities(model, [request_])
    with install_h3_rollout(model, scope="linears"):
        assert not same(engine.velocities(model, [request_]), before)
    assert same(engine.velocities(model, [request_]), before)


def test_seam_stays_while_another_model_is_bound(load, engine, request_):
    first, second = load(), load()
    wrap(second)
    with install_h3_rollout(second, scope="linears"):
        expected = engine.velocities(second, [request_])
        install_h3_rollout(first, scope="linears").remove()
        assert same(engine.velocities(second, [request_]), expected)


def test_wrappers_of_unbound_linears_are_the_engines(load, engine, request_):
    bound, free = load(), load()
    wrap(free)
    expected = engine.velocities(free, [request_])
    with install_h3_rollout(bound, scope="linears"):
        assert same(engine.velocities(free, [request_]), expected)


def test_audit_returns_the_engines_lora_bits_and_compares_the_base(model, engine, request_):
    wrap(model)
    before = engine.velocities(model, [request_])
    with install_h3_rollout(model, mode="audit", scope="linears") as handle:
        assert same(engine.velocities(model, [request_]), before)
        rows = {row.node: row for row in handle.audit()}
    assert rows["blocks.0.mlp.fc2"].compared == 20 * 80
    assert rows["blocks.0.mlp.fc2"].differing < 20


def test_zero_adapter_is_the_base_bit_for_bit(model, engine, request_):
    with install_h3_rollout(model, scope="linears"):
        base = engine.velocities(model, [request_])
        for name, wrapper in wrap(model, activate=False).items():
            a, b = adapter(name, wrapper.base_layer)
            b = [torch.zeros_like(t) for t in b]
            packed = len(a) > 1
            wrapper.set_lora(0, a if packed else a[0], b if packed else b[0])
        assert same(engine.velocities(model, [request_]), base)


def test_fully_sharded_adapter_is_refused_at_the_call(model):
    from dataclasses import replace

    (wrapper,) = wrap(model, ["blocks.0.mlp.fc2"]).values()
    wrapper.lora_config = replace(wrapper.lora_config, fully_sharded_loras=True)
    with install_h3_rollout(model, scope="linears"):
        wrapper(torch.randn(2, 384, dtype=torch.bfloat16))  # tp=1: nothing is sharded
        wrapper.tp_size = 2
        with pytest.raises(BoundModelError, match=r"blocks\.0\.mlp\.fc2: fully sharded LoRA at tp > 1"):
            wrapper(torch.randn(2, 384, dtype=torch.bfloat16))


# The engine's own manager: files, ranks, scales and switching.


def peft_folder(folder, model, rank):
    """A PEFT adapter on to_q, to_k, to_v, out_proj and fc2 of the main blocks; alpha = 2 rank, a power-of-two scale."""
    folder.mkdir()
    tensors = {}
    for name in (n for n in TARGETS if not n.endswith("fc1")):
        a, b = adapter(name, model.get_submodule(name), rank)
        leaves = (
            ["attn.to_q", "attn.to_k", "attn.to_v"] if name.endswith("qkv_proj") else [name.split(".", 2)[2]]
        )
        for leaf, a_, b_ in zip(leaves, a, b, strict=True):
            path = f"base_model.model.transformer.{'.'.join(name.split('.')[:2])}.{leaf}"
            tensors |= {f"{path}.lora_A.weight": a_, f"{path}.lora_B.weight": b_}
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = ["to_q", "to_k", "to_v", "out_proj", "fc2"]
    config = {
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": targets,
        "peft_type": "LORA",
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_the_engines_manager_drives_bound_linears(model, engine, request_, tmp_path):
    """Load, activate, switch rank, deactivate through DiffusionLoRAManager: each state equals a fresh install in it."""
    from vllm.lora.request import LoRARequest
    from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager

    folders = [peft_folder(tmp_path / f"r{rank}", model, rank) for rank in (4, 16)]
    pipeline = nn.Module()
    pipeline.transformer = model
    with install_h3_rollout(model, scope="linears") as handle:
        base = engine.velocities(model, [request_])
        manager = DiffusionLoRAManager(pipeline, torch.device("cpu"), torch.bfloat16, max_cached_adapters=2)
        states = []
        for number, folder in enumerate(folders, start=1):
            manager.set_active_adapter(LoRARequest(f"a{number}", number, str(folder)))
            states.append(engine.velocities(model, [request_]))
        assert len([name for name in handle.report() if name.endswith(".lora")]) == 6
        manager.set_active_adapter(LoRARequest("a1", 1, str(folders[0])))
        assert same(engine.velocities(model, [request_]), states[0])
        manager.set_active_adapter(None)
        assert same(engine.velocities(model, [request_]), base)
    assert not same(states[0], states[1])
    assert not same(states[0], base)


# Tensor parallelism.


def tuned_velocities(path, mode):
    """Worker: velocities with an adapter on every target; ``mode`` None is the engine as shipped."""
    model = tiny.build()
    model.load_weights(torch.load(path).items())
    if mode is not None:
        install_h3_rollout(model, scope="projections", mode=mode)
    wrap(model)
    return [t.numpy() for t in tiny.velocities(model, [tiny.request()])]


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_lora_velocities_have_the_bytes_of_tp_1(pool, weights, tp):
    """The row-parallel term is summed in tree order over ranks; its twin, the engine's, is not."""
    (expected,) = pool.run(tuned_velocities, weights, "strict", tp=1)
    for rank_result in pool.run(tuned_velocities, weights, "strict", tp=tp):
        assert all((a.view("i4") == b.view("i4")).all() for a, b in zip(rank_result, expected, strict=True))
    (stock_1,) = pool.run(tuned_velocities, weights, None, tp=1)
    stock = pool.run(tuned_velocities, weights, None, tp=tp)[0]
    assert any((a != b).any() for a, b in zip(stock, stock_1, strict=True))


def test_audit_under_lora_at_tp_2_returns_the_engines_bits(pool, weights):
    stock, audited = (pool.run(tuned_velocities, weights, mode, tp=2)[0] for mode in (None, "audit"))
    assert all((a == b).all() for a, b in zip(stock, audited, strict=True))
