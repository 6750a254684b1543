"""What an adapter is, in words and as JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from h3_mapper.config import H3Config
from h3_mapper.lora.adapter import Adapter
from h3_mapper.lora.arrays import dtype_name
from h3_mapper.lora.files import AdapterFile
from h3_mapper.lora.formats import FORMATS
from h3_mapper.lora.modules import places
from h3_mapper.lora.names import Role, parse
from h3_mapper.wrappers import PARTITIONS


@dataclass(frozen=True, slots=True)
class Described:
    """targets: adapted atoms by kind (block numbers as N) and how many blocks have them. Counts by rank and scale.

    looks_like: formats whose names these are; a hint for `--from`, never used to decide.
    """

    path: str
    tensors: int
    looks_like: tuple[str, ...]
    dtypes: dict[str, int]
    partition: str
    targets: dict[str, int]
    ranks: dict[int, int]
    scales: dict[float, int]
    dora: bool
    deltas: int
    assigned: int
    metadata: dict[str, str]
    notes: tuple[str, ...]
    problem: str | None

    def to_json(self) -> dict[str, Any]:
        """The JSON object of `lora inspect --json`."""
        return asdict(self)

    def text(self) -> str:
        """Lines for people."""
        scales = ", ".join(f"{scale:g} ({count})" for scale, count in self.scales.items()) or "not stated"
        kinds = [f"  {count:4} x {kind}" for kind, count in self.targets.items()]
        extras = (
            [f"  {self.deltas} full-rank deltas, {self.assigned} assigned"]
            if self.deltas or self.assigned
            else []
        )
        return "\n".join(
            [
                f"{self.path}",
                f"  tensors    {self.tensors}, {', '.join(f'{n} {d}' for d, n in sorted(self.dtypes.items()))}",
                f"  looks like {', '.join(f'{n} ({FORMATS[n].what})' for n in self.looks_like) or 'no known format'}",
                f"  partition  {self.partition}",
                f"  rank       {', '.join(f'{rank} ({count})' for rank, count in sorted(self.ranks.items()))}",
                f"  scale      {scales}{', DoRA' if self.dora else ''}",
                *kinds,
                *extras,
                *(f"  note       {note}" for note in self.notes),
                *([f"  problem    {self.problem}"] if self.problem else []),
            ]
        )


def looks_like(names: Iterable[str], config: H3Config) -> Iterator[str]:
    """Formats in which every factor would be named like this."""
    factors = [name for name in names if parse(name).role in (Role.A, Role.B)]
    for format_ in FORMATS.values():
        known = places(config, format_.naming)
        possible = {
            prefix + name.removesuffix(".weight") + suffix
            for name in known
            for prefix in {format_.prefix, format_.ref_prefix or format_.prefix}
            for suffix in (format_.a, format_.b)
        }
        if factors and possible.issuperset(factors):
            yield format_.name


def describe(
    file: AdapterFile, adapter: Adapter, config: H3Config | None = None, problem: str | None = None
) -> Described:
    """Everything worth knowing before an adapter is used. problem: what the file does not state, so nothing assumed."""
    terms = list(adapter.low_rank.values())
    return Described(
        str(file.path),
        len(file.tensors),
        tuple(looks_like(file.tensors, config or H3Config())),
        dict(Counter(dtype_name(tensor) for tensor in file.tensors.values())),
        PARTITIONS.get(adapter.component or "", "not stated"),
        dict(sorted(Counter(re.sub(r"(?<=blocks\.)\d+", "N", name) for name in adapter.low_rank).items())),
        dict(Counter(term.rank for term in terms)),
        {} if problem else {float(s): count for s, count in Counter(term.scale for term in terms).items()},
        any(term.magnitude is not None for term in terms),
        len(adapter.deltas),
        len(adapter.assigned),
        dict(file.metadata),
        () if problem else adapter.notes,
        problem,
    )
