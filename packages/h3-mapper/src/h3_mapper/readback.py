"""An independent reader's opinion of a file we wrote: the safetensors library opens it and lists it."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from h3_mapper.errors import ReadBackError
from h3_mapper.shards import OutFile

PLACEHOLDER_NUMPY: ContextVar[bool] = ContextVar("PLACEHOLDER_NUMPY", default=False)
"""Set by the command line, whose process reads no array through safetensors."""


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
    """safe_open imports numpy even to list names, and keeps the module it found for good.

    Where numpy is not installed, or the process will not need it through safetensors, an empty module
    serves: the import costs 90 ms, 5% of copying 4 GiB.
    """
    if sys.modules.get("numpy") or not (PLACEHOLDER_NUMPY.get() or importlib.util.find_spec("numpy") is None):
        yield
        return
    sys.modules["numpy"] = types.ModuleType("numpy")
    try:
        yield
    finally:
        del sys.modules["numpy"]
