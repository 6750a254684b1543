"""What a path holds, said without guessing: files, names, layout, dimensions, precision, and what is wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from h3_mapper.errors import AmbiguousLayoutError, MapperError
from h3_mapper.identify import identified, seen
from h3_mapper.plan import groups
from h3_mapper.source import Component, open_source
from h3_mapper.spec import Layout

UNSTATED = "native (release or module: not stated)"


@dataclass(frozen=True, slots=True)
class Inspected:
    """One component. path: its folder; given: the folder or the one file pointed at.

    layout: its name, or `native (release or module: not stated)`; problem: None if sound.
    """

    name: str
    path: Path
    given: Path
    layout: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    dtypes: dict[str, int]
    config: dict[str, Any]
    groups: int
    problem: str | None

    def to_json(self) -> dict[str, Any]:
        """The JSON object of `inspect --json`."""
        return asdict(self) | {"path": str(self.path), "given": str(self.given)}


def inspect(path: Path, stated: Layout | None = None) -> tuple[Inspected, ...]:
    """Describe every component under `path`. Raises only if no header can be read."""
    return tuple(_inspected(name, component, stated) for name, component in open_source(path).items())


def _inspected(name: str, component: Component, stated: Layout | None) -> Inspected:
    layout, problem = "unknown", None
    config: dict[str, Any] = {}
    count = 0
    try:
        try:
            found = identified(component, stated)
            layout, sound = str(found.layout), found.config
        except AmbiguousLayoutError:
            # Either native layout passes or fails the same checks: what is not stated is only the row order.
            sound = identified(component, Layout.MODULE).config
            layout = UNSTATED
        config, count = asdict(sound), len(groups(sound))
    except MapperError as error:
        problem = f"{type(error).__name__}: {error}"
    return Inspected(
        name,
        component.path,
        component.given,
        layout,
        tuple(header.path.name for header in component.headers),
        len(component.tensors),
        component.nbytes,
        dict(Counter(dtype for _, dtype in seen(component).values())),
        config,
        count,
        problem,
    )
