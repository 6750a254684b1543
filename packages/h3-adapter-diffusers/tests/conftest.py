"""Makes the helpers beside the tests importable, here and in the processes the tests spawn; one thread a process."""

import sys
import warnings
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

# Diffusers' pipelines import `requests`, which warns about optional packages this workspace leaves out.
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Unable to find acceptable character detection dependency")
    import diffusers.modular_pipelines.minimax_h3  # noqa: F401


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)
