"""One evidence folder: its three files and figure, how they are written, and how a second run adds what is lacking.

``evidence/<head>/<hardware>/`` holds environment.json, tests.json, report.json and figure.png. report.json ends with a
SHA-256 over the contents of the three, so an edit by hand is seen.
"""

from __future__ import annotations

import hashlib
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from environment import ROOT

EVIDENCE = ROOT / "evidence"
PARTS = ("environment", "tests", "report")
OUTCOMES = ("passed", "failed", "skipped")
PASSING = ("clocks.sm", "clocks.mem")
"""Of a GPU: what differs from one moment to the next."""

Tests = dict[str, Any]
Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Folder:
    """One evidence folder and its three parsed files."""

    path: Path
    environment: dict[str, Any]
    tests: Tests
    report: dict[str, Any]

    @property
    def name(self) -> str:
        """``<head>/<hardware>``."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def edited(self) -> bool:
        """True when the digest is not that of the contents."""
        made = digest(self.environment, self.tests, self.report["records"])
        return made != str(self.report["digest"])


def digest(environment: dict[str, Any], tests: Tests, records: Records) -> str:
    """SHA-256 over the canonical JSON (sorted keys, no spaces) of the three parts of a run."""
    text = json.dumps([environment, tests, records], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def tests_of(cases: list[dict[str, Any]], command: str) -> Tests:
    """tests.json of cases that ``command`` ran: how many of each outcome, and each with its name and seconds."""
    counts = {kind: sum(case["outcome"] == kind for case in cases) for kind in OUTCOMES}
    return {"command": command, **counts, "cases": cases}


NO_TESTS = tests_of([], "none")


def tests_from_junit(path: Path, command: str) -> Tests:
    """A pytest JUnit file as tests.json: every case with its outcome and seconds."""
    cases = []
    # The file is pytest's own output of this run, not an untrusted document.
    for case in ET.parse(path).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        name = f"{case.get('classname')}::{case.get('name')}"
        cases.append({"name": name, "outcome": outcome, "seconds": float(case.get("time", 0))})
    return tests_of(cases, command)


def together(*several: Tests) -> Tests:
    """Runs of different tests as one."""
    ran = [tests for tests in several if tests != NO_TESTS]
    if not ran:
        return NO_TESTS
    cases = [case for tests in ran for case in tests["cases"]]
    return tests_of(cases, "; ".join(tests["command"] for tests in ran))


def write(root: Path, hardware: str, environment: dict[str, Any], tests: Tests, records: Records) -> Path:
    """Write the files of one run into ``root/<head>/<hardware>``, in the place of what is there; returns that path."""
    from figures import speed_figure

    head = str(environment["head"])
    target = root / head / hardware
    target.mkdir(parents=True, exist_ok=True)
    report = {
        "schema": 1,
        "head": head,
        "hardware": hardware,
        "made": datetime.now(UTC).date().isoformat(),
        "records": records,
        "digest": digest(environment, tests, records),
    }
    for part, value in zip(PARTS, (environment, tests, report), strict=True):
        (target / f"{part}.json").write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
    speed_figure(records, target / "figure.png", f"{hardware.upper()} at {head[:12]}")
    return target


def read(path: Path) -> Folder:
    """One folder; raises ValueError where it lacks a file or holds bad JSON."""
    parts = {}
    for part in PARTS:
        file = path / f"{part}.json"
        try:
            parts[part] = json.loads(file.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"{file}: not readable evidence ({error})") from error
    return Folder(path, **parts)


def folders(root: Path = EVIDENCE) -> list[Folder]:
    """Every evidence folder below `root`, sorted; a folder that lacks a file or holds bad JSON raises ValueError."""
    return [read(path) for path in sorted(path for path in root.glob("*/*") if path.is_dir())]


def measured(records: Iterable[dict[str, Any]]) -> set[str]:
    """The benchmarks that ran."""
    return {record["benchmark"] for record in records if "not_run" not in record}


def tested(tests: Tests) -> set[str]:
    """The packages whose tests ran."""
    found = (re.match(r"packages[./]([\w-]+)", case["name"]) for case in tests["cases"])
    return {match[1] for match in found if match}


def place(root: Path, hardware: str, environment: dict[str, Any], add: bool) -> Folder | None:
    """The folder a run at this head and hardware is added to; None where there is none yet.

    Raises ValueError where there is one and ``add`` is false, where it was edited, or where its source, software or
    device is not the run's.
    """
    path = root / str(environment["head"]) / hardware
    if not path.exists():
        return None
    if not add:
        raise ValueError(f"{path}: holds evidence already: --add puts in what it lacks")
    folder = read(path)
    if folder.edited:
        raise ValueError(f"{path}: the digest does not match the contents, nothing is added: run it again")
    other = unlike(folder.environment, environment)
    if other:
        raise ValueError(f"{path}: made with other {', '.join(other)}, nothing is added: file it elsewhere")
    return folder


def unlike(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Which parts of two environments keep their runs out of one folder. The host may differ: records name theirs."""

    def parts(seen: dict[str, Any]) -> dict[str, Any]:
        gpu = {name: value for name, value in (seen["gpu"] or {}).items() if name not in PASSING}
        return {**{name: seen[name] for name in ("head", "sources", "python", "software")}, "gpu": gpu}

    a, b = parts(first), parts(second)
    return [name for name in a if a[name] != b[name]]


def refuse_again(folder: Folder | None, packages: Iterable[str], benchmarks: Iterable[str]) -> None:
    """Raise ValueError where a folder holds one of these packages' tests, or one of these benchmarks' records."""
    if folder is None:
        return
    twice = sorted(tested(folder.tests) & set(packages)) + sorted(
        measured(folder.report["records"]) & set(benchmarks)
    )
    if twice:
        raise ValueError(f"{folder.path}: holds {', '.join(twice)} already, nothing is added: leave it out")


def joined(folder: Folder | None, tests: Tests, records: Records) -> tuple[Tests, Records]:
    """A folder's tests and records with a run's; what was not run once and ran then is no longer said to be missing.

    Raises ValueError where both hold tests of one package or one benchmark.
    """
    if folder is None:
        return tests, records
    refuse_again(folder, tested(tests), measured(records))
    before = folder.report["records"]
    kept = [r for r in before if "not_run" not in r or r["benchmark"] not in measured(records)]
    new = [r for r in records if "not_run" not in r or r["benchmark"] not in measured(before)]
    said = {r["benchmark"] for r in kept if "not_run" in r}
    return together(folder.tests, tests), kept + [r for r in new if r["benchmark"] not in said]
