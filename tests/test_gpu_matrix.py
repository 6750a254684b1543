"""A GPU run in parts: what each step reached is filed, whatever becomes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evidence_files
import gpu_matrix
import gpu_processes
import gpu_steps
import pytest
import records
from environment import PACKAGES
from gpu_processes import Limits, run_several
from gpu_stand_ins import (
    CRASHES,
    FAILS,
    ONE,
    PASSES,
    ROOT,
    SEEN,
    SLEEPS_THEN_ONE,
    TWO_THEN_SLEEPS,
    WRITES,
    filed,
    matrix,
)
from gpu_steps import BENCHMARKS, Benchmark, plan, run_benchmark

import evidence


def outcomes(folder: evidence.Folder) -> dict[str, str]:
    return {case["name"].partition("packages/")[2]: case["outcome"] for case in folder.tests["cases"]}


def test_a_package_that_crashes_loses_no_others_outcomes_nor_those_it_had_reached(
    tmp_path: Path, seen: dict[str, Any], packages: Callable[..., None]
) -> None:
    packages(h3_kernels=CRASHES)
    assert matrix(tmp_path, "--only") == 1
    folder = filed(tmp_path)
    kernels = "h3-kernels/test_gpu.py::test_"
    others = {f"{name}/test_gpu.py::test_one": "passed" for name in PACKAGES}
    assert outcomes(folder) == others | {f"{kernels}two": "failed"}
    assert "killed by signal 6" in folder.tests["command"]
    assert evidence_files.tested(folder.tests) == set(PACKAGES)


@pytest.mark.parametrize(("text", "status", "failed"), [(PASSES, 0, 0), (FAILS, 1, 1)])
def test_a_package_that_ends_by_itself_has_its_cases_and_no_other(
    tmp_path: Path, seen: dict[str, Any], packages: Callable[..., None], text: str, status: int, failed: int
) -> None:
    packages(h3_mapper=text)
    assert matrix(tmp_path, "--only", "--tests", "h3-mapper") == status
    folder = filed(tmp_path)
    assert (folder.tests["passed"], folder.tests["failed"]) == (1, failed)
    assert "(" not in folder.tests["command"]


@pytest.mark.parametrize(
    "text", ["import nothing_of_this_name\n", "import os\nos._exit(0)\n", "def broken(\n"]
)
def test_a_package_whose_tests_cannot_be_collected_is_a_failure(
    tmp_path: Path, seen: dict[str, Any], packages: Callable[..., None], text: str
) -> None:
    packages(h3_mapper=f"# pytest.mark.gpu\n{text}")
    assert matrix(tmp_path, "--only", "--tests", "h3-mapper") == 1
    assert "failed" in outcomes(filed(tmp_path)).values()


def test_an_interrupted_benchmark_leaves_what_it_reached_and_one_that_wrote_nothing_says_so(
    tmp_path: Path, seen: dict[str, Any], benchmark_of: Callable[..., Benchmark]
) -> None:
    benchmark_of("gemm", TWO_THEN_SLEEPS)
    benchmark_of("sync", SLEEPS_THEN_ONE)
    assert matrix(tmp_path, "--no-tests", "--only", "gemm", "sync", "--limit", "6", "sync=3") == 1
    found = filed(tmp_path).report["records"]
    assert [r.get("ratio") for r in found if r["benchmark"] == "gemm"] == [0.9, 0.8, None]
    assert found[2] == {"benchmark": "gemm", "incomplete": "interrupted after 6 s"}
    assert found[3] == {"benchmark": "sync", "not_run": "interrupted after 3 s"}


def test_what_a_benchmark_beside_another_reached_is_not_called_incomplete(
    tmp_path: Path, seen: dict[str, Any], benchmark_of: Callable[..., Benchmark]
) -> None:
    """It may be whole: the record names the process that was cut short."""
    gates = 'Writer(arguments.gates).add({"case": "a"})\n'
    benchmark_of("step", f"{ONE}{gates}time.sleep(60)\n", beside={"gates": "--gates"})
    assert matrix(tmp_path, "--no-tests", "--only", "step", "gates", "--limit", "4") == 1
    said = [
        {name: value for name, value in r.items() if name != "environment"}
        for r in filed(tmp_path).report["records"]
    ]
    assert said == [
        {"benchmark": "step", "ratio": 0.9},
        {"benchmark": "gates", "case": "a"},
        {"benchmark": "step", "incomplete": "interrupted after 4 s"},
        {"benchmark": "gates", "process": "step: interrupted after 4 s"},
    ]


def test_the_processes_a_step_started_end_with_it(tmp_path: Path) -> None:
    """A rank that lives on would hold the device of the next step."""
    script = tmp_path / "ranks.py"
    child = [sys.executable, "-c", "import time; time.sleep(60)"]
    script.write_text(
        f"import subprocess, time\nprint(subprocess.Popen({child}).pid, flush=True, file=open('pid', 'w'))\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); exec(open('ranks.py').read())"]
    assert gpu_processes.run(command, 3.0, 1).status is None
    pid = int((tmp_path / "pid").read_text())
    for _ in range(50):
        if not alive(pid):
            break
        time.sleep(0.1)
    assert not alive(pid)
    other = subprocess.Popen(child)
    assert alive(other.pid)
    other.kill()
    other.wait()


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("jobs", "ends"), [(2, [0, 0]), (1, [None, 0])])
def test_as_many_run_at_a_time_as_asked(tmp_path: Path, jobs: int, ends: list[int | None]) -> None:
    """Each waits for the other's file: alone, the first waits until it is interrupted."""
    code = (
        "import sys, time, pathlib\nmine, other = map(pathlib.Path, sys.argv[1:])\nmine.touch()\n"
        "while not other.exists(): time.sleep(0.01)\n"
    )
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    commands = {
        name: [sys.executable, "-c", code, *files]
        for name, files in {"a": (one, two), "b": (two, one)}.items()
    }
    found = dict(run_several(commands, lambda name: 4.0, 1, jobs))
    assert [found[name].status for name in "ab"] == ends


