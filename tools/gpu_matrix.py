"""Run the GPU tests and benchmarks on this machine's devices and file them as evidence: ``gpu_matrix.py h200``.

One command makes a whole folder. Where a command may not take so long, several make it, each with a part:

    gpu_matrix.py h200 --add --only --jobs 6 --budget 560      # every package's tests
    gpu_matrix.py h200 --add --no-tests --only gemm sync       # two benchmarks
    gpu_matrix.py h200 --add --no-tests --only step gates divergence --limit step=500

``--gpus 8`` adds what needs several: the tests of tensor and sequence parallel ranks on a GPU each, and the parallel
benchmark. Each file of tests and each benchmark runs in a process of its own, and the folder is written anew after
each: what ended before a crash or an interruption is filed. ``--jobs 6`` runs six files of tests at a time on the
device, while they compile kernels on the host. Uses the environment it is started from and downloads
nothing. The tree needs its history, or ``H3_HEAD`` with the commit it was copied from. Exit status: 0 evidence written
and every test passed, 1 a test or benchmark failed or was cut short, 2 nothing was run: wrong device, or the folder
cannot be added to.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import environment
import evidence_files
from environment import PACKAGES
from evidence_files import NO_TESTS, Folder, Records, Tests
from gpu_processes import Limits
from gpu_steps import BENCHMARKS, plan, run_benchmark, run_tests
from hardware import HARDWARE, WrongHardware, require


@dataclass
class Filing:
    """What this run has made so far, written with what its folder held before."""

    root: Path
    hardware: str
    environment: dict[str, Any]
    before: Folder | None
    tests: Tests = field(default_factory=lambda: NO_TESTS)
    records: Records = field(default_factory=list)

    @property
    def target(self) -> Path:
        """The folder."""
        return self.root / str(self.environment["head"]) / self.hardware

    def add(self, tests: Tests = NO_TESTS, records: Records | None = None) -> None:
        """Keep a step's outcomes and write the folder."""
        self.tests = evidence_files.together(self.tests, tests)
        self.records += records or []
        whole = evidence_files.joined(self.before, self.tests, self.records)
        seen = self.before.environment if self.before else self.environment
        evidence_files.write(self.root, self.hardware, seen, *whole)


def limit(text: str) -> tuple[str, float]:
    """``SECONDS`` for every step, or ``STEP=SECONDS``."""
    step, _, seconds = text.rpartition("=")
    if step and step not in (*PACKAGES, *BENCHMARKS):
        raise argparse.ArgumentTypeError(f"no step {step!r}; known: {', '.join((*PACKAGES, *BENCHMARKS))}")
    try:
        return step, float(seconds)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected SECONDS or STEP=SECONDS") from None


def given(text: str) -> tuple[str, str]:
    """``BENCHMARK=WORDS``."""
    name, _, words = text.partition("=")
    if name not in BENCHMARKS or not words:
        raise argparse.ArgumentTypeError(f"{text!r}: expected one of {', '.join(BENCHMARKS)}, = and words")
    return name, words


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("hardware", choices=[row.key for row in HARDWARE])
    add("--gpus", type=int, default=1, help="devices the run needs (default: 1)")
    add("--only", nargs="*", choices=list(BENCHMARKS), help="benchmarks to run, or none (default: all)")
    add("--tests", nargs="+", choices=PACKAGES, default=PACKAGES, help="packages to test (default: all)")
    add("--no-tests", action="store_true", help="benchmarks only")
    add(
        "--limit",
        nargs="+",
        type=limit,
        default=[],
        metavar="[STEP=]SECONDS",
        help="for each file of tests and each benchmark; STEP: a package or a benchmark (default: 1800)",
    )
    add("--jobs", type=int, default=1, help="processes of tests that run at a time (default: 1)")
    add("--split", type=int, default=1, help="processes that a file's tests are dealt to (default: 1)")
    add(
        "--with",
        dest="words",
        nargs="+",
        type=given,
        default=[],
        metavar="BENCHMARK=WORDS",
        help="further words for a benchmark's command line: 'step=--rounds 3'",
    )
    add("--budget", type=float, default=float("inf"), metavar="SECONDS", help="for the whole run")
    add("--add", action="store_true", help="put what this head's folder lacks into it, where there is one")
    add("--out", type=Path, default=evidence_files.EVIDENCE, help="where to file it (default: evidence/)")
    add(
        "--results",
        type=Path,
        help="keep the result files here, for example benchmarks/results (default: nowhere)",
    )
    arguments = parser.parse_args(words)
    arguments.packages = () if arguments.no_tests else arguments.tests
    arguments.benchmarks = list(BENCHMARKS) if arguments.only is None else arguments.only
    return arguments


FOR_FIGURES, FOR_TESTS = ("matplotlib",), ("pytest", "pytest_timeout")


def start(arguments: argparse.Namespace) -> Filing:
    """Check the device, the modules, the source and the folder. Raises ValueError or `WrongHardware` in one line."""
    require(arguments.hardware, arguments.gpus)
    needed = FOR_FIGURES + (FOR_TESTS if arguments.packages else ())
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    if lacking:
        raise ValueError(f"this environment lacks {', '.join(lacking)}: add what is missing, nothing was run")
    seen = environment.collect()
    if seen["head"] == "unknown":
        raise ValueError(
            "no commit holds this source: commit it, or without git history set H3_HEAD to the commit this tree was "
            "copied from"
        )
    before = evidence_files.place(arguments.out, arguments.hardware, seen, arguments.add)
    evidence_files.refuse_again(before, arguments.packages, arguments.benchmarks)
    return Filing(arguments.out, arguments.hardware, seen, before)


def steps(arguments: argparse.Namespace, filing: Filing, limits: Limits) -> bool:
    """Run and file every step; whether each ended well."""
    well = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        kept = (arguments.results or scratch).absolute()
        files = {name: kept / f"{name}_{arguments.hardware}.json" for name in BENCHMARKS}
        for tests in run_tests(
            arguments.packages, scratch, arguments.gpus, limits, arguments.jobs, arguments.split
        ):
            filing.add(tests)
            well.append(tests["failed"] == 0)
        for benchmark, beside in plan(arguments.benchmarks):
            seconds = limits.seconds(benchmark.name)
            words = shlex.split(dict(arguments.words).get(benchmark.name, ""))
            found, good = run_benchmark(benchmark, beside, files, arguments.gpus, seconds, words)
            filing.add(records=found)
            well.append(good)
    return all(well)


def main(words: list[str] | None = None) -> int:
    """Check, run, file."""
    arguments = parse(words)
    limits = Limits.of(arguments.limit, arguments.budget)
    signal.signal(signal.SIGTERM, _stop)
    try:
        filing = start(arguments)
    except (ValueError, WrongHardware) as error:
        print(f"gpu_matrix: {error}", file=sys.stderr)
        return 2
    try:
        well = steps(arguments, filing, limits)
    except KeyboardInterrupt:
        print("gpu_matrix: interrupted: the steps before this one are filed", file=sys.stderr)
        well = False
    tests, made = filing.tests, len(filing.records)
    print(
        f"gpu_matrix: {tests['passed']} passed, {tests['failed']} failed, {made} records in {filing.target}"
    )
    return 0 if well else 1


def _stop(*_: object) -> NoReturn:
    """A termination stops the step that runs, as an interruption does, and files the others."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
