"""Makes the helpers beside the tests importable, here and in the processes the tests spawn; one thread a process."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws without a generator of its own does not depend on the tests before it."""
    torch.manual_seed(0)
