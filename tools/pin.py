"""Hash a list of exact pins: ``pin.py requirements/engines.in`` writes ``requirements/engines.txt``.

Every wheel a Linux x86_64 Python 3.11 to 3.13 would take is downloaded and hashed, so that one file serves all three.
Wheels in the extra folders are hashed too: a pin may have another build there (torch's CPU build and its CUDA build
share a version).
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13")
# pip matches platform tags exactly when they are named, so every glibc a wheel may ask for is listed.
PLATFORMS = (
    *(f"manylinux_2_{minor}" for minor in range(39, 4, -1)),
    "manylinux2014",
    "manylinux2010",
    "manylinux1",
)
HEADER = "# Written by tools/pin.py from {source}: every hash is of a wheel that was downloaded and read.\n"


def normalized(name: str) -> str:
    """A distribution name in the form index pages use."""
    return re.sub(r"[-_.]+", "-", name).lower()


def download(pins: Path, python: str, folder: Path) -> None:
    """Download the wheels of `pins` for one Python version into `folder`; raises CalledProcessError if pip fails."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    wanted = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    platforms = [word for tag in PLATFORMS for word in ("--platform", f"{tag}_x86_64")]
    subprocess.run([*pip, *wanted, *platforms, "-d", str(folder), "-r", str(pins)], check=True)


def hashes(folders: list[Path]) -> dict[str, set[str]]:
    """SHA-256 of every wheel in `folders`, by ``name==version`` without local version labels."""
    found: dict[str, set[str]] = defaultdict(set)
    for wheel in (wheel for folder in folders for wheel in folder.glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        with wheel.open("rb") as file:
            found[f"{normalized(name)}=={version.split('+')[0]}"].add(
                hashlib.file_digest(file, "sha256").hexdigest()
            )
    return found


def read_pins(source: Path) -> list[str]:
    """The pins of an ``.in`` file, without comments and blank lines; raises ValueError for a line that is not exact."""
    lines = (line.partition("#")[0].strip() for line in source.read_text().splitlines())
    pins = [line for line in lines if line]
    loose = [pin for pin in pins if not re.fullmatch(r"[\w.\[\]-]+==[\w.+!]+", pin)]
    if loose:
        raise ValueError(
            f"{source}: expected NAME==VERSION on every line, found {loose[0]!r}; pin it exactly"
        )
    return pins


def hashed(pins: list[str], found: dict[str, set[str]]) -> str:
    """The requirements file's text; raises ValueError for a pin without a wheel."""
    parts = []
    for pin in sorted(pins, key=str.lower):
        name, version = pin.split("==")
        known = sorted(found.get(f"{normalized(name.partition('[')[0])}=={version}", ()))
        if not known:
            raise ValueError(f"{pin}: no wheel was found for it; add a folder that holds one")
        parts.append(" \\\n    ".join([pin, *(f"--hash=sha256:{value}" for value in known)]) + "\n")
    return "".join(parts)


def main() -> int:
    """Write the ``.txt`` beside the given ``.in`` file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="the list of pins, NAME==VERSION a line")
    parser.add_argument("folders", type=Path, nargs="*", help="folders with more wheels to hash")
    arguments = parser.parse_args()
    source = arguments.source
    try:
        pins = read_pins(source)
        with tempfile.TemporaryDirectory() as scratch:
            for python in PYTHONS:
                download(source, python, Path(scratch))
            text = hashed(pins, hashes([Path(scratch), *arguments.folders]))
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"pin: {error}", file=sys.stderr)
        return 1
    source.with_suffix(".txt").write_text(HEADER.format(source=source.name) + text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
