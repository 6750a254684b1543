"""Puts tools/ and the helpers beside the tests on the path; stand-ins for what a GPU run starts."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

import gpu_matrix  # found on the paths above, like the others
import gpu_processes
import gpu_steps
from environment import PACKAGES
from gpu_stand_ins import PASSES, ROOT
from gpu_steps import BENCHMARKS, Benchmark
from provenance import source_digest_at


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The environment of every GPU run: HEAD's source on a device that is always there. A test may change it."""
    handler = signal.getsignal(signal.SIGTERM)  # a run takes it for an interruption
    done = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    head = done.stdout.strip()
    found: dict[str, Any] = {
        "python": "3.12",
        "system": "Linux",
        "cpu": "x",
        "cores": 2,
        "software": {"torch": "2.11.0"},
        "gpu": {"name": "NVIDIA H200", "clocks.sm": "1980 MHz"},
        "head": head,
        "sources": {name: source_digest_at(head, name) for name in PACKAGES},
    }
    monkeypatch.setattr(gpu_matrix, "require", lambda key, gpus: None)
    monkeypatch.setattr(gpu_matrix.environment, "collect", lambda: found)
    yield found
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def benchmark_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Benchmark]:
    """Puts a script in the place of a benchmark of the table."""

    def put(name: str, text: str, **options: Any) -> Benchmark:
        script = tmp_path / f"{name}.py"
        script.write_text(text)
        made = Benchmark(name, str(script), **options)
        monkeypatch.setitem(BENCHMARKS, name, made)
        return made

    return put


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts files of tests in the place of the packages'."""

    def put(**files: str) -> None:
        root = tmp_path / "tree"
        for name in PACKAGES:
            (root / "packages" / name).mkdir(parents=True, exist_ok=True)
            text = files.get(name.replace("-", "_"), PASSES)
            (root / "packages" / name / "test_gpu.py").write_text(text)
        (root / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
        monkeypatch.setattr(gpu_steps, "ROOT", root)
        monkeypatch.setattr(gpu_processes, "ROOT", root)
        monkeypatch.setenv("PYTHONPATH", str(ROOT / "tools"))

    return put
