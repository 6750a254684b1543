"""Pytest plugin: write down each test's start and outcome as it happens, so that a crash loses none that were reached.

    python -m pytest -p outcomes --outcomes FILE ...

A JUnit file is written at the end of a session, which a crashed or killed process never sees. FILE holds one JSON line
when a test starts (`start`), when it is done (`name`, `outcome`, `seconds`) and when the session ends (`end`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

Case = dict[str, Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--outcomes FILE``."""
    parser.addoption("--outcomes", type=Path, help="write each test's outcome here as it happens")


def pytest_configure(config: pytest.Config) -> None:
    """Register the writer where a file is named."""
    path = config.getoption("--outcomes")
    if path is not None:
        config.pluginmanager.register(Outcomes(path))


class Outcomes:
    """Appends lines to ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._phases: list[pytest.TestReport] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """The test is named before it runs: one that takes the process down is known."""
        self._phases = []
        self._add({"start": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Set-up, call and tear-down each report."""
        self._phases.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Failed where any phase failed; skipped where one was; else passed."""
        kinds = {phase.outcome for phase in self._phases}
        outcome = next(kind for kind in ("failed", "skipped", "passed") if kind in kinds)
        seconds = round(sum(phase.duration for phase in self._phases), 3)
        self._add({"name": nodeid, "outcome": outcome, "seconds": seconds})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that does not import is a failed case."""
        if report.failed:
            self._add({"name": report.nodeid, "outcome": "failed", "seconds": 0.0})

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """The session came to its end by itself."""
        self._add({"end": int(exitstatus)})

    def _add(self, line: Case) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read(path: Path, name: str) -> list[Case]:
    """The cases of a file: one that was started and never done is failed, as is ``name``, the whole session, where it
    ended before or after its tests without saying so."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    cases = [line for line in lines if "name" in line]
    done = {case["name"] for case in cases}
    lost = [line["start"] for line in lines if "start" in line and line["start"] not in done]
    # 5: no test was selected. 1: some failed, and are named. Anything else is the session's own fault.
    if not lost and not any(line.get("end") in (0, 1, 5) for line in lines):
        lost = [name]
    return cases + [{"name": case, "outcome": "failed", "seconds": 0.0} for case in lost]
