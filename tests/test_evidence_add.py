"""Evidence of several runs: a folder takes what it lacks, of the same source, software and device, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import evidence_files
import pytest
from gpu_stand_ins import ONE, SCHEMA, filed, matrix
from gpu_steps import Benchmark

import evidence


@pytest.fixture
def first(
    tmp_path: Path,
    seen: dict[str, Any],
    benchmark_of: Callable[..., Benchmark],
    packages: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> evidence.Folder:
    """A run's folder: the benchmark gemm, and that sync could not run."""
    benchmark_of("gemm", ONE)
    benchmark_of("sync", ONE, needs=("nothing_of_this_name",))
    assert matrix(tmp_path, "--no-tests", "--only", "gemm", "sync") == 0
    benchmark_of("sync", ONE)
    packages()
    capsys.readouterr()
    return filed(tmp_path)


def test_a_second_run_adds_what_the_folder_lacks(first: evidence.Folder, tmp_path: Path) -> None:
    """Its tests, and the benchmark that could not run before."""
    assert matrix(tmp_path, "--add", "--only", "sync", "--tests", "h3-mapper", "h3-kernels") == 0
    second = filed(tmp_path)
    assert [r["benchmark"] for r in second.report["records"]] == ["gemm", "sync"]
    assert second.tests["passed"] == 2
    assert matrix(tmp_path, "--add", "--only", "--tests", "h3-adapter-vllm") == 0
    third = filed(tmp_path)
    assert third.report["records"] == second.report["records"]
    assert third.tests["passed"] == 3
    assert third.tests["command"].count("-m pytest") == 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "--add puts in what it lacks"),
        (("--add",), "holds gemm already"),
    ],
)
def test_a_folder_is_not_written_over(
    first: evidence.Folder,
    tmp_path: Path,
    words: tuple[str, ...],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert matrix(tmp_path, "--no-tests", "--only", "gemm", *words) == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1
    assert filed(tmp_path) == first


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"software": {"torch": "2.12.0"}}, "other software"),
        ({"gpu": {"name": "NVIDIA H100"}}, "other gpu"),
        ({"sources": {}}, "other sources"),
        ({"gpu": {"name": "NVIDIA H200", "clocks.sm": "345 MHz"}, "cores": 8}, ""),
    ],
)
def test_only_a_run_of_the_same_source_software_and_device_is_added(
    first: evidence.Folder,
    seen: dict[str, Any],
    tmp_path: Path,
    change: dict[str, Any],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Clocks and the host may differ: the last case is added."""
    seen |= change
    assert matrix(tmp_path, "--add", "--no-tests", "--only", "sync") == (2 if says else 0)
    assert says in capsys.readouterr().err
    assert (filed(tmp_path) == first) == bool(says)


def test_an_edited_folder_is_not_added_to(
    first: evidence.Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = first.path / "report.json"
    report.write_text(report.read_text().replace("0.9", "0.8"))
    assert matrix(tmp_path, "--add", "--no-tests", "--only", "sync") == 2
    assert "digest does not match" in capsys.readouterr().err


def test_folders_of_several_machines_become_one(
    first: evidence.Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`evidence.py add`; the same folder again is refused."""
    assert matrix(tmp_path / "other", "--only", "sync", "--tests", "h3-mapper") == 0
    (other,) = evidence.folders(tmp_path / "other" / "evidence")
    with monkeypatch.context() as patch:
        patch.setattr(evidence, "EVIDENCE", tmp_path / "filed")
        assert [evidence.add_folder(path) for path in (first.path, other.path, other.path)] == [0, 0, 1]
    assert "holds h3-mapper, sync already" in capsys.readouterr().err
    (whole,) = evidence.folders(tmp_path / "filed")
    assert evidence.problems(whole, SCHEMA) == []
    assert evidence_files.measured(whole.report["records"]) == {"gemm", "sync"}
    assert whole.tests["passed"] == 1
