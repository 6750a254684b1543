"""What the engine does around its linears keeps working: AdaLN cache, regional compile, condition masks."""

import pytest
import torch
from h3_adapter_vllm import install_h3_rollout

pytestmark = pytest.mark.engine


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_adaln_cache_hits_and_changes_no_bit(load, engine):
    """Scope linears leaves AdaLN to the engine, and its cache too."""
    cached, plain = load(adaln_cache=True), load()
    request = engine.request()
    engine.velocities(cached, [request])
    with install_h3_rollout(cached, scope="linears"), install_h3_rollout(plain, scope="linears"):
        expected = engine.velocities(plain, [request])
        hits = cached.adaln_cache.hits
        assert same(engine.velocities(cached, [request]), expected)
        assert cached.adaln_cache.hits == hits + 3  # two blocks and the final layer


def adaln_sync(model):
    """What a weight sync does: new rows through the parameter's own loader, which writes behind its version counter."""
    parameter = model.blocks[0].adaln_proj.linear.weight
    parameter.weight_loader(parameter, parameter.detach() * 1.5)


@pytest.mark.parametrize("mode", ["strict", "audit"])
@pytest.mark.parametrize("scope", ["projections", "model"])
def test_bound_adaln_projections_are_computed_in_every_forward(load, engine, scope, mode):
    """So a weight sync through the parameters' loaders cannot leave outputs of the old weights behind."""
    cached, plain = load(adaln_cache=True), load()
    request = engine.request()
    with (
        install_h3_rollout(cached, scope=scope, mode=mode) as handle,
        install_h3_rollout(plain, scope=scope, mode=mode),
    ):
        for model in (cached, plain):
            engine.velocities(model, [request])
            adaln_sync(model)
        assert same(engine.velocities(cached, [request]), engine.velocities(plain, [request]))
        assert not handle.report().refused()
    assert cached.adaln_cache.max_bytes > 0
    assert same(engine.velocities(cached, [request]), engine.velocities(plain, [request]))


def test_the_engines_cache_serves_old_weights_after_such_a_sync(load, engine):
    """Negative twin: as shipped, the cache hits on what it computed before."""
    cached, plain = load(adaln_cache=True), load()
    request = engine.request()
    for model in (cached, plain):
        engine.velocities(model, [request])
        adaln_sync(model)
    assert not same(engine.velocities(cached, [request]), engine.velocities(plain, [request]))


@pytest.mark.parametrize("compile_first", [True, False])
def test_regional_compile_keeps_the_bits_and_the_report(model, engine, compile_first):
    """The engine compiles its blocks before or after the install; bound linears stay eager islands in the graph."""
    from vllm_omni.diffusion.compile import regionally_compile

    request = engine.request()
    with install_h3_rollout(model, scope="linears"):
        expected = engine.velocities(model, [request])
    if compile_first:
        regionally_compile(model, backend="eager", dynamic=True)
    with install_h3_rollout(model, scope="linears") as handle:
        if not compile_first:
            regionally_compile(model, backend="eager", dynamic=True)
        for _ in range(2):
            assert same(engine.velocities(model, [request]), expected)
        assert len(handle.report().bound()) == 16
    torch.compiler.reset()


def test_condition_rows_are_masked_as_before(model, engine):
    kwargs = engine.forward_inputs([engine.request()])
    kwargs["update_mask"][:3] = 0
    with install_h3_rollout(model, scope="projections"), torch.no_grad():
        video, _ = model(**kwargs)
    assert not video[:3].any()
    assert video[3:].any()


def test_unknown_keyword_is_still_refused(model, engine):
    with install_h3_rollout(model, scope="linears"), pytest.raises(TypeError, match="unexpected kwargs"):
        model(**engine.forward_inputs([engine.request()]), surprise=1)
