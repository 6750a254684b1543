"""An independent reader's opinion of a file we wrote: the safetensors library opens it and lists it."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from h3_mapper.errors import ReadBackError
from h3_mapper.shards import OutFile


def read_back(path: Path, expected: OutFile) -> None:
    """Open `path` with the safetensors library; names, shapes and dtypes must be the planned ones.

    Raises ReadBackError. Maps the file and touches only its header.
    """
    import safetensors

    try:
        with _array_library(), safetensors.safe_open(path, framework="numpy") as file:
            found = {}
            for name in file.keys():  # noqa: SIM118 - not a mapping
                view = file.get_slice(name)
                found[name] = (tuple(view.get_shape()), view.get_dtype())
    except (safetensors.SafetensorError, OSError) as error:
        raise ReadBackError(f"{path.name}: the safetensors library refuses it: {error}") from error
    planned = {entry.name: (entry.shape, entry.dtype) for entry in expected.entries}
    if found != planned:
        name = min(n for n in found.keys() | planned.keys() if found.get(n) != planned.get(n))
        raise ReadBackError(
            f"{path.name}: {name} reads back as {found.get(name)}; planned {planned.get(name)}"
        )


@contextmanager
def _array_library() -> Iterator[None]:
    """safe_open imports an array library even to list names; where numpy is not installed, an empty module does."""
    if sys.modules.get("numpy") or importlib.util.find_spec("numpy"):
        yield
        return
    sys.modules["numpy"] = types.ModuleType("numpy")
    try:
        yield
    finally:
        del sys.modules["numpy"]
