"""What trainers do to a model beside training it: copy it for an average, compile it, move its parameters."""

import copy

import pytest
import torch
from h3_adapter_diffusers.install import handle_of, install_h3_training
from h3_adapter_diffusers.testing.packings import fl2va
from h3_adapter_diffusers.testing.tiny import build, velocities

pytestmark = pytest.mark.engine

SCOPES = ["projections", "model"]


def same(a, b):
    return all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("scope", SCOPES)
def test_a_deep_copy_is_installed_and_has_weights_of_its_own(scope):
    """A moving average of the policy is such a copy."""
    model, request = build(), fl2va()
    handle = install_h3_training(model, scope=scope)
    reference = velocities(model, request)
    twin = copy.deepcopy(model)
    assert same(velocities(twin, request), reference)
    twin.transformer_blocks[0].ff.net[2].weight.data.zero_()
    assert not same(velocities(twin, request), reference)
    assert same(velocities(model, request), reference)
    handle_of(twin).remove()
    assert handle.installed
    assert same(velocities(model, request), reference)


@pytest.mark.parametrize("regional", [True, False], ids=["blocks", "model"])
@pytest.mark.parametrize("scope", SCOPES)
def test_torch_compile_changes_no_bit(scope, regional):
    """Bound linears, blocks in scope model, are eager islands; the backend is eager, since a CPU test
    compiles none."""
    model, request = build(), fl2va()
    reference_model = build()
    install_h3_training(reference_model, scope=scope)
    if regional:
        model.compile_repeated_blocks(backend="eager")
    install_h3_training(model, scope=scope)
    runner = model if regional else torch.compile(model, backend="eager")
    assert same(velocities(runner, request), velocities(reference_model, request))
    torch.compiler.reset()


@pytest.mark.parametrize("scope", SCOPES)
def test_weights_may_be_synced_under_an_install(scope):
    """Parameters are read at every call: an optimizer, a load_state_dict or a swap of the tensor is what runs
    next."""
    model, request = build(), fl2va()
    install_h3_training(model, scope=scope)
    other = build(seed=5)
    install_h3_training(other, scope=scope)
    reference = velocities(other, request)
    model.load_state_dict(other.state_dict())
    assert same(velocities(model, request), reference)
    linear = model.transformer_blocks[1].attn.to_out[0]
    linear.weight = torch.nn.Parameter(linear.weight.detach().clone())
    assert same(velocities(model, request), reference)
    linear.weight.data.mul_(2)
    assert not same(velocities(model, request), reference)
