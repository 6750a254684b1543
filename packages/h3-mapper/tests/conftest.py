"""Puts this folder's helper modules (`mapper_testkit`, `mapper_engines`) on the path; hypothesis profiles; fixtures of
the tests of messages.

HYPOTHESIS_PROFILE=fuzz draws fifty times as many examples (nox session `fuzz`).
"""

import os
import sys
from pathlib import Path

import pytest
from h3_mapper.cli import main
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))
from mapper_testkit import TINY, write_diffusers  # found on the path of the line above

QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("h3", deadline=None, max_examples=40, suppress_health_check=QUIET)
settings.register_profile("fuzz", deadline=None, max_examples=2000, suppress_health_check=QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "h3"))


@pytest.fixture
def src(tmp_path, monkeypatch):
    """A small checkpoint in two shards, `src` in the working directory."""
    monkeypatch.chdir(tmp_path)
    write_diffusers(tmp_path / "src", TINY, shards=2)
    return tmp_path / "src"


@pytest.fixture
def said(src, capsys):
    """Run a command that is refused; its one line without the program's name."""

    def run(*args):
        code = main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert not (src.parent / "out").exists()
        return err.removeprefix("h3-mapper: ").rstrip("\n")

    return run
