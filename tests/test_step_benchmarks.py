"""The whole-step benchmark, its gates and its table of differences on tiny engines: their records say enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Records of one smoke run, by kind of file."""
    folder = tmp_path_factory.mktemp("results")
    files = {name: folder / f"{name}.json" for name in ("out", "gates", "divergence")}
    arguments = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks/step_h200.py"), "--smoke", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: json.loads(path.read_text()) for name, path in files.items()}


def test_every_kind_of_cell_is_measured_against_the_engine_as_shipped(results):
    cells = {(r.get("engine"), r.get("direction"), r.get("case")) for r in results["out"]}
    for engine in ("vllm-omni", "diffusers"):
        assert {(engine, "forward", case) for case in (None, "extrapolated", "kernels")} <= cells
    assert ("diffusers", "step", None) in cells
    assert ("diffusers", "forward", "node") in cells
    assert not [r for r in results["out"] if "refused" in r]
    rated = [r for r in results["out"] if r.get("case") in {None, "extrapolated", "contract"}]
    assert all(r["ratio"] == pytest.approx(r["ours_ms"] / r["stock_ms"], abs=1e-3) for r in rated)
    assert all(r["environment"]["head"] for r in results["out"])


def test_bound_engines_and_repeated_gradients_have_equal_bits(results):
    forwards = [r for r in results["out"] if "engines_differing" in r]
    steps = [r for r in results["out"] if r.get("direction") == "step" and "repeat_differing" in r]
    assert forwards
    assert steps
    assert not any(r["engines_differing"] for r in forwards)
    assert not any(r["repeat_differing"] for r in steps)


def test_every_gate_passes_and_a_planted_row_is_found(results):
    assert all(r["passed"] for r in results["gates"])
    (twin,) = [r for r in results["gates"] if "planted" in r["case"]]
    assert twin["differing"] == 1


def test_the_planted_arithmetic_is_the_engine_s_and_not_the_strict_one(results):
    found = results["divergence"]
    for engine in ("vllm-omni", "diffusers"):
        nodes = [r for r in found if r.get("engine") == engine]
        assert nodes
        assert not any(r["planted_differing"] for r in nodes)
        assert any(r.get("share") for r in nodes if "node" in r)
        assert [r["first"] for r in nodes if "first" in r] == ["time_embedder.sinusoid"]
