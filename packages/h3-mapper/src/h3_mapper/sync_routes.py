"""Where each trainer tensor goes: its target tensors and the strided copies into them. Arithmetic on names only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from h3_mapper.config import H3Config
from h3_mapper.plan import atoms, derived, plan, spans
from h3_mapper.runs import Run, runs
from h3_mapper.spec import Layout, Part
from h3_mapper.tp import ShardTarget, shard

SHARD_IDS: Mapping[Part, str | int | None] = MappingProxyType(
    {Part.Q: "q", Part.K: "k", Part.V: "v", Part.GATE: 0, Part.VALUE: 1, Part.PLAIN: None}
)
"""What vLLM's loaders call a part: QKVParallelLinear takes "q", "k", "v"; MergedColumnParallelLinear 0 and 1."""


@dataclass(frozen=True, slots=True)
class Route:
    """One source tensor's way into one target tensor.

    runs: the copies. view: the target is one run of the source's rows (target.columns of them), so nothing needs
    copying.
    """

    target: ShardTarget
    runs: tuple[Run, ...]
    view: bool


@dataclass(frozen=True, slots=True)
class Routes:
    """by_source: source name -> its routes. needs: target name -> the source names it is made of.

    derived: targets that follow from the configuration (rope.inv_freq), little-endian bytes.
    """

    by_source: Mapping[str, tuple[Route, ...]]
    needs: Mapping[str, frozenset[str]]
    derived: Mapping[str, tuple[tuple[int, ...], bytes]]


@lru_cache(maxsize=32)
def routes(config: H3Config, source: Layout, target: Layout, tp: int = 1, rank: int = 0) -> Routes:
    """All routes between two layouts, into rank `rank`'s shards. Raises ShapeError if tp does not fit."""
    sharded = shard(plan(config, source, target), tp, rank)
    by_source: dict[str, list[Route]] = {}
    needs: dict[str, frozenset[str]] = {}
    made: dict[str, tuple[tuple[int, ...], bytes]] = {}
    for item in sharded.targets:
        if item.data is not None:
            made[item.name] = (item.shape, item.data)
            continue
        moves = runs(item.rows)
        needs[item.name] = frozenset(run.name for run in moves)
        for name in needs[item.name]:
            own = tuple(run for run in moves if run.name == name)
            by_source.setdefault(name, []).append(Route(item, own, len(item.rows) == 1))
    return Routes({name: tuple(found) for name, found in by_source.items()}, needs, made)


@lru_cache(maxsize=16)
def logical(
    config: H3Config, source: Layout
) -> Mapping[str, tuple[tuple[str, int, int, str | int | None], ...]]:
    """Source name -> (native parameter, first row, end row, loader shard id) of each part in it.

    Only for layouts that keep parts contiguous (`diffusers`, `module`).
    """
    parts = {atom.name: atom.part for atom in atoms(config)}
    return {
        name: tuple(
            (
                span.atom.partition("[")[0],
                span.row,
                span.row + span.stop - span.start,
                SHARD_IDS[parts[span.atom]],
            )
            for span in held
        )
        for name, held in spans(config, source).items()
        if name not in derived(config, source)
    }
