"""Evidence is refused when it is malformed, edited by hand, filed under another head or from an unknown commit; claims
on older source are named. Every refusal is planted in a folder that is otherwise accepted."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import figures
import pytest
import records
from environment import PACKAGES
from provenance import source_digest_at

import evidence

ROOT = Path(__file__).parent.parent
SCHEMA = json.loads((ROOT / "evidence" / "schema.json").read_text())
RECORDS = [
    {"benchmark": "gemm", "op": "fc2", "rows": 70, "ratio": 0.9},
    {"benchmark": "gemm", "op": "out", "ratio": 1.2},
]


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def environment(**changes: Any) -> dict[str, Any]:
    sources = {name: source_digest_at(git("rev-parse", "HEAD"), name) for name in PACKAGES}
    base = {
        "python": "3.12",
        "system": "Linux",
        "cpu": "x",
        "cores": 2,
        "software": {"torch": "2.11.0"},
        "gpu": None,
    }
    return {**base, "head": git("rev-parse", "HEAD"), "sources": sources, **changes}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that the checker accepts."""
    junit = tmp_path / "junit.xml"
    junit.write_text(
        '<testsuites><testsuite><testcase classname="a" name="b" time="0.5"/>'
        '<testcase classname="a" name="c" time="0.1"><failure message="no"/></testcase></testsuite></testsuites>'
    )
    tests = evidence.tests_from_junit(junit, "pytest -m gpu")
    assert (tests["passed"], tests["failed"], tests["skipped"]) == (1, 1, 0)
    made = evidence.write(tmp_path / "evidence", "h200", environment(), tests, RECORDS)
    figures.speed_figure(RECORDS, made / "figure.png", "a title")
    return made


def refused(folder: Path) -> list[str]:
    return [
        line for found in evidence.folders(folder.parent.parent) for line in evidence.problems(found, SCHEMA)
    ]


def edit(folder: Path, part: str, change: Any) -> None:
    file = folder / f"{part}.json"
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def test_what_a_run_wrote_is_accepted(folder: Path) -> None:
    assert refused(folder) == []


def test_a_ratio_edited_by_hand_is_refused(folder: Path) -> None:
    edit(folder, "report", lambda report: report["records"][1].update(ratio=0.8))
    assert "digest does not match" in refused(folder)[0]


def test_a_test_outcome_edited_by_hand_is_refused(folder: Path) -> None:
    edit(folder, "tests", lambda tests: tests["cases"][1].update(outcome="passed"))
    assert "digest does not match" in refused(folder)[0]


def test_a_missing_field_is_refused_with_its_place(folder: Path) -> None:
    edit(folder, "environment", lambda seen: seen.pop("sources"))
    assert "environment: 'sources' is a required property" in refused(folder)[0]


def test_a_missing_figure_is_refused(folder: Path) -> None:
    (folder / "figure.png").unlink()
    assert "figure.png is missing" in refused(folder)[0]


def test_another_heads_folder_is_refused(folder: Path) -> None:
    folder.parent.rename(folder.parent.parent / ("0" * 40))
    lines = refused(folder.parent.parent / ("0" * 40) / "h200")
    assert any("filed under one head, made at another" in line for line in lines)
    assert any("not a commit of this repository" in line for line in lines)


def measured(path: Path, **sources: str) -> str:
    """A result file of the benchmark `gemm`, which rests on h3-kernels; returns ``gemm=path``."""
    seen = environment()
    records.write(path, [{"ratio": 0.9}], {**seen, "head": "unknown", "sources": seen["sources"] | sources})
    return f"gemm={path}"


def test_results_are_filed_under_the_commit_whose_source_they_ran_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evidence, "EVIDENCE", tmp_path / "evidence")
    monkeypatch.setattr(evidence, "claims", lambda: [CLAIM])
    head = git("rev-parse", "HEAD")
    other = {"h3-mapper": "0" * 64}
    assert (
        evidence.file_results("h200", [measured(tmp_path / "a.json", **other)], head, evidence.NO_TESTS) == 0
    )
    (found,) = evidence.folders(tmp_path / "evidence")
    assert found.environment["head"] == head
    other = {"h3-kernels": "0" * 64}
    assert (
        evidence.file_results("cpu", [measured(tmp_path / "b.json", **other)], head, evidence.NO_TESTS) == 1
    )
    assert "other source of h3-kernels" in capsys.readouterr().err
    assert not (tmp_path / "evidence" / head / "cpu").exists()


