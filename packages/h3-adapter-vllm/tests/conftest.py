"""Fixtures: one vLLM configuration and weight file for the session, a fresh engine per test, and tp workers."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    # vLLM and what it imports use deprecated torch and Python functions while they are being imported.
    warnings.simplefilter("ignore")
    import h3_adapter_vllm.testing.engine as engine_module

_IGNORED = (
    # torch 2.13 renames this collective; the new name does not exist in torch 2.11.
    "ignore:`torch.distributed.all_gather_into_tensor` is deprecated:FutureWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    for line in _IGNORED:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws without a generator of its own does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def engine() -> Iterator[Any]:
    """The module ``h3_adapter_vllm.testing.engine`` inside its own ``engine()`` block."""
    torch.set_num_threads(1)
    with engine_module.engine():
        yield engine_module


@pytest.fixture(scope="session")
def release(engine: Any) -> dict[str, torch.Tensor]:
    """Random weights of the tiny engine in the release layout."""
    model = engine.build()
    engine.randomise(model)
    return engine.release_state(model)


@pytest.fixture(scope="session")
def weights(release: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in a file, for workers."""
    path = tmp_path_factory.mktemp("weights") / "release.pt"
    torch.save(release, path)
    return path


@pytest.fixture
def load(engine: Any, release: dict[str, torch.Tensor]) -> Callable[..., Any]:
    """A function that builds a loaded engine; keyword arguments are those of ``build``."""

    def build(**options: Any) -> Any:
        model = engine.build(**options)
        assert model.load_weights(release.items()) == set(model.state_dict())
        return model

    return build


@pytest.fixture
def model(load: Callable[..., Any]) -> Any:
    """A loaded tiny engine."""
    return load()


@pytest.fixture(scope="session")
def pool() -> Iterator[Any]:
    """Eight worker processes; see ``h3_adapter_vllm.testing.pool``."""
    from h3_adapter_vllm.testing.pool import TensorParallelPool

    with TensorParallelPool() as workers:
        yield workers
