"""A pruned or quantised checkpoint between layouts: weights by rows, and what is attached to them alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from h3_mapper.check import Seen
from h3_mapper.config import H3Config
from h3_mapper.errors import AlreadyConvertedError, PrunedVariantError, QuantisedVariantError, listed
from h3_mapper.plan import plan, spans
from h3_mapper.proof import joined
from h3_mapper.safetensors_io import DTYPE_BITS
from h3_mapper.spec import Layout, Rows
from h3_mapper.tp import ShardTarget, shard
from h3_mapper.variants import ATTACHED, MARKERS, Scale, Variant


@dataclass(frozen=True, slots=True)
class OutTensor:
    """One tensor to write: rows of source tensors in order (scales have rows of their own), `columns` of each if not
    None; or `data`; or the bytes that all of `equal` must hold. width: columns of the source rows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rows: tuple[Rows, ...] = ()
    data: bytes | None = None
    equal: tuple[str, ...] = ()
    columns: tuple[int, int] | None = None
    width: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def variant_plan(
    seen: Seen, variant: Variant, source: Layout, target: Layout, tp: int = 1, rank: int = 0
) -> tuple[OutTensor, ...]:
    """How rank `rank` of `tp` gets every tensor of `target`. seen: bare names (no wrapper prefix) of the source.

    Raises QuantisedVariantError naming the layer and the reason where scales cannot follow their rows, and
    PrunedVariantError where the target layout has no such variant.
    """
    if variant.rule is None or variant.config is None or variant.problems:
        raise QuantisedVariantError(f"not a sound H3 variant: {listed(variant.problems, 3)}")
    if source is target and tp == 1:
        raise AlreadyConvertedError(f"the checkpoint is in layout {target} already")
    if target not in variant.rule.layouts:
        raise PrunedVariantError(f"a {variant.rule.name} H3 has no {target} form; {variant.rule.what}")
    mapping = shard(plan(variant.config, source, target), tp, rank)
    held = {layout: _parts(variant.config, layout) for layout in (source, target)}
    out: list[OutTensor] = []
    for item in mapping.targets:
        if item.name.startswith(variant.rule.absent or ("\0",)):
            continue
        if item.data is not None:
            out.append(OutTensor(item.name, item.shape, item.dtype, data=item.data))
            continue
        out.append(_weight(item, seen, variant))
        out += _attached(item, seen, held[source], held[target])
    own = [name for name, _ in variant.rule.extra] + sorted(MARKERS & seen.keys())
    out += [OutTensor(name, *seen[name], equal=(name,)) for name in own]
    lost = seen.keys() - sources_of(out) - {"rope.inv_freq"}
    if lost:
        raise QuantisedVariantError(f"{listed(lost)}: nothing in layout {target} takes these tensors")
    return tuple(out)


def _parts(config: H3Config, layout: Layout) -> Mapping[str, tuple[str, ...]]:
    """Tensor name -> its atoms, in order of first row."""
    return {
        name: tuple(dict.fromkeys(span.atom for span in held)) for name, held in spans(config, layout).items()
    }


def _weight(item: ShardTarget, seen: Seen, variant: Variant) -> OutTensor:
    kinds = {seen[rows.name][1] for rows in item.rows}
    widths = {seen[rows.name][0][1:] for rows in item.rows}
    if len(kinds) > 1 or len(widths) > 1:
        raise QuantisedVariantError(
            f"{item.name}: made of {listed({r.name for r in item.rows})}, stored as {listed(kinds)}; one tensor has one"
        )
    width = widths.pop()
    if item.columns is None:
        return OutTensor(item.name, (item.shape[0], *width), kinds.pop(), item.rows)
    first, stop = item.columns
    blob = variant.quantised.get(item.rows[0].name.removesuffix(".weight"), {})
    group = int(blob["convrot_groupsize"]) if blob.get("convrot") else 1
    if first % group or stop % group:
        raise QuantisedVariantError(
            f"{item.name}: columns {first}:{stop} of a rank are no whole ConvRot groups of {group}; use a smaller tp"
        )
    shape = (item.shape[0], stop - first)
    return OutTensor(item.name, shape, kinds.pop(), item.rows, columns=item.columns, width=width[0])


def _attached(
    item: ShardTarget,
    seen: Seen,
    source: Mapping[str, tuple[str, ...]],
    target: Mapping[str, tuple[str, ...]],
) -> Iterator[OutTensor]:
    if not item.name.endswith(".weight"):
        return
    module = item.name.removesuffix(".weight")
    names = list(dict.fromkeys(rows.name for rows in item.rows))
    for ending, kind in ATTACHED.items():
        found = [f"{name.removesuffix('.weight')}.{ending}" for name in names]
        present = [name for name in found if name in seen]
        if not present:
            continue
        if len(present) < len(found):
            raise QuantisedVariantError(
                f"{item.name}: {listed(present)} and no {listed(set(found) - set(present))}"
            )
        made = f"{module}.{ending}"
        one = all(math.prod(seen[name][0]) == 1 for name in present)
        if kind is not Scale.ROWS or one:
            yield OutTensor(made, *seen[present[0]], equal=tuple(present))
        else:
            yield _rows_scale(made, item, ending, seen, source, target)


def _rows_scale(
    made: str,
    item: ShardTarget,
    ending: str,
    seen: Seen,
    source: Mapping[str, tuple[str, ...]],
    target: Mapping[str, tuple[str, ...]],
) -> OutTensor:
    """A scale for each row, each block of rows, or each part."""
    picked: list[Rows] = []
    shapes = set()
    for rows in item.rows:
        scale = f"{rows.name.removesuffix('.weight')}.{ending}"
        shape, dtype = seen[scale]
        height = seen[rows.name][0][0]
        parts = source[rows.name]
        if math.prod(shape) == len(parts) > 1 and shape[0] != height:
            picked = [Rows(scale, parts.index(atom), parts.index(atom) + 1) for atom in target[item.name]]
            lead = (1,) if len(shape) == 2 and shape[0] == 1 else ()
            tail = (1,) if len(shape) == 2 and shape[0] != 1 else ()
            return OutTensor(made, (*lead, len(picked), *tail), dtype, tuple(picked))
        if not shape or height % shape[0] or (shape[0] == 1 and math.prod(shape) > 1):
            raise QuantisedVariantError(
                f"{scale} is {list(shape)}: not one value, nor one for each part, row or block"
            )
        if item.columns is not None and math.prod(shape[1:]) > 1:
            raise QuantisedVariantError(f"{scale} is {list(shape)}: blocks of columns are not cut for a rank")
        block = height // shape[0]
        if rows.start % block or rows.stop % block:
            raise QuantisedVariantError(
                f"{scale}: one value for {block} rows, and rows {rows.start}:{rows.stop} of {rows.name} must move alone"
            )
        picked.append(Rows(scale, rows.start // block, rows.stop // block))
        shapes.add((block, shape[1:], dtype))
    if len(shapes) > 1:
        raise QuantisedVariantError(f"{item.name}: its parts have scales of different shape or dtype")
    block, rest, dtype = shapes.pop()
    return OutTensor(made, (item.shape[0] // block, *rest), dtype, joined(picked))


def sources_of(items: Sequence[OutTensor]) -> frozenset[str]:
    """Every source tensor that is read."""
    return frozenset(name for item in items for name in (*item.equal, *(rows.name for rows in item.rows)))
