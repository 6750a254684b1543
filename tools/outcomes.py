"""Pytest plugin: write down each test's start and outcome as it happens, so that a crash loses none that were reached.

    python -m pytest -p outcomes --outcomes FILE [--part 1/2] ...

A JUnit file is written at the end of a session, which a crashed or killed process never sees. FILE holds one JSON line
when a test starts (`start`), when it is done (`name`, `outcome`, `seconds`) and when the session ends (`end`). With
``--part 1/2`` a session runs every second of the tests it would, from the first; ``2/2`` runs the others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--outcomes FILE``, ``--part I/N``."""
    parser.addoption("--outcomes", type=Path, help="write each test's outcome here as it happens")
    parser.addoption("--part", default="1/1", help="I/N: every N-th test, from the I-th (default: 1/1)")


def pytest_configure(config: pytest.Config) -> None:
    """Register the writer where a file is named."""
    path = config.getoption("--outcomes")
    if path is not None:
        config.pluginmanager.register(Outcomes(path))


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deal the tests out. Neighbours are cases of one test, which take about as long, so turns are even."""
    number, parts = map(int, config.getoption("--part").split("/"))
    if parts > 1:
        kept = items[number - 1 :: parts]
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % parts != number - 1])
        items[:] = kept


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

    def _add(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
