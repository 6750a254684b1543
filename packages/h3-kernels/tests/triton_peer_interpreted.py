"""The peer form without a GPU: its own steps and kernels, ranks as threads that store into each other's host memory.

Run by test_triton_peer.py in a process of its own with TRITON_INTERPRET=1. Fences are barriers of the threads, and
every rank pauses at random, so a store that comes before its reader is done changes a result.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from h3_kernels.collectives import cost, peer
from h3_kernels.contract import row_range
from h3_kernels.reference import finish, fold_tree
from h3_kernels.testing import count_differing
from h3_kernels.testing.threads import results_by_rank
from h3_kernels.triton import peer as kernels

BIAS = torch.arange(5).float()
# Rows of consecutive calls: growing, shrinking, fewer than ranks, none; in and out of the reach of one exchange.
CALLS = (13, 1, 40, 0, 3)
_one_kernel_at_a_time = threading.Lock()  # the interpreter keeps its place in a grid in global variables


class ThreadPeers(peer.PeerExchange):
    """A rank whose peers are threads of this process; ``skipped`` (method, n) is a fence that none of them passes."""

    def __init__(self, room, rank, skipped=None):
        self.world_size, self.rank = len(room["pointers"]), rank
        self._buffers = {"fence": [], "inbox": [], "outbox": []}
        self._room, self._skipped, self._fences = room, skipped, 0
        self._pause = random.Random(rank)

    def all_reduce(self, *args):
        self._method = "all_reduce"
        return super().all_reduce(*args)

    def reduce_scatter(self, *args):
        self._method = "reduce_scatter"
        return super().reduce_scatter(*args)

    def all_gather(self, *args):
        self._method = "all_gather"
        return super().all_gather(*args)

    @contextmanager
    def _call(self, t):
        self._fences = 0
        yield

    def _fence(self):
        self._fences += 1
        if (self._method, self._fences) != self._skipped:
            self._room["barrier"].wait()
        # One rank in turn is late: whoever does not wait for it is ahead by a whole step.
        time.sleep(self._pause.choice((0, 0, 0.003)))

    def _map(self, size):
        local = torch.full((size,), 255, dtype=torch.uint8)  # NaN, until somebody stores
        self._room["pointers"][self.rank] = local.data_ptr()
        self._room["barrier"].wait()
        pointers = torch.tensor(self._room["pointers"])
        self._room["barrier"].wait()
        return peer.Mapped(local, None, pointers)


def on_threads(ranks, work, skipped=None):
    room = {"barrier": threading.Barrier(ranks, timeout=60), "pointers": [0] * ranks}
    exchanges = [
        ThreadPeers(room, rank, skipped) for rank in range(ranks)
    ]  # their memory outlives the last reader
    return results_by_rank(ranks, room["barrier"], lambda rank: work(exchanges[rank], rank))


@pytest.fixture(autouse=True)
def serial_kernels(monkeypatch):
    for name in ("push", "pull"):
        real = getattr(kernels, name)

        def locked(*args, real=real, **kwargs):
            with _one_kernel_at_a_time:
                real(*args, **kwargs)

        monkeypatch.setattr(kernels, name, locked)


@pytest.fixture(params=["whole", "scattered", "mixed"])
def steps(request, monkeypatch):
    """How far one exchange reaches: to every call, to none, to some of them."""
    reach = {"whole": 1 << 30, "scattered": -1, "mixed": 200}[request.param]
    monkeypatch.setitem(cost.SECOND_STEP_BYTES, "peer", reach)


def roots(ranks, rows):
    generator = torch.Generator().manual_seed(rows)
    large = torch.randn(ranks, rows, 5, generator=generator) * 2.0**20
    return large - large.flip(0) + torch.randn(ranks, rows, 5, generator=generator)


def rounds(exchange, rank):
    """Every call after every other, on changing sizes."""
    found = []
    for rows in CALLS:
        root = roots(exchange.world_size, rows)[rank]
        start, stop = row_range(rows, exchange.world_size, rank)
        found.append(exchange.all_reduce(root, BIAS, torch.float32))
        scattered = exchange.reduce_scatter(root, BIAS, torch.float32)[: stop - start]
        found += [scattered, exchange.reduce_scatter(2 * root, None, torch.float32)[: stop - start]]
        found += [exchange.all_gather(scattered, rows), exchange.all_gather(scattered.double(), rows)]
        found += [
            exchange.all_reduce(root, None, torch.float32),
            exchange.all_reduce(2 * root, None, torch.float32),
        ]
    return found


def expected(ranks, rank):
    found = []
    for rows in CALLS:
        tree = fold_tree(roots(ranks, rows))
        y = finish(tree, BIAS, torch.float32)
        own = slice(*row_range(rows, ranks, rank))
        found += [y, y[own], 2 * tree[own], y, y.double(), tree, 2 * tree]
    return found


def wrong(ranks, skipped=None):
    return sum(
        count_differing(a, b)
        for rank, found in enumerate(on_threads(ranks, rounds, skipped))
        for a, b in zip(found, expected(ranks, rank), strict=True)
    )


@pytest.mark.parametrize("ranks", [2, 8])
def test_every_call_gives_the_canonical_tree_whatever_the_calls_around_it(ranks, steps):
    assert wrong(ranks) == 0


@pytest.mark.parametrize("fence", [1, 2])
@pytest.mark.parametrize("method", ["all_reduce", "reduce_scatter", "all_gather"])
def test_twin_without_one_of_its_fences_a_result_is_wrong(method, fence, monkeypatch):
    """Every one is needed, those that only keep a call out of the next one's memory too."""
    monkeypatch.setitem(cost.SECOND_STEP_BYTES, "peer", -1)
    assert any(wrong(4, (method, fence)) for _ in range(5))


def test_twin_ranks_in_another_order_are_caught(monkeypatch):
    """A push that takes its rank for another's puts roots into the wrong leaves."""
    real = kernels.push
    monkeypatch.setattr(kernels, "push", lambda *a, rank, **kw: real(*a, rank=(0, 2, 1, 3)[rank], **kw))
    assert wrong(4) > 0
