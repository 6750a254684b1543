"""A result names the commit whose source it ran on: the digests decide, and other source is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import environment
import pytest
import records
from provenance import adopt, changed, source_digest_at

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def commit() -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("package", environment.PACKAGES)
def test_a_commits_digest_is_that_of_its_checkout(
    commit: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree.tar"
    subprocess.run(["git", "-C", str(ROOT), "archive", "-o", str(tree), commit], check=True)
    with tarfile.open(tree) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert environment.source_digest(package) == source_digest_at(commit, package)
    file = next((tmp_path / "packages" / package / "src").rglob("*.py"))
    file.write_bytes(file.read_bytes() + b"#")
    assert environment.source_digest(package) != source_digest_at(commit, package)


def result(path: Path, sources: dict[str, str]) -> Path:
    records.write(path, [{"subject": "x"}], {"head": "unknown", "sources": sources})
    return path


def test_a_result_is_adopted_by_the_commit_it_ran_on_and_by_no_other(commit: str, tmp_path: Path) -> None:
    sources = {package: source_digest_at(commit, package) for package in environment.PACKAGES}
    target = tmp_path / "out.json"
    adopt(result(tmp_path / "good.json", sources), target, commit, ["h3-mapper"])
    assert json.loads(target.read_text())[0]["environment"]["head"] == commit
    other = sources | {"h3-mapper": "0" * 64}
    assert changed({"sources": other}, commit, environment.PACKAGES) == ["h3-mapper"]
    adopt(result(tmp_path / "other.json", other), target, commit, ["h3-kernels"])
    with pytest.raises(ValueError, match="other source of h3-mapper"):
        adopt(tmp_path / "other.json", target, commit, ["h3-mapper"])


def test_a_commit_without_the_package_is_refused_in_one_line(tmp_path: Path) -> None:
    result(tmp_path / "x.json", {})
    files = [str(tmp_path / "x.json"), str(tmp_path / "y.json")]
    done = subprocess.run(
        [
            sys.executable,
            "tools/provenance.py",
            "adopt",
            *files,
            "--head",
            "0" * 40,
            "--packages",
            "h3-mapper",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "y.json").exists()
