"""Tensor parallelism: what rank `rank` of `tp` holds of each tensor, as row blocks and one column range.

The cut is atom by atom and comes from the table's `Parallel`: a fused qkv_proj is not cut as one matrix but q, k and
v each by head range, fc1 each half by rows, out_proj and fc2 by columns, biases of column-parallel linears with their
rows; norms and the time embedder's output bias are whole on every rank (vLLM-Omni 0.30's module tree).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from h3_mapper.config import H3Config
from h3_mapper.errors import ShapeError
from h3_mapper.plan import atoms, plan, spans
from h3_mapper.proof import joined
from h3_mapper.spec import ITEMSIZE, Atom, Layout, Parallel, Plan, Rows, Span, Target, TensorSpec

TP_DEGREES = (1, 2, 4, 8)
"""The degrees the released model allows (56 heads, 96 and 32 output rows)."""


@dataclass(frozen=True, slots=True)
class ShardTarget:
    """One tensor of one rank: `rows` of the source, columns [start, stop) of each; all columns if None."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: str
    rows: tuple[Rows, ...]
    columns: tuple[int, int] | None = None
    data: bytes | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the shard."""
        return math.prod(self.shape[1:]) * ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole shard."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """How rank `rank` of `tp` builds its tensors of `plan.target` from whole tensors of `plan.source`."""

    plan: Plan
    tp: int
    rank: int
    targets: tuple[ShardTarget, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's targets."""
        return sum(target.nbytes for target in self.targets)


def check_degree(config: H3Config, tp: int, rank: int = 0) -> None:
    """Raise ShapeError unless `tp` is positive and divides the heads and every cut dimension, and 0 <= rank < tp."""
    if tp < 1:
        raise ShapeError(f"tp {tp} is no degree; {_allowed(config)}")
    if not 0 <= rank < tp:
        raise ShapeError(f"rank {rank} of tp {tp} does not exist; expected 0 <= rank < tp")
    if config.num_attention_heads % tp:
        raise ShapeError(
            f"tp {tp} does not divide {config.num_attention_heads} attention heads; {_allowed(config)}"
        )
    for atom in atoms(config):
        axis = cut_axis(atom)
        if axis is not None and atom.shape[axis] % tp:
            raise ShapeError(
                f"tp {tp} does not divide dim {axis} of {atom.name} {list(atom.shape)}; {_allowed(config)}"
            )


def _allowed(config: H3Config) -> str:
    sizes = {atom.shape[axis] for atom in atoms(config) if (axis := cut_axis(atom)) is not None}
    most = math.gcd(config.num_attention_heads, *sizes)
    return f"this model allows {[tp for tp in range(1, most + 1) if most % tp == 0]}"


def cut_axis(atom: Atom) -> int | None:
    """The dimension tensor parallelism cuts, None for whole atoms."""
    return {Parallel.COLUMN: 0, Parallel.ROW: 1, Parallel.WHOLE: None}[atom.parallel]


def cut_range(atom: Atom, tp: int, rank: int) -> tuple[int, int]:
    """[start, stop) of the cut dimension that the rank holds; of dim 0, all of it, for a whole atom."""
    axis = cut_axis(atom)
    if axis is None:
        return 0, atom.rows
    size = atom.shape[axis] // tp
    return rank * size, (rank + 1) * size


def shard_shape(atom: Atom, tp: int) -> tuple[int, ...]:
    """The atom's shape on one rank."""
    axis = cut_axis(atom)
    return tuple(size // tp if at == axis else size for at, size in enumerate(atom.shape))


@lru_cache(maxsize=64)
def shard_spans(config: H3Config, layout: Layout, tp: int, rank: int) -> Mapping[str, tuple[Span, ...]]:
    """Tensor name -> the whole-atom rows that the rank's tensor holds, in order.

    Like `plan.spans`, with start and stop counted in the whole atom and `row` in the rank's tensor. Columns of
    row-parallel atoms are cut apart from this (`cut_range`).
    """
    check_degree(config, tp, rank)
    known = {atom.name: atom for atom in atoms(config)}
    return {name: tuple(_cut(held, known, tp, rank)) for name, held in spans(config, layout).items()}


def _cut(held: tuple[Span, ...], known: Mapping[str, Atom], tp: int, rank: int) -> Iterator[Span]:
    row = 0
    for span in held:
        atom = known[span.atom]
        low, high = cut_range(atom, tp, rank) if cut_axis(atom) == 0 else (0, atom.rows)
        start, stop = max(low, span.start), min(high, span.stop)
        if start < stop:
            yield Span(span.atom, start, stop, row)
            row += stop - start


def shard(mapping: Plan, tp: int, rank: int) -> ShardPlan:
    """The rank's part of a plan. Equals slicing the fully converted tensors; nothing is converted twice.

    Raises ShapeError if tp does not fit the model.
    """
    check_degree(mapping.config, tp, rank)
    known = {atom.name: atom for atom in atoms(mapping.config)}
    whole = spans(mapping.config, mapping.target)
    wanted = shard_spans(mapping.config, mapping.target, tp, rank)
    targets = []
    for target in mapping.targets:
        if target.data is not None:
            targets.append(
                ShardTarget(target.name, target.shape, target.dtype, target.group, (), None, target.data)
            )
            continue
        first = known[whole[target.name][0].atom]
        rows = joined(_picked(wanted[target.name], _origins(target, whole[target.name])))
        height = sum(block.stop - block.start for block in rows)
        shape = (height, *shard_shape(first, tp)[1:])
        columns = cut_range(first, tp, rank) if cut_axis(first) == 1 and tp > 1 else None
        targets.append(ShardTarget(target.name, shape, target.dtype, target.group, rows, columns))
    return ShardPlan(mapping, tp, rank, tuple(targets))


def walk(blocks: Sequence[Rows], held: Sequence[Span]) -> Iterator[tuple[str, int, Rows]]:
    """(atom, its first row, source rows) wherever a tensor's source block or atom changes.

    Both arguments describe the same rows of one tensor, in order.
    """
    queue = iter(blocks)
    block = next(queue)
    used = 0
    for span in held:
        row = span.start
        while row < span.stop:
            if used == block.stop - block.start:
                block, used = next(queue), 0
            start = block.start + used
            step = min(span.stop - row, block.stop - start)
            yield span.atom, row, Rows(block.name, start, start + step)
            row, used = row + step, used + step


def _origins(target: Target, held: Sequence[Span]) -> dict[str, list[tuple[int, Rows]]]:
    """Atom -> (its first row, the source rows from there on)."""
    origins: dict[str, list[tuple[int, Rows]]] = {}
    for atom, row, rows in walk(target.rows, held):
        origins.setdefault(atom, []).append((row, rows))
    return origins


def _picked(wanted: Sequence[Span], origins: Mapping[str, list[tuple[int, Rows]]]) -> Iterator[Rows]:
    """The source rows of the wanted atom rows."""
    for span in wanted:
        for row, rows in origins[span.atom]:
            low, high = max(row, span.start), min(row + rows.stop - rows.start, span.stop)
            if low < high:
                yield Rows(rows.name, rows.start + low - row, rows.start + high - row)


def shard_specs(config: H3Config, layout: Layout, tp: int) -> tuple[TensorSpec, ...]:
    """Names and shapes of one rank's tensors; equal on every rank."""
    mapping = shard(plan(config, layout, layout), tp, 0)
    return tuple(TensorSpec(t.name, t.shape, t.dtype, t.group) for t in mapping.targets)
