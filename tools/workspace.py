"""Set up the development workspace: fill the wheelhouse, sync the virtual environment, install the engines.

Standard library only: it runs before anything is installed. Three pinned, hashed inputs decide everything:

- ``uv.lock``: the four packages and the tools. It names wheels by path in ``.wheelhouse/`` and holds no host name.
- ``requirements/wheelhouse.txt``: the same set for pip, which downloads and checks the wheels.
- ``requirements/engines.txt``: vLLM-Omni, Diffusers and what they import, installed without their dependency trees
  (the trees bring several GB that no CPU test imports).

Torch's CPU build (``requirements/torch-cpu.txt``) is not on every package index. Where pip cannot find it, the CUDA
build of the same version is installed with the runtime libraries it needs to import (``requirements/torch-cuda.txt``).
"""

from __future__ import annotations

import argparse
import hashlib
import html
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELHOUSE = ROOT / ".wheelhouse"
REQUIREMENTS = ROOT / "requirements"
BOOT_BIN = ROOT / ".boot" / "bin"
VENV = ROOT / ".venv"


def run(*command: str | Path, **environment: str) -> None:
    """Run a command from the root; its failure ends the set-up with the command's own exit status."""
    line = [str(part) for part in command]
    done = subprocess.run(line, cwd=ROOT, env={**os.environ, **environment}, check=False)
    if done.returncode:
        print(f"workspace: `{' '.join(line[:4])} ...` failed with status {done.returncode}", file=sys.stderr)
        raise SystemExit(done.returncode)


def digest(*paths: Path) -> str:
    """Short SHA-256 over the contents of `paths`, in order."""
    total = hashlib.sha256()
    for path in paths:
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


def is_done(stamp: Path, key: str) -> bool:
    """True when `stamp` records `key`: the step was finished with the same inputs."""
    return stamp.is_file() and stamp.read_text() == key


def download(requirements: str) -> None:
    """Download the wheels of a hashed requirements file into the wheelhouse, with pip's own hash check."""
    run(*_pip_download(requirements))


def can_download(requirements: str) -> bool:
    """Like `download`, but False where pip finds no such wheel."""
    line = [str(part) for part in _pip_download(requirements)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, check=False).returncode == 0


def _pip_download(requirements: str) -> list[str | Path]:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    return [*pip, "--require-hashes", "--only-binary=:all:", "-d", WHEELHOUSE, "-r", REQUIREMENTS / requirements]


def write_index() -> None:
    """Write the wheelhouse's index pages (the "simple" repository form, PEP 503) with each wheel's SHA-256."""
    wheels: dict[str, list[Path]] = {}
    for wheel in sorted(WHEELHOUSE.glob("*.whl")):
        name = re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()
        wheels.setdefault(name, []).append(wheel)
    pages = WHEELHOUSE / "simple"
    for name, files in wheels.items():
        links = (
            f'<a href="../../{html.escape(file.name.replace("+", "%2B"))}#sha256={_sha256(file)}">{html.escape(file.name)}</a><br>'
            for file in files
        )
        _write_page(pages / name / "index.html", links)
    _write_page(pages / "index.html", (f'<a href="{name}/">{name}</a><br>' for name in wheels))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_page(path: Path, links: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("<!DOCTYPE html><html><body>" + "\n".join(links) + "</body></html>\n")  # type: ignore[call-overload]


def sync() -> None:
    """Make `.venv` hold the four packages (editable) and the test, lint and docs tools, exactly as locked."""
    key = digest(ROOT / "uv.lock", ROOT / "pyproject.toml", REQUIREMENTS / "wheelhouse.txt", *_package_files())
    stamp = VENV / ".synced"
    if is_done(stamp, key):
        return
    download("wheelhouse.txt")
    write_index()
    run(
        BOOT_BIN / "uv", "sync", "--quiet", "--locked", "--inexact", "--all-packages", "--all-groups",
        "--python", sys.executable, UV_PYTHON_DOWNLOADS="never",
    )  # fmt: skip
    stamp.write_text(key)


def _package_files() -> list[Path]:
    return sorted(ROOT.glob("packages/*/pyproject.toml"))


def engines() -> None:
    """Add torch and both engines to `.venv`, then check that torch imports."""
    key = digest(*sorted(REQUIREMENTS.glob("*.txt")))
    stamp = VENV / ".engines"
    if is_done(stamp, key):
        return
    torch = "torch-cpu.txt"
    if not can_download(torch):
        torch = "torch-cuda.txt"
        download(torch)
    download("engines.txt")
    _install(torch)
    _install("engines.txt")
    run(VENV / "bin" / "python", "-c", "import torch")
    stamp.write_text(key)


def _install(requirements: str) -> None:
    run(
        BOOT_BIN / "uv", "pip", "install", "--quiet", "--no-config", "--no-deps", "--no-index", "--find-links", WHEELHOUSE,
        "--require-hashes", "--python", VENV / "bin" / "python", "-r", REQUIREMENTS / requirements,
    )  # fmt: skip


STEPS = {"sync": sync, "engines": engines, "index": write_index}


def main() -> None:
    """Run the named steps in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+", choices=sorted(STEPS))
    for step in parser.parse_args().steps:
        STEPS[step]()


if __name__ == "__main__":
    main()
