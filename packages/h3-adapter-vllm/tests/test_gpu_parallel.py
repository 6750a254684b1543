"""The real engine on several GPUs, its own NCCL groups: tensor and sequence parallel ranks have the bytes of one GPU.

Needs a GPU a rank, as ``tools/gpu_matrix.py h200 --gpus N`` has them, and vLLM's CUDA build or the site that
tools/h200_site packs. The CPU proof of the same is in test_tp.py and test_model_scope.py.
"""

import functools
import os
import sys
from pathlib import Path

import pytest
import torch
from h3_kernels.testing import assert_bitwise_equal, count_differing

sys.path.insert(0, str(Path(__file__).parent))  # the ranks import their part by name

import vllm_gpu_ranks as ranks

LIMIT = int(os.environ.get("H3_GPUS", "8"))
GPUS = min(torch.cuda.device_count(), LIMIT) if ranks.WANTED == "cuda" else LIMIT
VELOCITIES = ("video", "audio")

pytestmark = [pytest.mark.gpu, pytest.mark.engine]


def needs(gpus):
    return pytest.mark.skipif(gpus > GPUS, reason=f"needs {gpus} CUDA devices, {GPUS} may be used")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Results by tp and Ulysses degree, each run once; tp 1 runs first and writes the weights."""
    folder = tmp_path_factory.mktemp("engine")
    run = functools.cache(lambda tp, sequence: ranks.run_ranks(tp, sequence, folder))
    run(1, 1)
    return run


DEGREES = [pytest.param(tp, marks=needs(tp)) for tp in (2, 4, 8)]
SEQUENCES = [
    pytest.param(tp, sequence, marks=needs(tp * sequence))
    for tp, sequence in ((1, 2), (1, 4), (2, 2), (1, 8), (2, 4), (4, 2))
]


def assert_velocities(results, one):
    for rank, result in enumerate(results):
        names = [name for name in result if name.endswith(VELOCITIES) and not name.startswith("stock")]
        assert names
        for name in names:
            expected = one[f"default/padding0/{name.rpartition('/')[2]}"]
            assert_bitwise_equal(result[name], expected, f"rank {rank} {name}")


@pytest.mark.parametrize("tp", DEGREES)
def test_velocities_have_the_bytes_of_one_gpu_in_every_form_and_padding(worlds, tp):
    assert_velocities(worlds(tp, 1), worlds(1, 1)[0])


@pytest.mark.parametrize(("tp", "sequence"), SEQUENCES)
def test_ulysses_ranks_have_the_bytes_of_one_gpu(worlds, tp, sequence):
    """Rows that no number of ranks divides, alone and beside tensor parallelism."""
    assert_velocities(worlds(tp, sequence), worlds(1, 1)[0])


@pytest.mark.parametrize("tp", DEGREES)
def test_every_bound_linear_has_the_bytes_of_one_gpu(worlds, tp):
    one = {name: t for name, t in worlds(1, 1)[0].items() if name.startswith("linear/")}
    assert len(one) == 26
    for rank, result in enumerate(worlds(tp, 1)):
        for name, expected in one.items():
            assert_bitwise_equal(result[name], expected, f"rank {rank} {name}")


@pytest.mark.parametrize("tp", DEGREES)
def test_twin_without_the_adapter_they_differ(worlds, tp):
    one = worlds(1, 1)[0]
    for result in worlds(tp, 1):
        assert count_differing(result["stock/video"], one["stock/video"]) > 0
