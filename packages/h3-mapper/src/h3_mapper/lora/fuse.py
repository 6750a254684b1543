"""Atoms' factors -> one module's factors, and one scale where a format has room for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction

from h3_mapper.errors import listed
from h3_mapper.lora.adapter import LowRank
from h3_mapper.lora.arrays import Raw, Tensor, concat, dtype_name, pad_columns, same, shape, zeros
from h3_mapper.lora.errors import ScaleError, UnsupportedAdapterError
from h3_mapper.lora.floats import narrow, widen
from h3_mapper.lora.modules import Place


def fuse(place: Place, terms: Mapping[str, LowRank], round_scales: bool) -> LowRank | None:
    """The factors of the whole parameter `place`, or None if none of its atoms is adapted.

    Atoms that share A keep it; others get a stacked A and a B that is block-diagonal over them, so the rank is the
    sum. An atom that is not adapted gets zero rows of B. The product is bit for bit what it was, row by row.
    """
    held = {atom.name: terms[atom.name] for atom in place.atoms if atom.name in terms}
    if not held or len(place.atoms) == 1:
        return next(iter(held.values()), None)
    kinds = {dtype_name(tensor) for term in held.values() for tensor in (term.a, term.b)}
    if len(kinds) > 1:
        raise UnsupportedAdapterError(
            f"{place.name}: factors of {listed(kinds)}; one dtype is needed to fuse them"
        )
    scale = _commonest(term.scale for term in held.values())
    held = {name: rescale(name, term, scale, round_scales) for name, term in held.items()}
    stack: list[Tensor] = []
    index = {name: _position(stack, term.a) for name, term in held.items()}
    ranks = [shape(a)[0] for a in stack]
    parts: dict[str, Tensor] = {}
    for atom in place.atoms:
        if atom.name in held:
            at = index[atom.name]
            left, right = sum(ranks[:at]), sum(ranks[at + 1 :])
            b = held[atom.name].b
            parts[atom.name] = pad_columns(b, left, right) if left or right else b
        else:
            parts[atom.name] = zeros(stack[0], (atom.rows, sum(ranks)))
    return LowRank(concat(stack), place.join(parts), scale, _magnitude(place, held))


def _position(stack: list[Tensor], a: Tensor) -> int:
    """Where `a` is in the stack, appended if it is new."""
    for at, other in enumerate(stack):
        if same(other, a):
            return at
    stack.append(a)
    return len(stack) - 1


def _magnitude(place: Place, held: Mapping[str, LowRank]) -> Tensor | None:
    magnitudes = {name: term.magnitude for name, term in held.items() if term.magnitude is not None}
    if not magnitudes:
        return None
    if len(magnitudes) < len(place.atoms):
        lacking = listed(atom.name for atom in place.atoms if atom.name not in magnitudes)
        raise UnsupportedAdapterError(
            f"{place.name}: {lacking} has no DoRA magnitude while others have one; it would need the base's row norms"
        )
    return place.join(magnitudes)


def _commonest(scales: Iterable[Fraction]) -> Fraction:
    """The scale most terms have, the first of them if several tie."""
    return Counter(scales).most_common(1)[0][0]


def unify(terms: Mapping[str, LowRank], scale: Fraction | None, round_scales: bool) -> dict[str, LowRank]:
    """The same products under one scale: the given one, or the commonest."""
    if not terms:
        return {}
    target = _commonest(term.scale for term in terms.values()) if scale is None else scale
    return {name: rescale(name, term, target, round_scales) for name, term in terms.items()}


def level(terms: Mapping[str, LowRank]) -> dict[str, LowRank]:
    """The same products at one rank, the largest: zero rows under A, zero columns beside B."""
    rank = max((term.rank for term in terms.values()), default=0)

    def padded(term: LowRank) -> LowRank:
        extra = rank - term.rank
        a = concat([term.a, zeros(term.a, (extra, *shape(term.a)[1:]))])
        return replace(term, a=a, b=pad_columns(term.b, 0, extra))

    return {name: padded(term) if term.rank < rank else term for name, term in terms.items()}


def rescale(name: str, term: LowRank, scale: Fraction, round_scales: bool) -> LowRank:
    """The same product with another scale; B takes the ratio.

    A power of two changes no significand. Any other ratio rounds B: ScaleError unless `round_scales`.
    """
    ratio = term.scale / scale
    if ratio == 1:
        return term
    product = _times(term.b, float(ratio))
    reversible = _power_of_two(ratio) and same(_times(product, float(1 / ratio)), term.b)
    if not (round_scales or reversible):
        raise ScaleError(
            f"{name}: scale {float(term.scale):g} beside {float(scale):g} in one place; moving the ratio into B rounds "
            f"its {dtype_name(term.b)} values. Allow it (round_scales), or write a format with one alpha a module"
        )
    return replace(term, b=product, scale=scale)


def _power_of_two(ratio: Fraction) -> bool:
    return abs(ratio.numerator).bit_count() == 1 and ratio.denominator.bit_count() == 1


def _times(tensor: Tensor, factor: float) -> Tensor:
    if not isinstance(tensor, Raw):
        return tensor * factor
    wide = widen(tensor)
    wide *= factor
    return narrow(wide, tensor.dtype)