def test_a_files_tests_are_dealt_to_processes_each_test_once(
    tmp_path: Path, seen: dict[str, Any], packages: Callable[..., None]
) -> None:
    """Only tests that are chosen are dealt. Twin: one process runs them all."""
    cases = "@pytest.mark.parametrize('n', range(5))\ndef test_n(n): pass\n"
    packages(
        h3_mapper=f"{PASSES}{cases}".replace("pytestmark = pytest.mark.gpu\n", "").replace(
            "@pytest", "@pytest.mark.gpu\n@pytest"
        )
    )
    for split, commands in ((1, 1), (2, 2), (7, 7)):
        out = tmp_path / str(split)
        assert matrix(out, "--only", "--tests", "h3-mapper", "--jobs", "4", "--split", str(split)) == 0
        tests = filed(out).tests
        assert sorted(case["name"][-2] for case in tests["cases"]) == list("01234")
        assert tests["command"].count("-m pytest") == commands


def test_a_benchmark_is_given_the_words_meant_for_it(
    tmp_path: Path, seen: dict[str, Any], benchmark_of: Callable[..., Benchmark]
) -> None:
    says = WRITES.replace("parse_args()", "parse_known_args()[0]") + "writer.add({'words': sys.argv[3:]})\n"
    for name in ("gemm", "sync"):
        benchmark_of(name, says)
    assert (
        matrix(tmp_path, "--no-tests", "--only", "gemm", "sync", "--with", "gemm=--rounds 3 --rows 'a b'")
        == 0
    )
    found = {r["benchmark"]: r["words"] for r in filed(tmp_path).report["records"]}
    assert found == {"gemm": ["--rounds", "3", "--rows", "a b"], "sync": []}
    with pytest.raises(SystemExit):
        gpu_matrix.parse(["h200", "--with", "gem=--rounds 3"])


@pytest.mark.engine
def test_the_files_run_are_those_that_hold_gpu_tests() -> None:
    words = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        "packages",
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    collected = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert collected == set(gpu_steps.test_files(PACKAGES))
    assert "packages/h3-mapper/tests/test_plan.py" not in collected


def test_a_record_that_did_not_pass_is_no_good_end(
    tmp_path: Path, seen: dict[str, Any], benchmark_of: Callable[..., Benchmark]
) -> None:
    for passed, status in (("True", 0), ("False", 1)):
        benchmark_of("gemm", WRITES + f'writer.add({{"passed": {passed}}})\n')
        assert matrix(tmp_path / passed, "--no-tests", "--only", "gemm") == status


def test_a_benchmark_runs_others_on_its_own_models(
    tmp_path: Path, seen: dict[str, Any], benchmark_of: Callable[..., Benchmark]
) -> None:
    """In one process, each with its own result file; alone, such a one has its own script."""
    benchmark_of("step", ONE + 'Writer(arguments.gates).add({"case": "a"})\n', beside={"gates": "--gates"})
    results = tmp_path / "results"
    words = ("--no-tests", "--results", str(results), "--only")
    assert matrix(tmp_path, *words, "step", "gates") == 0
    assert evidence_files.measured(filed(tmp_path).report["records"]) == {"step", "gates"}
    assert sorted(path.name for path in results.iterdir()) == ["gates_h200.json", "step_h200.json"]
    assert [(b.name, beside) for b, beside in plan(["gates", "step"])] == [("step", ["gates"])]
    assert [(b.name, beside) for b, beside in plan(["gates"])] == [("gates", [])]


