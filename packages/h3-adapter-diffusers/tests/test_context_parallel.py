"""Diffusers' context parallelism: bits of one process without gradients, refused with the reason where it
cannot be."""

from unittest import mock

import pytest
import torch
from diffusers import ContextParallelConfig
from h3_adapter_diffusers.errors import BoundModelError, InstallError
from h3_adapter_diffusers.install import install_h3_training
from h3_adapter_diffusers.testing.packings import fl2va
from h3_adapter_diffusers.testing.ranks import run_ranks
from h3_adapter_diffusers.testing.tiny import build, velocities
from h3_adapter_diffusers.training import velocity
from torch.distributed.device_mesh import init_device_mesh

pytestmark = pytest.mark.engine

ROWS = 6  # text rows that make the packed sequence divide by two


def enable(model):
    """Ulysses over both ranks. Diffusers counts accelerators to place ranks, and a CPU has none."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    with mock.patch.object(torch.accelerator, "device_count", return_value=1):
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2, mesh=mesh))


def parallel():
    model, request = build(), fl2va(text=ROWS)
    install_h3_training(model, scope="projections")
    before = velocities(model, request)
    enable(model)
    return [int((a != b).sum()) for a, b in zip(before, velocities(model, request), strict=True)]


def test_each_rank_keeps_the_bits_of_one_process():
    assert run_ranks(parallel, 2) == [[0, 0]] * 2


def refusals():
    request = fl2va(text=ROWS)
    messages = []
    trained = build()
    install_h3_training(trained, scope="projections")
    enable(trained)
    with pytest.raises(BoundModelError) as caught:
        velocity(trained, request.packed, request.video, request.audio, request.text, 0.7, 0.3)
    messages.append(str(caught.value))
    graph = build()
    install_h3_training(graph, scope="model")
    enable(graph)
    with pytest.raises(BoundModelError) as caught:
        velocities(graph, request)
    messages.append(str(caught.value))
    late = build()
    enable(late)
    for scope in ("projections", "model"):
        with pytest.raises(InstallError) as error:
            install_h3_training(late, scope=scope)
        messages.append(str(error.value))
    return messages


def test_what_it_cannot_do_is_refused():
    gradients, scope, late, late_graph = run_ranks(refusals, 2)[0]
    assert "whatever adds them up keeps no order" in gradients
    assert "hooks modules that scope='model' does not call" in scope
    assert "proj_out: its forward is already replaced on the instance" in late
    assert "already replaced on the instance" in late_graph


def test_torchs_products_depend_on_the_number_of_rows():
    """Negative twin: rows that a rank computes by itself do differ where the arithmetic is torch's."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 384, generator=generator), torch.randn(80, 384, generator=generator)
    assert not torch.equal(x @ w.t(), torch.cat([x[i : i + 1] @ w.t() for i in range(64)]))
