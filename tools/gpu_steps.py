"""The steps of a GPU run: each package's tests and each benchmark, a process each, with seconds to spend and a record
of what every one reached.

Standard library and this folder's modules only: what a step needs is imported in its own process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import outcomes
import records
from environment import PACKAGES, ROOT
from evidence_files import Records, Tests, tests_of

STOP_SECONDS = 20.0
"""What an interrupted step has to write down what it found."""

FILE_SECONDS = 5.0
"""Of a budget, for filing the last step."""


@dataclass(frozen=True)
class Benchmark:
    """One benchmark script: the name its records carry, its file, and the modules and devices it cannot run without.

    One that needs several devices is told how many there are (``--gpus``). ``beside`` names benchmarks that it can run
    on the models it has built, with the option that takes their result file.
    """

    name: str
    script: str
    needs: tuple[str, ...] = ()
    gpus: int = 1
    beside: Mapping[str, str] = field(default_factory=dict)

    def missing(self, gpus: int) -> list[str]:
        """What it lacks here, in words; empty when it can run."""
        lacking = [module for module in self.needs if importlib.util.find_spec(module) is None]
        return lacking + ([f"{self.gpus} GPUs, --gpus is {gpus}"] if gpus < self.gpus else [])


ENGINES = ("triton", "vllm_omni", "diffusers", "peft")

BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("gemm", "benchmarks/gemm_h200.py", ("triton",)),
        Benchmark("nodes", "benchmarks/nodes_h200.py", ("triton",)),
        Benchmark("rollout", "benchmarks/rollout_h200.py", ("vllm_omni",)),
        Benchmark("training", "benchmarks/training_h200.py", ("diffusers", "peft")),
        Benchmark("sync", "benchmarks/sync.py"),
        Benchmark(
            "step",
            "benchmarks/step_h200.py",
            ENGINES,
            beside={"gates": "--gates", "divergence": "--divergence"},
        ),
        Benchmark("gates", "benchmarks/gates_h200.py", ENGINES),
        Benchmark("divergence", "benchmarks/divergence_h200.py", ENGINES),
        Benchmark("parallel", "benchmarks/parallel_h200.py", ("triton",), gpus=2),
    )
}


@dataclass(frozen=True)
class Limits:
    """Seconds a step may take: its own or the common limit, and what is left of the run's budget."""

    common: float
    own: Mapping[str, float] = field(default_factory=dict)
    end: float = float("inf")
    """When the budget is spent, by ``time.monotonic``."""

    @staticmethod
    def of(given: Iterable[tuple[str, float]], budget: float) -> Limits:
        """From ("", seconds) for all steps and (step, seconds) for one; later ones win."""
        own = dict(given)
        return Limits(own.pop("", 1800.0), own, time.monotonic() + budget)

    def seconds(self, step: str) -> float:
        """For a step that starts now; 0 where the budget leaves nothing once it must be stopped and filed."""
        left = self.end - time.monotonic() - STOP_SECONDS - FILE_SECONDS
        return max(0.0, min(self.own.get(step, self.common), left))


SPENT = "the run's budget was spent"


def environ(gpus: int) -> dict[str, str]:
    """This process's environment, with the four packages' sources and the tools on the path."""
    sources = [str(ROOT / "packages" / package / "src") for package in PACKAGES]
    path = os.pathsep.join([*sources, str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "H3_GPUS": str(gpus)}


def run(command: list[str], gpus: int, limit: float) -> int | None:
    """Run a step; its exit status, or None when it was interrupted after ``limit`` seconds.

    It leads a process group of its own: the ranks it started end with it, so that none holds the device of the next.
    """
    process = subprocess.Popen(command, cwd=ROOT, env=environ(gpus), start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a step that still runs, wait for what it writes then, and kill what is left of its group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ending(status: int | None, limit: float) -> str:
    """How a step ended that did not end well, in words."""
    if status is None:
        return f"interrupted after {limit:.0f} s"
    return f"killed by signal {-status}" if status < 0 else f"failed with status {status}"


def run_tests(package: str, scratch: Path, gpus: int, limit: float) -> Tests:
    """Run one package's GPU tests in a process of its own; the outcome of every case that was reached.

    Engines and ``torch.distributed`` keep one global group a process, and a fault of the device takes the process down.
    A session that did not end well is itself a failed case, or the test it died in is.
    """
    line = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "-m",
        "gpu",
        f"packages/{package}",
    ]
    command = " ".join(line)
    if limit <= 0:
        return _failed(package, f"{command} (not run: {SPENT})")
    out = scratch / f"{package}.jsonl"
    status = run([sys.executable, *line, "-p", "outcomes", "--outcomes", str(out)], gpus, limit)
    if status not in (0, 1, 5):  # 5: no test was selected
        command += f" ({ending(status, limit)})"
    return tests_of(outcomes.read(out, f"packages/{package}"), command)


def _failed(package: str, command: str) -> Tests:
    return tests_of([{"name": f"packages/{package}", "outcome": "failed", "seconds": 0.0}], command)


def plan(wanted: Iterable[str]) -> list[tuple[Benchmark, list[str]]]:
    """The scripts to run for the benchmarks wanted, in the table's order, each with those it runs beside its own."""
    chosen = [BENCHMARKS[name] for name in BENCHMARKS if name in set(wanted)]
    beside = {name for benchmark in chosen for name in benchmark.beside}
    names = {benchmark.name for benchmark in chosen}
    return [
        (benchmark, [name for name in benchmark.beside if name in names])
        for benchmark in chosen
        if benchmark.name not in beside
    ]


def run_benchmark(
    benchmark: Benchmark, beside: Iterable[str], files: Mapping[str, Path], gpus: int, limit: float
) -> tuple[Records, bool]:
    """Run one script; the records of it and of those ``beside`` it, and whether all of it ended well.

    ``files`` are the result files by name. A benchmark that did not run, and one that was cut short, has a record that
    says why. A record that says it did not pass is no good end either.
    """
    names = [benchmark.name, *beside]
    missing = benchmark.missing(gpus)
    if missing or limit <= 0:
        why = f"needs {', '.join(missing)}" if missing else SPENT
        return [{"benchmark": name, "not_run": why} for name in names], bool(missing)
    for name in names:
        files[name].unlink(missing_ok=True)
    options = [text for name in names[1:] for text in (benchmark.beside[name], str(files[name]))]
    several = ["--gpus", str(gpus)] if benchmark.gpus > 1 else []
    command = [sys.executable, benchmark.script, "--out", str(files[benchmark.name]), *options, *several]
    status = run(command, gpus, limit)
    found = {name: records.load(files[name]) for name in names}
    made = [{"benchmark": name, **record} for name in names for record in found[name]]
    if status != 0:
        how = ending(status, limit)
        print(f"gpu_matrix: {benchmark.script} {how}", file=sys.stderr)
        made += [{"benchmark": name, "incomplete" if found[name] else "not_run": how} for name in names]
    return made, status == 0 and all(record.get("passed", True) for record in made)
