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
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELHOUSE = ROOT / ".wheelhouse"
REQUIREMENTS = ROOT / "requirements"
BOOT_BIN = ROOT / ".boot" / "bin"


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


def download(requirements: str) -> str:
    """Fill the wheelhouse from a hashed requirements file, with pip's own hash check; pip's message where it cannot.

    Done once for each Python: later environments, and a machine the wheelhouse is copied to, install what is there, and
    uv checks its hashes again.
    """
    stamp = WHEELHOUSE / f".{requirements}-{sys.version_info.major}.{sys.version_info.minor}"
    key = digest(REQUIREMENTS / requirements)
    if is_done(stamp, key):
        return ""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    checked = ["--require-hashes", "--only-binary=:all:", "-d", WHEELHOUSE, "-r", REQUIREMENTS / requirements]
    done = subprocess.run([*pip, *map(str, checked)], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip() or f"pip failed with status {done.returncode}"
    stamp.write_text(key)
    return ""


def need(requirements: str) -> None:
    """Like `download`, but pip's message ends the set-up."""
    message = download(requirements)
    if message:
        print(f"workspace: pip cannot download {requirements}: {message}", file=sys.stderr)
        raise SystemExit(1)


def write_index(_venv: Path) -> None:
    """Write the wheelhouse's index pages (the "simple" repository form, PEP 503) with each wheel's SHA-256."""
    wheels: dict[str, list[Path]] = {}
    for wheel in sorted(WHEELHOUSE.glob("*.whl")):
        name = re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()
        wheels.setdefault(name, []).append(wheel)
    pages = WHEELHOUSE / "simple"
    for name, files in wheels.items():
        _write_page(pages / name / "index.html", (_link(file) for file in files))
    _write_page(pages / "index.html", (f'<a href="{name}/">{name}</a><br>' for name in wheels))


def _link(wheel: Path) -> str:
    target = html.escape(wheel.name.replace("+", "%2B"))
    return f'<a href="../../{target}#sha256={_sha256(wheel)}">{html.escape(wheel.name)}</a><br>'


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_page(path: Path, links: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("<!DOCTYPE html><html><body>" + "\n".join(links) + "</body></html>\n")


def sync(venv: Path) -> None:
    """Make `venv` hold the four packages (editable) and the test, lint and docs tools, exactly as locked."""
    key = digest(
        ROOT / "uv.lock", ROOT / "pyproject.toml", REQUIREMENTS / "wheelhouse.txt", *_package_files()
    )
    stamp = venv / ".synced"
    if is_done(stamp, key):
        return
    need("wheelhouse.txt")
    write_index(venv)
    uv_sync = (BOOT_BIN / "uv", "sync", "--quiet", "--locked", "--inexact", "--all-packages", "--all-groups")
    where = {"UV_PYTHON_DOWNLOADS": "never", "UV_PROJECT_ENVIRONMENT": str(venv)}
    run(*uv_sync, "--python", sys.executable, **where)
    stamp.write_text(key)


def _package_files() -> list[Path]:
    return sorted(ROOT.glob("packages/*/pyproject.toml"))


def engines(venv: Path) -> None:
    """Add torch and both engines to `venv`, then check that torch imports."""
    key = digest(*sorted(REQUIREMENTS.glob("*.txt")))
    stamp = venv / ".engines"
    if is_done(stamp, key):
        return
    torch = "torch-cpu.txt"
    if download(torch):
        torch = "torch-cuda.txt"
        print(
            "workspace: pip finds no CPU build of torch for this Python: taking the CUDA build",
            file=sys.stderr,
        )
    need(torch)
    need("engines.txt")
    _install(venv, torch)
    _install(venv, "engines.txt")
    run(venv / "bin" / "python", "-c", "import torch")
    stamp.write_text(key)


def _install(venv: Path, requirements: str) -> None:
    install = (BOOT_BIN / "uv", "pip", "install", "--quiet", "--no-config", "--no-deps", "--require-hashes")
    local = ("--no-index", "--find-links", WHEELHOUSE)
    run(*install, *local, "--python", venv / "bin" / "python", "-r", REQUIREMENTS / requirements)


STEPS: dict[str, Callable[[Path], None]] = {"sync": sync, "engines": engines, "index": write_index}


def main() -> None:
    """Run the named steps in order."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--venv", type=Path, default=ROOT / ".venv", help="the environment to fill (default: .venv)"
    )
    parser.add_argument("steps", nargs="+", choices=sorted(STEPS))
    arguments = parser.parse_args()
    for step in arguments.steps:
        STEPS[step](arguments.venv)


if __name__ == "__main__":
    main()
