"""Run the GPU tests and benchmarks on this machine's device and file them as evidence: ``gpu_matrix.py h200``.

Uses the environment it is started from and downloads nothing. The tree needs its history, or ``H3_HEAD`` with the
commit it was copied from. Exit status: 0 evidence written and every test passed, 1 a test or benchmark failed, 2 wrong
device.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import environment
import records
from figures import speed_figure
from hardware import HARDWARE, WrongHardware, require

import evidence

ROOT = environment.ROOT

# benchmark name in its records -> (script, further arguments, GPUs it needs)
BENCHMARKS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "gemm": ("benchmarks/gemm_h200.py", (), 1),
    "nodes": ("benchmarks/nodes_h200.py", (), 1),
    "sync": ("benchmarks/sync.py", (), 1),
}


def python_path() -> str:
    """The four packages' sources and the tools, for environments where they are not installed."""
    sources = [str(path / "src") for path in sorted((ROOT / "packages").iterdir())]
    return os.pathsep.join([*sources, str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])


def run_tests(scratch: Path, gpus: int) -> dict[str, Any]:
    """Run every package's GPU tests once; the outcome of every case."""
    junit = scratch / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "packages"]
    subprocess.run([*command, f"--junitxml={junit}"], cwd=ROOT, env=_environ(gpus), check=False)
    if not junit.exists():
        return {"command": " ".join(command[1:]), "passed": 0, "failed": 1, "skipped": 0, "cases": []}
    return evidence.tests_from_junit(junit, " ".join(command[1:]))


def run_benchmark(subject: str, scratch: Path) -> list[dict[str, Any]] | None:
    """Run one benchmark; its records, or None when it failed (its own output says why)."""
    script, arguments, _ = BENCHMARKS[subject]
    out = scratch / f"{subject}.json"
    command = [sys.executable, script, *arguments, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=_environ(1), check=False)
    if done.returncode or not out.exists():
        print(f"gpu_matrix: {script} failed with status {done.returncode}", file=sys.stderr)
        return None
    return [{"benchmark": subject, **record} for record in records.load(out)]


def _environ(gpus: int) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": python_path(), "H3_GPUS": str(gpus)}


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
        "--out", type=Path, default=evidence.EVIDENCE, help="where to file it (default: evidence/)"
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
            "gpu_matrix: no git history here: set H3_HEAD to the commit this tree was copied from",
            file=sys.stderr,
        )
        return 2
    wanted = sorted(BENCHMARKS) if arguments.only is None else arguments.only
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        no_tests = {"command": "none", "passed": 0, "failed": 0, "skipped": 0, "cases": []}
        tests = no_tests if arguments.no_tests else run_tests(scratch, arguments.gpus)
        results = {subject: run_benchmark(subject, scratch) for subject in wanted}
    made = [record for found in results.values() if found is not None for record in found]
    target = evidence.write(arguments.out, arguments.hardware, seen, tests, made)
    speed_figure(made, target / "figure.png", f"{arguments.hardware.upper()} at {seen['head'][:12]}")
    print(f"gpu_matrix: {tests['passed']} passed, {tests['failed']} failed, {len(made)} records in {target}")
    return 1 if tests["failed"] or None in results.values() else 0


if __name__ == "__main__":
    raise SystemExit(main())
