"""The trainer on several GPUs: velocities and gradients of tp 2, 4 and 8, over NCCL and peer memory, are tp 1's bytes.

Needs a GPU a rank, as `tools/gpu_matrix.py h200 --gpus N` has them; the CPU proof of the same is
test_tensor_parallel.py.
"""

import os

import diffusers_gpu_ranks as ranks
import pytest
import torch

LIMIT = int(os.environ.get("H3_GPUS", "8"))
GPUS = min(torch.cuda.device_count(), LIMIT) if ranks.WANTED == "cuda" else LIMIT

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

DEGREES = [
    pytest.param(
        tp, marks=pytest.mark.skipif(tp > GPUS, reason=f"needs {tp} CUDA devices, {GPUS} may be used")
    )
    for tp in (2, 4, 8)
]


@pytest.mark.parametrize("case", ["lora", "every parameter"])
@pytest.mark.parametrize("tp", DEGREES)
def test_sharded_bytes_are_those_of_one_gpu(tp, case, tmp_path):
    for wrong in ranks.run_ranks(case, tp, tmp_path / "ranks"):
        assert wrong == {form: [] for form in ranks.FORMS}


@pytest.mark.parametrize("tp", DEGREES)
def test_twin_a_wrong_shard_plan_is_caught(tp, tmp_path):
    assert all(count > 0 for count in ranks.run_ranks("mirrored", tp, tmp_path / "ranks"))
