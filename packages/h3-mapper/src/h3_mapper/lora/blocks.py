"""The arithmetic of a merge, on some rows of one atom: fp32, rounded once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from h3_mapper.lora.adapter import Adapter, LowRank
from h3_mapper.lora.arrays import Raw, raw, rows
from h3_mapper.lora.errors import NonFiniteError
from h3_mapper.lora.floats import narrow, numpy, widen
from h3_mapper.spec import Atom

if TYPE_CHECKING:
    from h3_mapper.lora.floats import Float32


KEPT = 3
"""Widened A matrices kept: as many as one tensor has parts."""


@dataclass(slots=True)
class Change:
    """An adapter to be merged with `strength`; atoms: the result's, by name."""

    adapter: Adapter
    strength: float
    atoms: Mapping[str, Atom]
    touched: frozenset[str] = field(init=False)
    _wide: dict[str, Float32] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        numpy("merging an adapter")
        self.touched = self.adapter.touched

    def wide_a(self, name: str, term: LowRank) -> Float32:
        """fp32 A of one atom, kept while the tensor's blocks pass (q, k and v may take turns)."""
        found = self._wide.get(name)
        if found is None:
            if len(self._wide) >= KEPT:
                self._wide.clear()
            found = self._wide[name] = widen(raw(term.a))
        return found


def changed_rows(change: Change, name: str, base: Raw | None, start: int, stop: int) -> Raw:
    """Rows [start, stop) of atom `name` after the change. base: these rows before; None if the base lacks the atom."""
    assigned = change.adapter.assigned.get(name)
    if assigned is not None:
        return raw(rows(raw(assigned), start, stop))
    if base is None:
        raise ValueError(f"{name}: nothing to compute")  # merge._check has excluded this
    if name not in change.touched:  # the other parts of a fused tensor
        return base
    np = numpy("merging an adapter")
    with np.errstate(over="ignore", invalid="ignore"):  # looked for below
        wide = _sum(change, name, widen(base), start, stop)
    if not np.isfinite(wide).all():
        raise NonFiniteError(
            f"{name}: the merged rows {start} to {stop} hold an infinity or a NaN; look at the base, the adapter's "
            f"scale and the strength ({change.strength:g})"
        )
    return narrow(wide, base.dtype)


def _sum(change: Change, name: str, wide: Float32, start: int, stop: int) -> Float32:
    """fp32 base rows with the adapter's added, in place."""
    term, delta = change.adapter.low_rank.get(name), change.adapter.deltas.get(name)
    if delta is not None:
        wide += _times(widen(rows(raw(delta), start, stop)), change.strength)
    if term is not None:
        product = widen(rows(raw(term.b), start, stop)) @ change.wide_a(name, term)
        wide += _times(product, float(term.scale) * change.strength)
        if term.magnitude is not None:
            wide *= _dora(wide, widen(rows(raw(term.magnitude), start, stop)))
    return wide


def _times(values: Float32, factor: float) -> Float32:
    values *= numpy("merging an adapter").float32(factor)
    return values


def _dora(summed: Float32, magnitude: Float32) -> Float32:
    """[rows, 1]: the magnitude over the row's norm."""
    np = numpy("merging an adapter")
    norm = np.sqrt(np.einsum("ij,ij->i", summed, summed, dtype="f8")).astype("f4")
    return (magnitude / norm)[:, None]  # type: ignore[no-any-return]
