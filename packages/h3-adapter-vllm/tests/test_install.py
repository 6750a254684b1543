"""Install and remove: what is bound, what stays as it was, and what a second install does."""

import json
import logging

import pytest
import torch
from h3_adapter_vllm import InstallError, RemoveError, handle_of, install_h3_rollout
from h3_kernels.binding import Bound, External
from h3_kernels.errors import ModeError
from h3_kernels.projection import projection
from h3_kernels.row_parallel import row_parallel

pytestmark = pytest.mark.engine


def linears(model):
    """Every linear layer of the engine by name, inside LoRA wrappers too."""
    from vllm.model_executor.layers.linear import LinearBase

    return {name: m for name, m in model.named_modules() if isinstance(m, LinearBase)}


def bits(outputs):
    return [t.contiguous().view(torch.int32 if t.dtype == torch.float32 else torch.int16) for t in outputs]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


def test_release_has_208_linears_in_blocks_and_266_in_all(engine):
    from h3_adapter_vllm.survey import find_sites
    from h3_kernels.modes import Scope

    model = engine.build({}, device="meta")  # no sizes: the engine's defaults are the release
    assert len(find_sites(model, Scope.LINEARS)) == 208
    assert len(find_sites(model, Scope.PROJECTIONS)) == 266
    assert len(linears(model)) == 266


@pytest.mark.parametrize("scope", ["linears", "projections"])
def test_bound_linear_returns_the_contract_bits_in_the_engine_convention(model, scope):
    """Each bound layer returns (output, None) with the bits of h3-kernels called directly."""
    with install_h3_rollout(model, scope=scope) as handle:
        bound = set(handle.linears)
        assert len(bound) == (16 if scope == "linears" else 26)
        for name in bound:
            layer = model.get_submodule(name)
            x = torch.randn(5, layer.input_size).to(layer.weight.dtype)
            output, bias = layer(x)
            assert bias is None
            row = type(layer).__name__ == "RowParallelLinear"
            direct = (row_parallel if row else projection)(x, layer.weight, layer.bias)
            assert same([output], [direct]), name


def test_bound_linears_are_within_rounding_of_the_engine(model, engine):
    """Binding changes the order of sums, not the function."""
    request = engine.request()
    before = engine.velocities(model, [request])
    with install_h3_rollout(model, scope="projections"):
        after = engine.velocities(model, [request])
    for a, b in zip(before, after, strict=True):
        assert (a - b).abs().max() <= 4e-2 * a.abs().max()


def test_output_is_a_new_tensor_each_call(model):
    """LoRA wrappers add into what the quant method returns, so it may alias nothing."""
    with install_h3_rollout(model, scope="linears"):
        layer = model.blocks[0].mlp.fc2
        x = torch.randn(3, layer.input_size, dtype=torch.bfloat16)
        first, _ = layer(x)
        kept = first.clone()
        second, _ = layer(x)
        second.add_(1)
        assert torch.equal(first, kept)


def test_parameters_and_names_do_not_change(model):
    before = {name: (id(p), vars(p).copy()) for name, p in model.named_parameters()}
    names = list(model.state_dict())
    with install_h3_rollout(model, scope="linears"):
        assert {name: (id(p), vars(p).copy()) for name, p in model.named_parameters()} == before
        assert list(model.state_dict()) == names


@pytest.mark.parametrize("mode", ["strict", "audit"])
def test_remove_restores_the_engine_bit_for_bit(model, engine, mode):
    from vllm_omni.diffusion.lora.layers import DiffusionBaseLinearLayerWithLoRA

    request = engine.request()
    methods = {name: layer.quant_method for name, layer in linears(model).items()}
    reduces = {
        name: layer.reduce_results
        for name, layer in linears(model).items()
        if hasattr(layer, "reduce_results")
    }
    attributes, lora_apply = set(vars(model)), DiffusionBaseLinearLayerWithLoRA.apply
    before = engine.velocities(model, [request])
    handle = install_h3_rollout(model, mode=mode, scope="linears")
    engine.velocities(model, [request])
    handle.remove()
    handle.remove()
    assert all(layer.quant_method is methods[name] for name, layer in linears(model).items())
    assert all(model.get_submodule(name).reduce_results is value for name, value in reduces.items())
    assert set(vars(model)) == attributes
    assert not model._forward_pre_hooks
    assert DiffusionBaseLinearLayerWithLoRA.apply is lora_apply
    assert handle_of(model) is None
    assert same(before, engine.velocities(model, [request]))


def test_context_manager_removes_after_an_error(model):
    with pytest.raises(ZeroDivisionError), install_h3_rollout(model, scope="linears"):
        raise ZeroDivisionError
    assert handle_of(model) is None


def test_same_install_again_returns_the_same_handle(model):
    with install_h3_rollout(model, scope="linears") as handle:
        assert install_h3_rollout(model, scope="linears") is handle
        assert handle_of(model) is handle


@pytest.mark.parametrize(
    "other", [{"mode": "audit"}, {"contract": "h3-parallel-v1-u4"}, {"scope": "projections"}]
)
def test_different_install_again_is_refused_and_changes_nothing(model, other):
    with install_h3_rollout(model, scope="linears") as handle:
        methods = {name: layer.quant_method for name, layer in linears(model).items()}
        with pytest.raises(InstallError, match="already installed with other arguments"):
            install_h3_rollout(model, **{"scope": "linears", **other})
        assert handle.installed
        assert all(layer.quant_method is methods[name] for name, layer in linears(model).items())


