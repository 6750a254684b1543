"""Write and check evidence: what one run printed, on one kind of hardware, at one head.

``evidence/<head>/<hardware>/`` holds environment.json, tests.json, report.json and figure.png. report.json ends with a
SHA-256 over the contents of the three, so an edit by hand is seen. ``python tools/evidence.py check`` refuses
malformed, edited or unknown-head evidence, and says which claims rest on evidence older than the code they describe.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environment import PACKAGES, ROOT, head, source_digest
from evidence_files import (
    EVIDENCE,
    NO_TESTS,
    Folder,
    Tests,
    folders,
    joined,
    place,
    read,
    tests_from_junit,
    write,
)
from provenance import changed


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
    if folder.edited:
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


def file_results(hardware: str, named: list[str], commit: str, tests: Tests, add: bool = False) -> int:
    """File result files (``NAME=FILE``) as evidence of `commit`, whose source each must have run on."""
    import records

    made: list[dict[str, Any]] = []
    for name, _, path in (item.partition("=") for item in named):
        for record in records.load(Path(path)):
            other = changed(record["environment"], commit, rests_on(name))
            if other:
                return refused(
                    f"{path} was measured with other source of {', '.join(other)} than {commit} has: run it again"
                )
            made.append({"benchmark": name, **record})
    if not made:
        return refused(f"no record in {', '.join(named)}: name result files as NAME=FILE")
    return put(hardware, {**made[0]["environment"], "head": commit}, tests, made, add)


def add_folder(path: Path) -> int:
    """Add a run's evidence folder, made elsewhere, to the repository's at its head and hardware."""
    try:
        folder = read(path)
    except ValueError as error:
        return refused(str(error))
    if folder.edited:
        return refused(f"{path}: the digest does not match the contents, nothing is added: run it again")
    return put(path.resolve().name, folder.environment, folder.tests, folder.report["records"], add=True)


def put(
    hardware: str, environment: dict[str, Any], tests: Tests, made: list[dict[str, Any]], add: bool
) -> int:
    """Write a run, with what its folder held before where it may be added to it."""
    try:
        before = place(EVIDENCE, hardware, environment, add)
        tests, whole = joined(before, tests, made)
    except ValueError as error:
        return refused(str(error))
    target = write(EVIDENCE, hardware, before.environment if before else environment, tests, whole)
    print(
        f"evidence: {len(whole)} records and {len(tests['cases'])} tests in {target.relative_to(EVIDENCE.parent)}"
    )
    return 0


def refused(why: str) -> int:
    """Say why nothing is filed; the exit status for it."""
    print(f"evidence: {why}", file=sys.stderr)
    return 1


def main() -> int:
    """Command line: ``check``, ``file HARDWARE NAME=FILE... [--head --junit --tests --add]``, ``add FOLDER``."""
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
    filing.add_argument("--add", action="store_true", help="to the folder that is there, what it lacks")
    adding = commands.add_parser(
        "add", help="add a run's folder, made elsewhere, to the one of its head here"
    )
    adding.add_argument("folder", type=Path, help="<head>/<hardware> as gpu_matrix.py wrote it")
    arguments = parser.parse_args()
    if arguments.command == "check":
        return check()
    if arguments.command == "add":
        return add_folder(arguments.folder)
    tests = NO_TESTS if arguments.junit is None else tests_from_junit(arguments.junit, arguments.tests)
    commit = arguments.head or head()
    return file_results(arguments.hardware, arguments.results, commit, tests, arguments.add)


if __name__ == "__main__":
    raise SystemExit(main())
