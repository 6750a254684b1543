"""What the engine does around its linears keeps working: AdaLN cache, regional compile, condition masks."""

import pytest
import torch
from h3_adapter_vllm import install_h3_rollout

pytestmark = pytest.mark.engine


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("scope", ["linears", "projections"])
def test_adaln_cache_hits_and_changes_no_bit(load, engine, scope):
    cached, plain = load(adaln_cache=True), load()
    request = engine.request()
    engine.velocities(cached, [request])  # fills it with the engine's own results
    with install_h3_rollout(cached, scope=scope), install_h3_rollout(plain, scope=scope):
        expected = engine.velocities(plain, [request])
        assert same(engine.velocities(cached, [request]), expected)
        hits = cached.adaln_cache.hits
        assert same(engine.velocities(cached, [request]), expected)
        assert cached.adaln_cache.hits == hits + 3  # two blocks and the final layer


def test_adaln_cache_filled_by_the_contract_is_not_served_after_removal(load, engine):
    cached, plain = load(adaln_cache=True), load()
    request = engine.request()
    expected = engine.velocities(plain, [request])
    with install_h3_rollout(cached, scope="projections"):
        engine.velocities(cached, [request])
    misses = cached.adaln_cache.misses
    assert same(engine.velocities(cached, [request]), expected)
    assert cached.adaln_cache.misses == misses + 3


@pytest.mark.parametrize("compile_first", [True, False])
def test_regional_compile_keeps_the_bits_and_the_report(model, engine, compile_first):
    """The engine compiles its blocks before or after the install; bound linears stay eager islands in the graph."""
    from vllm_omni.diffusion.compile import regionally_compile

    request = engine.request()
    with install_h3_rollout(model):
        expected = engine.velocities(model, [request])
    if compile_first:
        regionally_compile(model, backend="eager", dynamic=True)
    with install_h3_rollout(model) as handle:
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
    with install_h3_rollout(model), pytest.raises(TypeError, match="unexpected kwargs"):
        model(**engine.forward_inputs([engine.request()]), surprise=1)
