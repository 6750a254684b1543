"""Write a hashed requirements file from a list of exact pins: ``pin.py requirements/engines.in [more wheel folders]``.

Every wheel a Linux x86_64 Python 3.11 to 3.13 would take is downloaded and hashed, so that one file serves all three.
Wheels in the extra folders are hashed too: a pin may have another build there (torch's CPU build and its CUDA build
share a version).
"""

from __future__ import annotations

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
    """Download the wheels of `pins` for one Python version into `folder`."""
    platforms = [word for tag in PLATFORMS for word in ("--platform", f"{tag}_x86_64")]
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
    ]
    target = [
        "--python-version",
        python,
        "--implementation",
        "cp",
        *platforms,
        "-d",
        str(folder),
        "-r",
        str(pins),
    ]
    subprocess.run([*command, *target], check=True)


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


def main() -> None:
    """Write the ``.txt`` beside the given ``.in`` file."""
    source, *extra = (Path(argument) for argument in sys.argv[1:])
    pins = [
        line.strip() for line in source.read_text().splitlines() if line.strip() and not line.startswith("#")
    ]
    with tempfile.TemporaryDirectory() as scratch:
        for python in PYTHONS:
            download(source, python, Path(scratch))
        found = hashes([Path(scratch), *extra])
    lines = [HEADER.format(source=source.name)]
    for pin in sorted(pins, key=str.lower):
        name, version = pin.split("==")
        known = sorted(found[f"{normalized(name)}=={version}"])
        lines.append(" \\\n    ".join([pin, *(f"--hash=sha256:{value}" for value in known)]) + "\n")
    source.with_suffix(".txt").write_text("".join(lines))


if __name__ == "__main__":
    main()
