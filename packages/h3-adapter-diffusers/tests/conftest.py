"""Importing Diffusers' pipelines imports `requests`, which warns about optional packages this workspace
leaves out."""

import warnings

import pytest
import torch

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Unable to find acceptable character detection dependency")
    import diffusers.modular_pipelines.minimax_h3  # noqa: F401


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)
