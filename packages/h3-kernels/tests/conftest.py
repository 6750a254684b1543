"""Makes the helpers beside the tests importable, here and in the processes the tests spawn; one thread a process."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
