"""The steps of a GPU run: each file of tests and each benchmark, a process each, and what every one reached.

Standard library and this folder's modules only: what a step needs is imported in its own process.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import records
from environment import ROOT
from evidence_files import Records, Tests, tests_of
from gpu_processes import SPENT, Limits, run, run_several


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


MARK = "pytest.mark.gpu"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-m", "gpu")


def test_files(packages: Iterable[str]) -> dict[str, str]:
    """The files with GPU tests, by path from the root, and the package of each; long files first, so that what starts
    last is short."""
    found = {
        file: package for package in packages for file in (ROOT / "packages" / package).rglob("test_*.py")
    }
    held = [file for file in found if MARK in file.read_text()]
    return {
        str(file.relative_to(ROOT)): found[file]
        for file in sorted(held, key=lambda file: -file.stat().st_size)
    }


def run_tests(
    packages: Iterable[str], scratch: Path, gpus: int, limits: Limits, jobs: int = 1, split: int = 1
) -> Iterator[Tests]:
    """Run the GPU tests of packages, each file in a process of its own, or dealt to ``split`` of them; the outcomes of
    a process as it ends.

    Engines and ``torch.distributed`` keep one global group a process, and a fault of the device takes the process down.
    A session that did not end well is itself a failed case, or the test it died in is.
    """
    files = test_files(packages)
    places = {f"{file} {part}/{split}": file for file in files for part in range(1, split + 1)}
    outs = {name: scratch / f"{re.sub('[ /]', '.', name)}.jsonl" for name in places}
    shown = {name: [*PYTEST, file, *_dealt(name, split)] for name, file in places.items()}
    commands = {
        name: [sys.executable, *words, "-p", "outcomes", "--outcomes", str(outs[name])]
        for name, words in shown.items()
    }

    def limit(name: str) -> float:
        return limits.seconds(files[places[name]])

    for name, ended in run_several(commands, limit, gpus, jobs):
        file, well = (
            places[name],
            ended.status in (0, 1, 5),
        )  # 1: tests failed, and are named; 5: none was selected
        command = " ".join(shown[name]) + ("" if well else f" ({ended})")
        yield tests_of(cases_of(outs[name], file), command)


def _dealt(name: str, split: int) -> list[str]:
    return ["--part", name.rpartition(" ")[2]] if split > 1 else []


def cases_of(path: Path, name: str) -> list[dict[str, Any]]:
    """The cases of a file that outcomes.py wrote: one that was started and never done is failed, as is ``name``, the
    whole session, where it ended before or after its tests without saying so."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    cases = [line for line in lines if "name" in line]
    done = {case["name"] for case in cases}
    lost = [line["start"] for line in lines if "start" in line and line["start"] not in done]
    # 5: no test was selected. 1: some failed, and are named. Anything else is the session's own fault.
    if not lost and not any(line.get("end") in (0, 1, 5) for line in lines):
        lost = [name]
    return cases + [{"name": case, "outcome": "failed", "seconds": 0.0} for case in lost]


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
    benchmark: Benchmark,
    beside: Iterable[str],
    files: Mapping[str, Path],
    gpus: int,
    limit: float,
    words: Iterable[str] = (),
) -> tuple[Records, bool]:
    """Run one script; the records of it and of those ``beside`` it, and whether all of it ended well.

    ``files`` are the result files by name; ``words`` go to the script. A benchmark that did not run, and one that was
    cut short, has a record that says why. A record that says it did not pass is no good end either.
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
    command = [
        sys.executable,
        benchmark.script,
        "--out",
        str(files[benchmark.name]),
        *options,
        *several,
        *words,
    ]
    ended = run(command, limit, gpus)
    found = {name: records.load(files[name]) for name in names}
    made = [{"benchmark": name, **record} for name in names for record in found[name]]
    if ended.status != 0:
        print(f"gpu_matrix: {benchmark.script} {ended}", file=sys.stderr)
        made += [_cut_short(name, benchmark.name, bool(found[name]), str(ended)) for name in names]
    return made, ended.status == 0 and all(record.get("passed", True) for record in made)


def _cut_short(name: str, main: str, reached: bool, how: str) -> dict[str, Any]:
    """What a process that ended badly says of one of its benchmarks; those beside the main one may be whole."""
    if not reached:
        return {"benchmark": name, "not_run": how}
    return (
        {"benchmark": name, "incomplete": how}
        if name == main
        else {"benchmark": name, "process": f"{main}: {how}"}
    )
