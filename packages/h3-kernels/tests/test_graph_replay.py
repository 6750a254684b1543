"""Which forwards are replayed from CUDA graphs, and what a graph is kept for. The replays' bits: test_graph_gpu.py."""

from __future__ import annotations

from dataclasses import replace

import graph_tiny as tiny
import pytest
import torch
from h3_kernels.errors import InputError
from h3_kernels.graph import ModuleWeights, Replays, Settings
from h3_kernels.graph import replay as module
from h3_kernels.testing import assert_bitwise_equal
from h3_kernels.testing.graphs import Graph, stand_in


@pytest.fixture
def captures(monkeypatch):
    """Counts captures; CUDA's own parts replaced."""
    return stand_in(monkeypatch)


def forward(replays, inputs, *, places=(1,), settings=None):
    with torch.no_grad():
        return replays.run(tiny.GRAPH, ModuleWeights(tiny.weights()), inputs, settings or Settings(), places)


def test_the_first_forward_runs_the_second_is_captured_later_ones_are_replayed(captures):
    replays, inputs = Replays(), tiny.request()
    results = [forward(replays, inputs) for _ in range(4)]
    assert (len(captures), Graph.replays, len(replays)) == (1, 3, 1)
    for video, audio in results[1:]:
        assert_bitwise_equal(video, results[0][0])
        assert_bitwise_equal(audio, results[0][1])
    assert len({video.data_ptr() for video, _ in results}) == 4  # no result is overwritten by the next replay


@pytest.mark.parametrize(
    "other",
    [
        {"places": (2,)},
        {"inputs": tiny.request(video=10)},
        {"settings": Settings(contract="h3-parallel-v1-u4")},
        {"settings": Settings(attention="reference")},
        {"inputs": replace(tiny.request(), max_seqlen=21)},
    ],
    ids=["weights moved", "rows", "contract", "attention", "longest document"],
)
def test_a_graph_is_kept_for_what_it_has_fixed(captures, other):
    replays = Replays()
    for _ in range(2):
        forward(replays, tiny.request())
    forward(replays, **({"inputs": tiny.request()} | other))
    assert (len(captures), Graph.replays) == (1, 1)


def test_values_of_the_rows_are_copied_into_the_graph(captures):
    """The stand-in does not compute: what a replay would read is what the last forward gave."""
    replays, first, second = Replays(), tiny.request(seed=1), tiny.request(seed=2)
    for inputs in (first, first, second):
        forward(replays, inputs)
    (captured,) = replays._known.values()
    assert_bitwise_equal(captured.inputs.video, second.video)
    assert_bitwise_equal(captured.inputs.tags, second.tags)


def test_misread_rows_are_refused_before_a_replay(captures):
    replays, inputs = Replays(), tiny.request()
    for _ in range(2):
        forward(replays, inputs)
    with pytest.raises(InputError, match="tags"):
        forward(replays, replace(inputs, tags=inputs.tags + 5))
    assert Graph.replays == 1


def test_the_oldest_graph_goes_first(captures):
    replays = Replays()
    for places in range(module.GRAPHS + 3):
        for _ in range(2):
            forward(replays, tiny.request(), places=(places,))
    assert len(replays) == module.GRAPHS
    forward(replays, tiny.request(), places=(0,))
    assert len(captures) == module.GRAPHS + 3


def test_only_plain_forwards_of_few_rows_on_cuda_are_served(monkeypatch):
    replays, inputs = Replays(), tiny.request()
    assert not replays.serves(inputs, Settings())
    cuda = _OnCuda(20)
    monkeypatch.setattr(module, "capturing", lambda device: False)
    with torch.no_grad():
        assert not replays.serves(cuda, Settings())  # not asked for
        monkeypatch.setenv(module.ENVIRONMENT, "1")
        assert replays.serves(cuda, Settings())
        assert not replays.serves(_OnCuda(module.ROWS + 1), Settings())
        assert not replays.serves(cuda, Settings(tp=2))
        overlaid = Settings(overlay={"shard": lambda strict, *x: x})
        assert not replays.serves(cuda, overlaid)
        assert replays.serves(cuda, overlaid, terms_only=True)
    assert not replays.serves(cuda, Settings())  # with gradients


class _OnCuda:
    """As much of ``PackedInputs`` as ``serves`` looks at, on a device this machine need not have."""

    def __init__(self, rows):
        self.rows = rows
        self.positions = type("T", (), {"device": torch.device("cuda")})()
