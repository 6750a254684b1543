"""Memory of fused tensors: used again once nobody holds it, never before."""

import gc

import numpy as np
import pytest
import torch
from h3_mapper import slabs
from h3_mapper.slabs import Slabs
from h3_mapper.spec import Layout
from h3_mapper.sync import WeightSync
from mapper_testkit import TINY
from test_sync import assert_bits, expected, state

LIKE = {"torch": torch.zeros(1, dtype=torch.bfloat16), "numpy": np.zeros(1, np.uint16)}
SHAPE = (600, 1024)


def address(array):
    return array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data


@pytest.mark.parametrize("kind", LIKE)
@pytest.mark.parametrize(
    "view", [lambda a: a[3:5], lambda a: a.reshape(-1)[7:], lambda a: a.T, lambda a: a], ids=range(4)
)
def test_a_view_keeps_its_memory_and_the_last_one_gives_it_back(kind, view):
    pool = Slabs()
    first = pool.empty(SHAPE, LIKE[kind])
    assert (tuple(first.shape), first.dtype) == (SHAPE, LIKE[kind].dtype)
    where, kept = address(first), view(first)
    del first
    gc.collect()
    second = pool.empty(SHAPE, LIKE[kind])
    assert address(second) != where
    second[...] = 1
    del kept
    gc.collect()
    assert address(pool.empty(SHAPE, LIKE[kind])) == where
    assert address(pool.empty((601, 1024), LIKE[kind])) != where


def test_memory_outlives_its_pool_as_long_as_a_tensor_does():
    pool = Slabs()
    held = pool.empty(SHAPE, LIKE["torch"])
    held.fill_(3)
    del pool
    gc.collect()
    assert bool((held == 3).all())


def test_small_tensors_and_devices_are_left_to_their_allocators(monkeypatch):
    monkeypatch.setattr(slabs, "_mapped", None)
    assert Slabs().empty((3, 4), LIKE["torch"]).shape == (3, 4)
    assert Slabs().empty(SHAPE, LIKE["torch"].to("meta")).is_meta
    with pytest.raises(TypeError):
        Slabs().empty(SHAPE, LIKE["torch"])


@pytest.mark.parametrize("keep", [True, False], ids=["keeps", "copies"])
def test_a_consumer_may_keep_or_drop_what_a_sync_yields(monkeypatch, keep):
    """One that copies fills one slab again and again; one that keeps every tensor gets as many."""
    monkeypatch.setattr(slabs, "SMALLEST", 1)
    values = state()
    sync, got, memory = WeightSync(TINY), {}, []
    for name, tensor in sync.push((f"transformer.{n}", v) for n, v in values.items()):
        got[name] = tensor if keep else tensor.copy()
        if "qkv_proj" in name:
            memory.append(tensor.ctypes.data)
        del tensor
    assert_bits(got, expected(values, Layout.DIFFUSERS, Layout.RELEASE))
    blocks = TINY.num_layers + TINY.num_refiner_layers
    assert (len(memory), len(set(memory))) == (blocks, blocks if keep else 1)
