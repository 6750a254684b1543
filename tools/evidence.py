"""Write and check evidence: what one run printed, on one kind of hardware, at one head.

``evidence/<head>/<hardware>/`` holds environment.json, tests.json, report.json and figure.png. report.json ends with a
SHA-256 over all three, so an edit by hand is seen. ``python tools/evidence.py check`` refuses malformed, edited or
unknown-head evidence, and says which claims rest on evidence older than the code they describe.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from environment import PACKAGES, ROOT, head, source_digest
from provenance import changed

EVIDENCE = ROOT / "evidence"
PARTS = ("environment", "tests", "report")
NO_TESTS: dict[str, Any] = {"command": "none", "passed": 0, "failed": 0, "skipped": 0, "cases": []}


@dataclass(frozen=True)
class Folder:
    """One evidence folder and its three parsed files."""

    path: Path
    environment: dict[str, Any]
    tests: dict[str, Any]
    report: dict[str, Any]

    @property
    def name(self) -> str:
        """``<head>/<hardware>``."""
        return f"{self.path.parent.name}/{self.path.name}"


@dataclass(frozen=True)
class Standing:
    """What a claim of the documents rests on: its newest evidence, and the packages changed since."""

    claim: dict[str, Any]
    evidence: Folder | None
    changed: tuple[str, ...]

    @property
    def current(self) -> bool:
        """True when the evidence was made with the source the packages have now."""
        return self.evidence is not None and not self.changed

    def __str__(self) -> str:
        if self.evidence is None:
            return f"no evidence on {self.claim['hardware']} yet"
        head = self.evidence.path.parent.name[:12]
        if self.changed:
            return f"evidence {head} is older than the source of {', '.join(self.changed)}"
        return f"evidence {head} was made with today's source"


def digest(environment: dict[str, Any], tests: dict[str, Any], records: list[dict[str, Any]]) -> str:
    """SHA-256 over the canonical JSON (sorted keys, no spaces) of the three parts of a run."""
    text = json.dumps([environment, tests, records], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def tests_from_junit(path: Path, command: str) -> dict[str, Any]:
    """A pytest JUnit file as tests.json: every case with its outcome and seconds."""
    cases = []
    # The file is pytest's own output of this run, not an untrusted document.
    for case in ET.parse(path).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        name = f"{case.get('classname')}::{case.get('name')}"
        cases.append({"name": name, "outcome": outcome, "seconds": float(case.get("time", 0))})
    counts = {
        kind: sum(case["outcome"] == kind for case in cases) for kind in ("passed", "failed", "skipped")
    }
    return {"command": command, **counts, "cases": cases}


def write(
    folder: Path,
    hardware: str,
    environment: dict[str, Any],
    tests: dict[str, Any],
    records: list[dict[str, Any]],
) -> Path:
    """Write the three files of one run into ``folder/<head>/<hardware>``; returns that path."""
    target = folder / str(environment["head"]) / hardware
    target.mkdir(parents=True, exist_ok=True)
    report = {
        "schema": 1,
        "head": environment["head"],
        "hardware": hardware,
        "made": datetime.now(UTC).date().isoformat(),
        "records": records,
        "digest": digest(environment, tests, records),
    }
    for part, value in zip(PARTS, (environment, tests, report), strict=True):
        (target / f"{part}.json").write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
    return target


def folders(root: Path = EVIDENCE) -> list[Folder]:
    """Every evidence folder below `root`, sorted; a folder that lacks a file or holds bad JSON raises ValueError."""
    found = []
    for path in sorted(path for path in root.glob("*/*") if path.is_dir()):
        parts = {}
        for part in PARTS:
            file = path / f"{part}.json"
            try:
                parts[part] = json.loads(file.read_text())
            except (OSError, json.JSONDecodeError) as error:
                raise ValueError(f"{file}: not readable evidence ({error})") from error
        found.append(Folder(path, **parts))
    return found


def problems(folder: Folder, schema: dict[str, Any]) -> list[str]:
    """What is wrong with one folder: schema, digest, head, figure. Empty when nothing is."""
    import jsonschema

    whole = {"environment": folder.environment, "tests": folder.tests, "report": folder.report}
    wrong = [
        f"{folder.name}: {'.'.join(map(str, error.path))}: {error.message}"
        for error in jsonschema.Draft202012Validator(schema).iter_errors(whole)
    ]
    if wrong:
        return wrong
    if digest(folder.environment, folder.tests, folder.report["records"]) != folder.report["digest"]:
        wrong.append(
            f"{folder.name}: the digest does not match the contents; evidence is never edited, run it again"
        )
    heads = {folder.path.parent.name, folder.environment["head"], folder.report["head"]}
    if len(heads) != 1:
        wrong.append(f"{folder.name}: filed under one head, made at another: {sorted(heads)}")
    if folder.report["hardware"] != folder.path.name:
        wrong.append(f"{folder.name}: report.json says hardware {folder.report['hardware']!r}")
    if not is_commit(folder.path.parent.name):
        wrong.append(f"{folder.name}: {folder.path.parent.name} is not a commit of this repository")
    else:
        rests = {name for record in folder.report["records"] for name in rests_on(record["benchmark"])}
        other = changed(folder.environment, folder.path.parent.name, sorted(rests))
        wrong += [f"{folder.name}: made with other source of {name} than its head has" for name in other]
    if not (folder.path / "figure.png").is_file():
        wrong.append(f"{folder.name}: figure.png is missing")
    return wrong


def is_commit(head: str) -> bool:
    """True when `head` names a commit in this repository's history."""
    found = subprocess.run(
        ["git", "-C", str(ROOT), "cat-file", "-e", f"{head}^{{commit}}"], capture_output=True, check=False
    )
    return found.returncode == 0


