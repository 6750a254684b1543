"""What must hold for the repository as a whole: the lock, the pins, the files every package ships."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = sorted((ROOT / "packages").iterdir())
TEXT = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".in",
    ".lock",
    ".yml",
    ".yaml",
    ".json",
    ".cu",
    ".cuh",
    ".cpp",
    ".h",
    ".html",
    "",
}


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    return [ROOT / name for name in listed.decode().split("\0") if name]


def test_the_lock_names_no_host() -> None:
    assert "://" not in (ROOT / "uv.lock").read_text()


def test_every_requirement_is_pinned_and_hashed() -> None:
    for file in (ROOT / "requirements").glob("*.txt"):
        pins = re.split(
            r"\n(?=[A-Za-z0-9])", re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE).strip()
        )
        loose = [pin.split("\n")[0] for pin in pins if "==" not in pin or "--hash=sha256:" not in pin]
        assert not loose, f"{file.name}: {loose}"


def test_no_tracked_file_names_a_package_index() -> None:
    index = re.compile(r":/{2}[^\s\"'<>]*/simple\b")
    named = [
        str(path.relative_to(ROOT))
        for path in tracked()
        if path.suffix in TEXT and path.is_file() and index.search(path.read_text(errors="ignore"))
    ]
    assert not named


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_package_ships_what_a_package_should(package: Path) -> None:
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    module = package / "src" / package.name.replace("-", "_")
    assert project["license"] == "Apache-2.0"
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (module / "py.typed").exists()
    assert f'__version__ = "{project["version"]}"' in (module / "__init__.py").read_text()
    assert f"[{project['version']}]" in (package / "CHANGELOG.md").read_text()
    assert len((package / "README.md").read_text()) > 200


def test_no_library_loads_a_pickle() -> None:
    """Checkpoints and records are untrusted: no package imports a loader that can run code."""
    modules = r"pickle|marshal|shelve|dill|cloudpickle"
    loaders = re.compile(rf"^\s*(import|from)\s+({modules})\b|torch\.load\(|allow_pickle=True", re.MULTILINE)
    found = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (package / "src").rglob("*.py")
        if loaders.search(path.read_text())
    ]
    assert not found
