"""Run the GPU tests and benchmarks on this machine's devices and file them as evidence: ``gpu_matrix.py h200``.

``--gpus 8`` adds what needs several: the tests of tensor and sequence parallel ranks on a GPU each, and the parallel
benchmark. Uses the environment it is started from and downloads nothing. The tree needs its history, or ``H3_HEAD``
with the commit it was copied from. Exit status: 0 evidence written and every test passed, 1 a test or benchmark failed,
2 wrong device.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import environment
import records
from figures import speed_figure
from hardware import HARDWARE, WrongHardware, require

import evidence

ROOT = environment.ROOT

STOP_SECONDS = 20  # what an interrupted step has to write down what it found


@dataclass(frozen=True)
class Benchmark:
    """One benchmark script: the name its records carry, its file, and the modules and devices it cannot run without.

    One that needs several devices is told how many there are (``--gpus``).
    """

    name: str
    script: str
    needs: tuple[str, ...] = ()
    gpus: int = 1

    def missing(self, gpus: int) -> list[str]:
        """What it lacks here, in words; empty when it can run."""
        lacking = [module for module in self.needs if importlib.util.find_spec(module) is None]
        return lacking + ([f"{self.gpus} GPUs, --gpus is {gpus}"] if gpus < self.gpus else [])


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("gemm", "benchmarks/gemm_h200.py", ("triton",)),
        Benchmark("nodes", "benchmarks/nodes_h200.py", ("triton",)),
        Benchmark("rollout", "benchmarks/rollout_h200.py", ("vllm_omni",)),
        Benchmark("training", "benchmarks/training_h200.py", ("diffusers", "peft")),
        Benchmark("sync", "benchmarks/sync.py"),
        Benchmark("parallel", "benchmarks/parallel_h200.py", ("triton",), gpus=2),
    )
}


def environ(gpus: int) -> dict[str, str]:
    """This process's environment, with the four packages' sources and the tools on the path."""
    sources = [str(path / "src") for path in sorted((ROOT / "packages").iterdir())]
    path = os.pathsep.join([*sources, str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "H3_GPUS": str(gpus)}


def run(command: list[str], gpus: int, limit: float) -> int | None:
    """Run a step; its exit status, or None when it was interrupted after `limit` seconds."""
    process = subprocess.Popen(command, cwd=ROOT, env=environ(gpus))
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return None


def run_tests(scratch: Path, gpus: int, limit: float) -> dict[str, Any]:
    """Run every package's GPU tests once; the outcome of every case that was reached."""
    junit = scratch / "junit.xml"
    line = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "packages"]
    status = run([sys.executable, *line, f"--junitxml={junit}"], gpus, limit)
    command = " ".join(line) + (f" (interrupted after {limit:.0f} s)" if status is None else "")
    if not junit.exists():
        return {"command": command, "passed": 0, "failed": 1, "skipped": 0, "cases": []}
    return evidence.tests_from_junit(junit, command)


def run_benchmark(
    benchmark: Benchmark, out: Path, gpus: int, limit: float
) -> tuple[list[records.Record], bool]:
    """Run one benchmark; its records (those it reached, when it was interrupted) and whether it ended well.

    The result file is ``out``. One that cannot run here is not run; one record says why.
    """
    missing = benchmark.missing(gpus)
    if missing:
        return [{"benchmark": benchmark.name, "not_run": f"needs {', '.join(missing)}"}], True
    out.unlink(missing_ok=True)
    several = ["--gpus", str(gpus)] if benchmark.gpus > 1 else []
    status = run([sys.executable, benchmark.script, "--out", str(out), *several], gpus, limit)
    if status != 0:
        what = f"interrupted after {limit:.0f} s" if status is None else f"failed with status {status}"
        print(f"gpu_matrix: {benchmark.script} {what}", file=sys.stderr)
    return [{"benchmark": benchmark.name, **record} for record in records.load(out)], status == 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("hardware", choices=[row.key for row in HARDWARE])
    parser.add_argument("--gpus", type=int, default=1, help="devices the run needs (default: 1)")
    parser.add_argument(
        "--only", nargs="*", choices=sorted(BENCHMARKS), help="benchmarks to run (default: all)"
    )
    parser.add_argument(
        "--no-tests", action="store_true", help="benchmarks only: the evidence then holds no tests"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=1800,
        help="seconds for the tests, and for each benchmark (default: 1800)",
    )
    parser.add_argument(
        "--out", type=Path, default=evidence.EVIDENCE, help="where to file it (default: evidence/)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="keep the result files here, for example benchmarks/results (default: nowhere)",
    )
    return parser.parse_args()


def main() -> int:
    """Check the device, run, file."""
    arguments = parse()
    try:
        require(arguments.hardware, arguments.gpus)
    except WrongHardware as error:
        print(f"gpu_matrix: {error}", file=sys.stderr)
        return 2
    seen = environment.collect()
    if seen["head"] == "unknown":
        print(
            "gpu_matrix: no commit holds this source: commit it, or without git history set H3_HEAD to the commit "
            "this tree was copied from",
            file=sys.stderr,
        )
        return 2
    wanted = list(BENCHMARKS) if arguments.only is None else arguments.only
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        tests = (
            evidence.NO_TESTS if arguments.no_tests else run_tests(scratch, arguments.gpus, arguments.limit)
        )
        results = [
            run_benchmark(
                BENCHMARKS[name],
                (arguments.results or scratch).absolute() / f"{name}_{arguments.hardware}.json",
                arguments.gpus,
                arguments.limit,
            )
            for name in wanted
        ]
    made = [record for found, _ in results for record in found]
    target = evidence.write(arguments.out, arguments.hardware, seen, tests, made)
    speed_figure(made, target / "figure.png", f"{arguments.hardware.upper()} at {seen['head'][:12]}")
    print(f"gpu_matrix: {tests['passed']} passed, {tests['failed']} failed, {len(made)} records in {target}")
    return 0 if tests["failed"] == 0 and all(well for _, well in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
