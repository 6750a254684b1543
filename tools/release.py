"""Build and check what a release would publish: ``release.py build`` and ``release.py check``.

``build`` makes every wheel and sdist and installs each wheel alone in an empty environment. ``check`` also reads the
metadata, licence and changelog, resolves each package on the lowest versions it allows, and checks that a pin of one
package can be met: the lower bound of what it needs of ours is a version that exists, and today's is inside its bounds.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = ROOT / ".boot" / "bin" / "uv"
PACKAGES = ("h3-mapper", "h3-kernels", "h3-adapter-vllm", "h3-adapter-diffusers")
MAX_INSTALLED = 30 * 1024 * 1024  # h3-mapper's promise, with everything it needs

# What an empty environment must be able to do with one wheel and nothing of ours beside it. h3-kernels needs torch for
# everything but its contract; the adapters need both of our libraries, which come from the wheels just built.
ALONE = {
    "h3-mapper": ("import h3_mapper, h3_mapper.cli", True),
    "h3-kernels": ("from h3_kernels import contract", False),
    "h3-adapter-vllm": ("import h3_adapter_vllm", False),
    "h3-adapter-diffusers": ("import h3_adapter_diffusers", False),
}


class ReleaseError(RuntimeError):
    """A release would be wrong; the message says which package and why."""


def run(*command: str | Path) -> None:
    """Run a command from the root; raises `ReleaseError` with its output when it fails."""
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ReleaseError(f"{' '.join(map(str, command[:5]))}: {done.stderr.strip() or done.stdout.strip()}")


def build(dist: Path) -> dict[str, Path]:
    """Build wheels and sdists into `dist`; the wheel of each package."""
    run(UV, "build", "--quiet", "--all-packages", "--out-dir", dist)
    wheels = {}
    for package in PACKAGES:
        stem = package.replace("-", "_")
        wheel, sdist = sorted(dist.glob(f"{stem}-*.whl")), sorted(dist.glob(f"{stem}-*.tar.gz"))
        if len(wheel) != 1 or len(sdist) != 1:
            raise ReleaseError(
                f"{package}: expected one wheel and one sdist, found {len(wheel)} and {len(sdist)}"
            )
        with tarfile.open(sdist[0]) as archive:
            names = archive.getnames()
        if not any(name.endswith("/LICENSE") for name in names):
            raise ReleaseError(f"{package}: the sdist lacks LICENSE")
        wheels[package] = wheel[0]
    return wheels


def install_alone(package: str, wheels: dict[str, Path], scratch: Path) -> None:
    """Install one wheel into an empty environment and import it there."""
    code, with_dependencies = ALONE[package]
    environment = scratch / package
    run(UV, "venv", "--quiet", "--no-config", "--python", sys.executable, environment)
    python = environment / "bin" / "python"
    needed = [wheels[package]]
    if package.startswith("h3-adapter"):
        needed += [wheels["h3-mapper"], wheels["h3-kernels"]]
    options = () if with_dependencies else ("--no-deps",)
    before = installed_bytes(environment)
    local = ("--no-index", "--find-links", ROOT / ".wheelhouse")
    run(UV, "pip", "install", "--quiet", "--no-config", *local, *options, "--python", python, *needed)
    run(python, "-W", "error", "-c", code)
    size = installed_bytes(environment) - before
    if package == "h3-mapper" and size > MAX_INSTALLED:
        raise ReleaseError(f"h3-mapper: installs {size:,} bytes, at most {MAX_INSTALLED:,} are promised")
    print(f"{package}: {wheels[package].name}, {size / 1e6:.1f} MB installed, `{code}` works")


def installed_bytes(folder: Path) -> int:
    """Bytes of all regular files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def check_metadata(package: str, wheel: Path) -> None:
    """The wheel's metadata says what its project file, changelog and licence say."""
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        text = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    metadata = HeaderParser().parsestr(text)
    expected = {"Name": package, "Version": project["version"], "License-Expression": "Apache-2.0"}
    for key, value in expected.items():
        if metadata[key] != value:
            raise ReleaseError(f"{package}: metadata {key} is {metadata[key]!r}, expected {value!r}")
    module = package.replace("-", "_")
    for name in (f"{module}/py.typed", f"{module}/__init__.py"):
        if name not in names:
            raise ReleaseError(f"{package}: the wheel lacks {name}")
    if not any(name.endswith("licenses/LICENSE") for name in names):
        raise ReleaseError(f"{package}: the wheel lacks its LICENSE")
    if f"## [{project['version']}]" not in changelog(package):
        raise ReleaseError(f"{package}: CHANGELOG.md has no entry for {project['version']}")
    for requirement in metadata.get_all("Requires-Dist", []):
        if requirement.startswith("h3-"):
            check_bounds(package, requirement)


def check_bounds(package: str, requirement: str) -> None:
    """What a package needs of ours: a lower bound that is one of its versions, today's version below the upper one."""
    match = re.fullmatch(r"(h3-[\w-]+)(?=.*>=([\d.]+))(?=.*<([\d.]+)).*", requirement)
    if match is None:
        raise ReleaseError(f"{package}: {requirement!r} must have a lower and an upper bound")
    needed, lowest, above = match.groups()
    versions = re.findall(r"^## \[([\d.]+)\]", changelog(needed), re.MULTILINE)
    if numbers(lowest) not in map(numbers, versions):
        raise ReleaseError(
            f"{package}: needs {needed} from {lowest}, which is no version of it: {', '.join(versions)}"
        )
    if not numbers(lowest) <= numbers(versions[0]) < numbers(above):
        raise ReleaseError(
            f"{package}: {requirement!r} leaves out {needed} {versions[0]}, which is released with it"
        )


def changelog(package: str) -> str:
    """A package's CHANGELOG.md."""
    return (ROOT / "packages" / package / "CHANGELOG.md").read_text()


def numbers(version: str) -> tuple[int, int, int]:
    """1.2 -> (1, 2, 0)."""
    parts = [int(part) for part in version.split(".")]
    return (*parts, 0, 0, 0)[:3]  # type: ignore[return-value]


def check_lowest(package: str, scratch: Path) -> None:
    """The lowest versions a package's metadata allows exist and fit each other; nothing is installed.

    From its folder, and those of ours that it needs: uv takes the requirements of a folder for direct ones, and no name
    of ours is looked up on an index.
    """
    environment = scratch / f"{package}-lowest"
    run(UV, "venv", "--quiet", "--no-config", "--python", sys.executable, environment)
    install = (UV, "pip", "install", "--quiet", "--no-config", "--dry-run", "--resolution", "lowest-direct")
    names = {package, "h3-mapper", "h3-kernels"} if package.startswith("h3-adapter") else {package}
    folders = [ROOT / "packages" / name for name in sorted(names)]
    run(*install, "--python", environment / "bin" / "python", *folders)


def main() -> int:
    """Command line: ``build`` or ``check``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["build", "check"])
    parser.add_argument(
        "--dist", type=Path, default=ROOT / "dist", help="where the files go (default: dist/)"
    )
    arguments = parser.parse_args()
    try:
        wheels = build(arguments.dist)
        with tempfile.TemporaryDirectory() as scratch:
            for package, wheel in wheels.items():
                install_alone(package, wheels, Path(scratch))
                if arguments.command == "check":
                    check_metadata(package, wheel)
                    check_lowest(package, Path(scratch))
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
