"""Which commit a result was measured at, told by the digests of the sources it ran on.

    python tools/provenance.py adopt SOURCE DESTINATION --head COMMIT --packages h3-kernels

A machine that received a tree without its history, or before it was committed, cannot say its commit; the digests it
recorded can. ``adopt`` writes the result file again with that commit, or refuses if the commit holds other sources.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import records
from environment import PACKAGES, ROOT


@cache
def source_digest_at(commit: str, package: str) -> str:
    """``environment.source_digest`` of a package as committed. Raises ValueError if the commit has no such source."""
    source = f"packages/{package}/src"
    done = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, source], capture_output=True, check=False
    )
    if done.returncode:
        raise ValueError(f"{commit}: no {source} there ({done.stderr.decode().strip()})")
    total = hashlib.sha256()
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tree:
        files = {PurePosixPath(m.name).relative_to(source): m for m in tree.getmembers() if m.isfile()}
        for path in sorted(files):
            held = tree.extractfile(files[path])
            assert held is not None
            total.update(str(path).encode() + b"\0" + held.read())
            total.update(b"\0")
    return total.hexdigest()


def changed(environment: Mapping[str, Any], commit: str, packages: Iterable[str]) -> list[str]:
    """The packages whose source in a recorded environment is not the commit's."""
    return [name for name in packages if environment["sources"].get(name) != source_digest_at(commit, name)]


def adopt(source: Path, destination: Path, commit: str, packages: Iterable[str]) -> None:
    """Write `source`'s records with `commit` as their head. Raises ValueError if one ran on other sources."""
    found = records.load(source)
    for record in found:
        other = changed(record["environment"], commit, packages)
        if other:
            raise ValueError(f"{source}: measured with other source of {', '.join(other)} than {commit} has")
    whole = [{**record, "environment": {**record["environment"], "head": commit}} for record in found]
    destination.write_text(json.dumps(whole, indent=1) + "\n")


def main() -> int:
    """Command line: ``adopt``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    adopting = parser.add_subparsers(dest="command", required=True).add_parser("adopt")
    adopting.add_argument("source", type=Path)
    adopting.add_argument("destination", type=Path)
    adopting.add_argument("--head", required=True, help="the commit, 40 digits")
    adopting.add_argument(
        "--packages", nargs="+", choices=PACKAGES, required=True, help="what the result rests on"
    )
    arguments = parser.parse_args()
    try:
        adopt(arguments.source, arguments.destination, arguments.head, arguments.packages)
    except ValueError as error:
        print(f"provenance: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