def newest(found: list[Folder], hardware: str, holds: Callable[[dict[str, Any]], bool]) -> Folder | None:
    """The newest folder of a hardware with a record that `holds`."""
    fitting = [f for f in found if f.path.name == hardware and any(map(holds, f.report["records"]))]
    return max(fitting, key=age, default=None)


def age(folder: Folder) -> tuple[str, int]:
    """Sorts folders, oldest first: the day one was made, then how many commits its head has behind it (0 if unknown).

    Not the commit's time: two commits of one second have the same.
    """
    count = ["git", "-C", str(ROOT), "rev-list", "--count", folder.path.parent.name]
    done = subprocess.run(count, capture_output=True, text=True, check=False)
    return str(folder.report["made"]), int(done.stdout) if done.returncode == 0 else 0


def claims() -> list[dict[str, Any]]:
    """The claims the documents make: id, page, hardware, benchmark, and the packages whose source they rest on."""
    listed: list[dict[str, Any]] = json.loads((EVIDENCE / "claims.json").read_text())
    return listed


def rests_on(benchmark: str) -> list[str]:
    """The packages that a benchmark's claims rest on; all of them if it makes no claim."""
    named = {
        package for claim in claims() if claim["benchmark"] == benchmark for package in claim["packages"]
    }
    return sorted(named) or list(PACKAGES)


def standing(found: list[Folder], claim: dict[str, Any]) -> Standing:
    """The newest evidence of a claim, and which of its packages have other source now."""
    run = newest(found, claim["hardware"], lambda record: record["benchmark"] == claim["benchmark"])
    sources = run.environment["sources"] if run else {}
    other = [package for package in claim["packages"] if sources.get(package) != source_digest(package)]
    return Standing(claim, run, tuple(other) if run else ())


def check() -> int:
    """Print every problem and stale claim; returns 1 when evidence is refused, 0 otherwise (stale is only said)."""
    schema = json.loads((EVIDENCE / "schema.json").read_text())
    try:
        found = folders()
    except ValueError as error:
        print(f"evidence: {error}", file=sys.stderr)
        return 1
    wrong = [line for folder in found for line in problems(folder, schema)]
    for line in wrong:
        print(f"evidence: {line}", file=sys.stderr)
    for claim in claims():
        stands = standing(found, claim)
        if not stands.current:
            print(f"stale: {claim['id']}: {stands}")
    return 1 if wrong else 0


def file_results(hardware: str, named: list[str], commit: str, tests: dict[str, Any]) -> int:
    """File result files (``NAME=FILE``) as evidence of `commit`, whose source each must have run on."""
    import records
    from figures import speed_figure

    made: list[dict[str, Any]] = []
    for name, _, path in (item.partition("=") for item in named):
        for record in records.load(Path(path)):
            other = changed(record["environment"], commit, rests_on(name))
            if other:
                print(
                    f"evidence: {path} was measured with other source of {', '.join(other)} than {commit} has: "
                    "run it again",
                    file=sys.stderr,
                )
                return 1
            made.append({"benchmark": name, **record})
    environment = {**made[0]["environment"], "head": commit}
    target = write(EVIDENCE, hardware, environment, tests, made)
    speed_figure(made, target / "figure.png", f"{hardware} at {commit[:12]}")
    print(f"evidence: {len(made)} records in {target.relative_to(ROOT)}")
    return 0


def main() -> int:
    """Command line: ``check``, or ``file HARDWARE NAME=FILE... [--head COMMIT] [--junit FILE --tests COMMAND]``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="refuse malformed, edited or unknown evidence; name stale claims")
    filing = commands.add_parser("file", help="file results and test outcomes as evidence of a commit")
    filing.add_argument("hardware")
    filing.add_argument("results", nargs="+", help="NAME=FILE, a benchmark's name and its result file")
    filing.add_argument(
        "--head", help="the commit, 40 digits, whose source they ran on (default: git's HEAD)"
    )
    filing.add_argument("--junit", type=Path, help="pytest's JUnit file of the tests run beside them")
    filing.add_argument("--tests", default="none", help="the command that wrote the JUnit file")
    arguments = parser.parse_args()
    if arguments.command == "check":
        return check()
    tests = NO_TESTS if arguments.junit is None else tests_from_junit(arguments.junit, arguments.tests)
    return file_results(arguments.hardware, arguments.results, arguments.head or head(), tests)


if __name__ == "__main__":
    raise SystemExit(main())
