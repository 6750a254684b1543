"""The proof that a plan is a permutation of rows, and the inverse computed from its row blocks.

Both read only the plan: neither knows the table, so a wrong table cannot hide here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from h3_mapper.errors import PlanError
from h3_mapper.spec import Plan, Rows, Target, TensorSpec


@dataclass(frozen=True, slots=True)
class Cover:
    """What `prove` counted: tensors on both sides, row blocks, and the bytes each side covers once."""

    sources: int
    targets: int
    blocks: int
    nbytes: int


def prove(candidate: Plan) -> Cover:
    """Check that the plan is a permutation of rows: a theorem about the plan, not a sample of tensors.

    Every target is filled exactly; every source row is used exactly once (so no byte is lost or doubled);
    rows keep their width and dtype. Raises PlanError naming the first tensor that breaks it.
    """
    dropped = {check.name for check in candidate.checks}
    sources = {spec.name: spec for spec in candidate.sources if spec.name not in dropped}
    used: dict[str, list[tuple[int, int]]] = {name: [] for name in sources}
    for target in candidate.targets:
        _prove_target(target, sources)
        for block in target.rows:
            used[block.name].append((block.start, block.stop))
    for name, intervals in used.items():
        reached = 0
        for start, stop in sorted(intervals):
            if start != reached:
                kind = "used twice" if start < reached else "never used"
                low, high = sorted((start, reached))
                raise PlanError(f"plan: rows {low}:{high} of {name} are {kind}")
            reached = stop
        if reached != sources[name].shape[0]:
            raise PlanError(f"plan: rows {reached}:{sources[name].shape[0]} of {name} are never used")
    blocks = sum(len(target.rows) for target in candidate.targets)
    return Cover(len(sources), len(candidate.targets), blocks, sum(spec.nbytes for spec in sources.values()))


def _prove_target(target: Target, sources: dict[str, TensorSpec]) -> None:
    if target.data is not None:
        if target.rows or len(target.data) != target.nbytes:
            raise PlanError(
                f"plan: derived {target.name} has rows or {len(target.data)} bytes, not {target.nbytes}"
            )
        return
    filled = 0
    for block in target.rows:
        source = sources.get(block.name)
        if source is None:
            raise PlanError(f"plan: {target.name} takes rows of {block.name}, which the source does not have")
        if not 0 <= block.start < block.stop <= source.shape[0]:
            raise PlanError(
                f"plan: {target.name} takes rows {block.start}:{block.stop} of {block.name} {source.shape}"
            )
        if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
            raise PlanError(f"plan: {target.name} {target.shape} {target.dtype} takes rows of {source}")
        filled += block.stop - block.start
    if filled != target.shape[0]:
        raise PlanError(f"plan: {target.name} needs {target.shape[0]} rows and its blocks give {filled}")


def joined(blocks: Iterable[Rows]) -> tuple[Rows, ...]:
    """Neighbours that continue each other become one block."""
    result: list[Rows] = []
    for block in blocks:
        last = result[-1] if result else None
        if last and last.name == block.name and last.stop == block.start:
            result[-1] = Rows(last.name, last.start, block.stop)
        else:
            result.append(block)
    return tuple(result)


def invert(forward: Plan) -> Plan:
    """`Plan.inverse`: source tensors rebuilt from the targets, by reading the row blocks backwards."""
    prove(forward)
    back: dict[str, list[tuple[int, Rows]]] = {spec.name: [] for spec in forward.sources}
    for target in forward.targets:
        row = 0
        for block in target.rows:
            length = block.stop - block.start
            back[block.name].append((block.start, Rows(target.name, row, row + length)))
            row += length
    stored = {check.name: check for check in forward.checks}
    targets = []
    for spec in forward.sources:
        blocks = joined(rows for _, rows in sorted(back[spec.name], key=lambda block: block[0]))
        target = Target(spec.name, spec.shape, spec.dtype, spec.group, blocks)
        targets.append(stored.get(spec.name, target))
    return Plan(
        source=forward.target,
        target=forward.source,
        config=forward.config,
        sources=tuple(TensorSpec(t.name, t.shape, t.dtype, t.group) for t in forward.targets),
        targets=tuple(targets),
        checks=tuple(t for t in forward.targets if t.data is not None),
    )
