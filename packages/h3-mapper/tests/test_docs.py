"""What the documents say is what the code does: the mapping reference is current, README examples run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import h3_mapper
from h3_mapper.docs import mapping_reference
from h3_mapper.errors import MapperError

PACKAGE = Path(__file__).parents[1]
REPOSITORY = PACKAGE.parents[1]


def test_the_mapping_reference_is_current():
    assert (REPOSITORY / "docs" / "mapping.md").read_text() == mapping_reference()


def test_every_example_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shim = tmp_path / "bin" / "h3-mapper"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m h3_mapper "$@"\n')
    shim.chmod(0o755)
    env = os.environ | {"PATH": f"{shim.parent}:{os.environ['PATH']}", "PYTHONPATH": str(PACKAGE / "src")}
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```", (PACKAGE / "README.md").read_text(), re.S | re.M)
    assert [kind for kind, _ in blocks][:3] == ["sh", "python", "python"]
    for kind, code in blocks:
        command = ["sh", "-e", "-c", code] if kind == "sh" else [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{code}\n{done.stderr}"


def test_everything_exported_is_documented():
    for name in h3_mapper.__all__:
        thing = getattr(h3_mapper, name)
        assert isinstance(thing, str) or (thing.__doc__ and len(thing.__doc__) > 20), name


def test_every_error_says_what_it_is_for():
    def below(cls):
        return {cls} | {deeper for sub in cls.__subclasses__() for deeper in below(sub)}

    for error in below(MapperError):
        assert error.__doc__, error
        assert error.__doc__ != error.__mro__[1].__doc__, error