def test_results_are_added_to_a_folder_where_that_is_asked_and_never_put_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evidence, "EVIDENCE", tmp_path / "evidence")
    monkeypatch.setattr(evidence, "claims", lambda: [CLAIM, CLAIM | {"benchmark": "nodes"}])
    gemm, head = measured(tmp_path / "a.json"), git("rev-parse", "HEAD")
    nodes = f"nodes={gemm.partition('=')[2]}"

    def filed(result: str, add: bool) -> int:
        return evidence.file_results("h200", [result], head, evidence.NO_TESTS, add)

    assert [filed(gemm, False), filed(nodes, False), filed(gemm, True), filed(nodes, True)] == [0, 1, 1, 0]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "--add puts in what it lacks" in said[0]
    assert "holds gemm already" in said[1]
    (found,) = evidence.folders(tmp_path / "evidence")
    assert [record["benchmark"] for record in found.report["records"]] == ["gemm", "nodes"]
    assert not found.edited


def test_evidence_of_other_source_than_its_heads_is_refused(tmp_path: Path) -> None:
    seen = environment()
    seen["sources"]["h3-kernels"] = "0" * 64
    made = evidence.write(tmp_path / "evidence", "h200", seen, evidence.NO_TESTS, RECORDS)
    figures.speed_figure(RECORDS, made / "figure.png", "a title")
    assert refused(made) == [
        f"{made.parent.name}/h200: made with other source of h3-kernels than its head has"
    ]


def test_broken_json_is_named(folder: Path) -> None:
    (folder / "tests.json").write_text("{")
    with pytest.raises(ValueError, match=r"tests\.json: not readable evidence"):
        evidence.folders(folder.parent.parent)


CLAIM = {"id": "speed", "hardware": "h200", "benchmark": "gemm", "packages": ["h3-kernels"]}


def test_claims_on_older_source_are_said_and_current_ones_are_not(folder: Path) -> None:
    found = evidence.folders(folder.parent.parent)
    found[0].environment["sources"]["h3-kernels"] = evidence.source_digest("h3-kernels")
    assert evidence.standing(found, CLAIM).current
    found[0].environment["sources"]["h3-kernels"] = "0" * 64
    old = evidence.standing(found, CLAIM)
    assert not old.current
    assert "older than the source of h3-kernels" in str(old)


@pytest.mark.parametrize("change", [{"hardware": "b200"}, {"benchmark": "nodes"}])
def test_a_claim_that_was_never_measured_is_said(folder: Path, change: dict[str, str]) -> None:
    none = evidence.standing(evidence.folders(folder.parent.parent), CLAIM | change)
    assert not none.current
    assert str(none) == f"no evidence on {none.claim['hardware']} yet"


def test_the_newest_folder_is_taken_by_day_and_then_by_commit(folder: Path) -> None:
    """Two heads measured on one day: the later commit's."""
    parent = git("rev-parse", "HEAD~1")
    older = folder.parent.parent / parent / "h200"
    older.parent.mkdir()
    shutil.copytree(folder, older)
    found = evidence.folders(folder.parent.parent)
    newest = evidence.newest(found, "h200", lambda record: record["benchmark"] == "gemm")
    assert newest is not None
    assert newest.path == folder
    edit(older, "report", lambda report: report.update(made="2999-01-01"))
    found = evidence.folders(folder.parent.parent)
    newest = evidence.newest(found, "h200", lambda record: record["benchmark"] == "gemm")
    assert newest is not None
    assert newest.path == older


def test_every_claim_names_pages_that_exist_packages_of_ours_and_a_benchmark_that_can_be_run() -> None:
    for claim in evidence.claims():
        script = f"{claim['benchmark'].partition('-')[0]}*.py"
        assert [*(ROOT / "benchmarks").glob(script), *(ROOT / "tools").glob(script)], claim["id"]
        assert all((ROOT / page).is_file() for page in claim["pages"]), claim["id"]
        assert set(claim["packages"]) <= {path.name for path in (ROOT / "packages").iterdir()}


def test_every_result_the_documents_show_is_a_claim_that_may_grow_old() -> None:
    """`benchmarks/results/NAME_HARDWARE.json` is shown by docs/results.md; a name that is claimed nowhere is missed."""
    claimed = {(claim["benchmark"], claim["hardware"]) for claim in evidence.claims()}
    shown = {tuple(path.stem.rsplit("_", 1)) for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert shown <= claimed
    assert ("lora", "h200") not in claimed


def test_the_repositorys_own_evidence_is_accepted() -> None:
    assert evidence.check() == 0