def test_half_patched_model_is_refused_and_removable(model, engine):
    """One linear lost its contract method: a second install says which, remove restores the others and says so."""
    layer = model.blocks[0].mlp.fc1
    original = layer.quant_method
    handle = install_h3_rollout(model, scope="linears")
    layer.quant_method = original
    with pytest.raises(InstallError, match=r"half installed: blocks\.0\.mlp\.fc1 was replaced"):
        install_h3_rollout(model, scope="linears")
    with pytest.raises(RemoveError, match=r"1 bindings .* \(first: blocks\.0\.mlp\.fc1\)"):
        handle.remove()
    assert all(type(m.quant_method).__name__ == "UnquantizedLinearMethod" for m in linears(model).values())
    install_h3_rollout(model, scope="linears").remove()


def test_weights_loaded_again_are_the_ones_used(model, engine, release):
    """load_weights into a bound model equals a fresh model with those weights, bound."""
    request = engine.request()
    changed = {name: tensor * 1.25 for name, tensor in release.items()}
    fresh = engine.build()
    fresh.load_weights(changed.items())
    with install_h3_rollout(model, scope="linears"), install_h3_rollout(fresh, scope="linears"):
        stale = engine.velocities(model, [request])
        assert model.load_weights(changed.items()) == set(model.state_dict())
        assert same(engine.velocities(model, [request]), engine.velocities(fresh, [request]))
        assert not same(stale, engine.velocities(model, [request]))


def test_install_before_cpu_packing_keeps_the_weights_until_removed(load, engine):
    """On a CPU vLLM packs weights away after loading. Bound, they stay; removed, the engine is what it would be."""
    request = engine.request()
    packed, model = load(plain_linears=False), load(plain_linears=False)
    handle = install_h3_rollout(model, scope="projections")
    for m in (packed, model):
        for layer in linears(m).values():
            layer.quant_method.process_weights_after_loading(layer)
    assert model.blocks[0].mlp.fc1.weight.numel() > 0
    engine.velocities(model, [request])
    handle.remove()
    assert model.blocks[0].mlp.fc1.weight.numel() == 0
    assert same(engine.velocities(packed, [request]), engine.velocities(model, [request]))
    with pytest.raises(InstallError, match="vLLM packed it for the CPU; install before process_weights"):
        install_h3_rollout(model, scope="linears")


def test_off_touches_nothing(model):
    before = {name: layer.quant_method for name, layer in linears(model).items()}
    attributes = dict(vars(model))
    with install_h3_rollout(model, mode="off", scope="linears") as handle:
        assert vars(model) == attributes
        assert {name: layer.quant_method for name, layer in linears(model).items()} == before
        assert not handle.installed
        assert all(isinstance(handle.report()[node], External) for node in handle.report())


@pytest.mark.parametrize("word", ["off", "audit", "strict"])
def test_environment_overrides_the_argument(model, monkeypatch, word):
    monkeypatch.setenv("H3_MODE", word)
    with install_h3_rollout(model, mode="strict" if word != "strict" else "audit", scope="linears") as handle:
        assert handle.mode == word
        assert handle.installed == (word != "off")


def test_unknown_mode_is_an_error_naming_its_origin(model, monkeypatch):
    with pytest.raises(ModeError, match="argument mode 'fast'"):
        install_h3_rollout(model, mode="fast", scope="linears")
    monkeypatch.setenv("H3_MODE", "fast")
    with pytest.raises(ModeError, match="H3_MODE mode 'fast'"):
        install_h3_rollout(model, scope="linears")


def test_one_log_line_per_install(model, caplog):
    with caplog.at_level(logging.INFO, logger="h3_adapter_vllm"), install_h3_rollout(model, scope="linears"):
        install_h3_rollout(model, scope="linears")
    (record,) = caplog.records
    assert record.getMessage() == (
        "h3 contracts bound to MiniMaxH3DiTModel: mode strict, scope linears, h3-parallel-v1-u8, provider auto, tp=1"
    )


def test_report_reads_back_what_ran(model, engine):
    with install_h3_rollout(model, scope="linears") as handle:
        assert len(handle.report().refused()) == 16
        assert "has not run" in handle.report()["blocks.0.mlp.fc2"].reason
        engine.velocities(model, [engine.request()])
        report = handle.report()
        assert len(report.bound()) == 16
        assert report["blocks.1.attn.out_proj"] == Bound(
            "h3-parallel-v1-u8", "reference", report["blocks.1.attn.out_proj"].probe
        )
        assert report["blocks.0.attn.attention"] == External("SDPA attention")
        document = json.loads(report.to_json())
        assert [node["node"] for node in document["nodes"]] == list(report)
        assert "blocks.0.mlp.fc2" in str(report)


def test_report_refuses_a_linear_that_something_bypasses(model, engine):
    """A linear that ran before but not in the last forward, or whose method or module was replaced, is not Bound."""
    request = engine.request()
    with install_h3_rollout(model, scope="linears") as handle:
        engine.velocities(model, [request])
        mlp = model.blocks[1].mlp
        mlp.fc1.forward = lambda x: (torch.nn.functional.linear(x, mlp.fc1.weight), None)
        engine.velocities(model, [request])
        assert "did not run in the last forward" in handle.report()["blocks.1.mlp.fc1"].reason
        del mlp.fc1.forward
        method, mlp.fc2.quant_method = mlp.fc2.quant_method, mlp.fc2.quant_method.provided
        assert "replaced by a UnquantizedLinearMethod" in handle.report()["blocks.1.mlp.fc2"].reason
        mlp.fc2.quant_method = method
        kept, model.blocks[0].mlp.fc2 = model.blocks[0].mlp.fc2, mlp.fc2
        assert "module was replaced" in handle.report()["blocks.0.mlp.fc2"].reason
        model.blocks[0].mlp.fc2 = kept
        engine.velocities(model, [request])
        assert not handle.report().refused()