def test_the_tables_scripts_take_the_options_they_are_given() -> None:
    for benchmark in BENCHMARKS.values():
        text = (ROOT / benchmark.script).read_text()
        options = ("--out", *benchmark.beside.values(), *(("--gpus",) if benchmark.gpus > 1 else ()))
        assert all(f'"{option}"' in text for option in options), benchmark.name
        assert set(benchmark.beside) <= set(BENCHMARKS)


def test_every_claim_on_a_gpu_is_made_by_a_benchmark_of_the_table() -> None:
    claimed = {claim["benchmark"] for claim in evidence.claims() if claim["hardware"] != "cpu"}
    assert claimed <= set(BENCHMARKS)
    assert "mapper" not in BENCHMARKS


def test_limits_are_a_steps_own_the_common_one_and_never_past_the_budget() -> None:
    limits = Limits.of([("", 300.0), ("step", 500.0)], float("inf"))
    assert (limits.seconds("gemm"), limits.seconds("step")) == (300.0, 500.0)
    tight = Limits.of([("step", 500.0)], 125.0)
    assert 90.0 < tight.seconds("step") <= 100.0
    assert 90.0 < tight.seconds("gemm") <= 100.0
    assert Limits.of([], 10.0).seconds("step") == 0.0


def test_a_spent_budget_runs_nothing_and_says_so(
    tmp_path: Path, seen: dict[str, Any], benchmark_of: Callable[..., Benchmark]
) -> None:
    benchmark_of("gemm", ONE)
    assert matrix(tmp_path, "--tests", "h3-mapper", "--only", "gemm", "--budget", "10") == 1
    folder = filed(tmp_path)
    assert "budget was spent" in folder.tests["command"]
    assert folder.report["records"] == [{"benchmark": "gemm", "not_run": "the run's budget was spent"}]


def test_a_limit_for_an_unknown_step_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_matrix.parse(["h200", "--limit", "stpe=3"])
    assert "no step 'stpe'" in capsys.readouterr().err
    assert gpu_matrix.parse(["h200", "--limit", "9", "step=3"]).limit == [("", 9.0), ("step", 3.0)]


def test_a_termination_stops_the_step_and_keeps_the_steps_before(
    tmp_path: Path, seen: dict[str, Any], benchmark_of: Callable[..., Benchmark]
) -> None:
    benchmark_of("gemm", ONE)
    benchmark_of(
        "sync", WRITES + "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)\n"
    )
    start = time.monotonic()
    assert matrix(tmp_path, "--no-tests", "--only", "gemm", "sync") == 1
    assert time.monotonic() - start < 30
    assert [r["benchmark"] for r in filed(tmp_path).report["records"]] == ["gemm"]


def test_a_process_killed_while_it_writes_leaves_the_record_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    records.write(path, [{"a": 1}], SEEN)

    def torn(self: Path, text: str) -> int:
        with self.open("w") as file:
            file.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", torn)
    with pytest.raises(KeyboardInterrupt):
        records.write(path, [{"a": 1}, {"a": 2}], SEEN)
    assert records.load(path) == [{"a": 1, "environment": SEEN}]
    with pytest.raises(KeyboardInterrupt):
        path.write_text('{"half": 1}')
    with pytest.raises(json.JSONDecodeError):
        records.load(path)


@pytest.mark.engine
def test_the_longest_benchmark_leaves_whole_records_when_it_is_interrupted(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    words = [
        sys.executable,
        "-W",
        "ignore",
        str(ROOT / BENCHMARKS["step"].script),
        "--smoke",
        "--out",
        str(out),
    ]
    process = subprocess.Popen(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    try:
        while not out.exists() and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
    finally:
        process.kill()
    assert records.load(out)


def test_a_script_that_is_missing_is_said(tmp_path: Path, benchmark_of: Callable[..., Benchmark]) -> None:
    made = benchmark_of("gemm", ONE)
    Path(made.script).unlink()
    found, well = run_benchmark(made, [], {"gemm": tmp_path / "gemm.json"}, 1, 60.0)
    assert (found, well) == ([{"benchmark": "gemm", "not_run": "failed with status 2"}], False)


@pytest.mark.parametrize(("name", "status"), [("nothing_of_this_name", 2), ("json", 0)])
def test_an_environment_that_could_not_file_runs_nothing(
    tmp_path: Path,
    seen: dict[str, Any],
    benchmark_of: Callable[..., Benchmark],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    status: int,
) -> None:
    monkeypatch.setattr(gpu_matrix, "FOR_FIGURES", (name,))
    benchmark_of("gemm", ONE)
    assert matrix(tmp_path, "--no-tests", "--only", "gemm") == status
    assert (f"lacks {name}" in capsys.readouterr().err) == (status == 2)
    assert (tmp_path / "evidence").exists() == (status == 0)
