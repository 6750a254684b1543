"""The processes of a GPU run: seconds to spend on each, several at once, and how one ended. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from environment import PACKAGES, ROOT

STOP_SECONDS = 20.0
"""What an interrupted process has to write down what it found."""

FILE_SECONDS = 5.0
"""Of a budget, for filing the last step."""

POLL_SECONDS = 0.05
SPENT = "the run's budget was spent"


@dataclass(frozen=True)
class Limits:
    """Seconds a step may take: its own or the common limit, and what is left of the run's budget."""

    common: float
    own: Mapping[str, float] = field(default_factory=dict)
    end: float = float("inf")
    """When the budget is spent, by ``time.monotonic``."""

    @staticmethod
    def of(given: Iterable[tuple[str, float]], budget: float) -> Limits:
        """From ("", seconds) for all steps and (step, seconds) for one; later ones win."""
        own = dict(given)
        return Limits(own.pop("", 1800.0), own, time.monotonic() + budget)

    def seconds(self, step: str) -> float:
        """For a step that starts now; 0 where the budget leaves nothing once it must be stopped and filed."""
        left = self.end - time.monotonic() - STOP_SECONDS - FILE_SECONDS
        return max(0.0, min(self.own.get(step, self.common), left))


@dataclass(frozen=True)
class Ended:
    """A process's exit status, None where it was interrupted after ``limit`` seconds or, at 0, never started."""

    status: int | None
    limit: float

    def __str__(self) -> str:
        """How it ended, in words."""
        if self.status is None:
            return f"interrupted after {self.limit:.0f} s" if self.limit else SPENT
        if self.status < 0:
            return f"killed by signal {-self.status}"
        return f"failed with status {self.status}" if self.status else "ended well"


def environ(gpus: int) -> dict[str, str]:
    """This process's environment, with the four packages' sources and the tools on the path."""
    sources = [str(ROOT / "packages" / package / "src") for package in PACKAGES]
    path = os.pathsep.join([*sources, str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "H3_GPUS": str(gpus)}


def run_several(
    commands: Mapping[str, list[str]], limit: Callable[[str], float], gpus: int, jobs: int = 1
) -> Iterator[tuple[str, Ended]]:
    """Run named commands, ``jobs`` at a time; each name as its process ends. ``limit(name)`` is asked at its start.

    Each leads a process group of its own: the ranks it started end with it, so that none holds the device of the next.
    """
    waiting, running = deque(commands), dict[str, tuple[subprocess.Popen[bytes], float, float]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.popleft()
                seconds = limit(name)
                if seconds <= 0:
                    yield name, Ended(None, 0.0)
                    continue
                process = subprocess.Popen(
                    commands[name], cwd=ROOT, env=environ(gpus), start_new_session=True
                )
                running[name] = process, time.monotonic() + seconds, seconds
            for name, (process, deadline, seconds) in list(running.items()):
                status = process.poll()
                if status is None and time.monotonic() < deadline:
                    continue
                _end(process)
                del running[name]
                yield name, Ended(status, seconds)
            time.sleep(POLL_SECONDS)
    finally:
        for process, _, _ in running.values():
            process.send_signal(signal.SIGINT)
        for process, _, _ in running.values():
            _end(process)


def run(command: list[str], limit: float, gpus: int) -> Ended:
    """Run one command."""
    ((_, ended),) = run_several({"": command}, lambda _: limit, gpus)
    return ended


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a process that still runs, wait for what it writes then, and kill what is left of its group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
