"""Result files: a JSON list with one record per measurement, each holding the environment it was made in."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from environment import collect

Record = dict[str, Any]


class Writer:
    """Collects records and rewrites the file after each, so that a run cut short leaves what it measured."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []
        self.environment = collect()

    def add(self, record: Record) -> None:
        """Keep one record and write them all; shows it on stderr."""
        self.records.append(record)
        print(json.dumps(record), file=sys.stderr, flush=True)
        write(self.path, self.records, self.environment)


def write(path: Path, records: Iterable[Record], environment: Record | None = None) -> None:
    """Write `records` to `path`, each with its environment (collected now if not given).

    Replaces the file at once: a process that is killed meanwhile leaves the file of the record before.
    """
    environment = environment or collect()
    whole = [{**record, "environment": environment} for record in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(whole, indent=1) + "\n")
    fresh.replace(path)


def load(path: Path) -> list[Record]:
    """The records of a result file; empty where it does not exist. Raises ValueError for another form."""
    if not path.exists():
        return []
    whole = json.loads(path.read_text())
    if not isinstance(whole, list) or not all(
        isinstance(record, dict) and "environment" in record for record in whole
    ):
        raise ValueError(f"{path}: not a result file: expected a list of records, each with its environment")
    return whole
