"""The tensors of one module -> exact factors per atom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from h3_mapper.errors import listed
from h3_mapper.lora.adapter import Adapter, LowRank
from h3_mapper.lora.arrays import Raw, Tensor, columns, layer, reshaped, rows, shape, used_columns
from h3_mapper.lora.errors import FactorShapeError, UnpairedFactorError, UnsupportedAdapterError
from h3_mapper.lora.modules import Place
from h3_mapper.lora.names import Role
from h3_mapper.lora.scale import Scales


@dataclass(slots=True)
class Found:
    """The tensors of one parameter, by role."""

    place: Place
    roles: dict[Role, Tensor] = field(default_factory=dict)


def assemble(
    modules: Mapping[str, Found],
    scales: Scales,
    component: str | None,
    metadata: Mapping[str, str],
    sized: str = "",
) -> tuple[Adapter, dict[str, list[str]]]:
    """Pair the factors. Returns the adapter and, by source of the scale, the modules scaled from there.

    sized: what to say of a tensor that fits a model of other sizes.

    Raises UnpairedFactorError, FactorShapeError, UnstatedError, ScaleError, UnsupportedAdapterError.
    """
    low_rank: dict[str, LowRank] = {}
    deltas: dict[str, Tensor] = {}
    assigned: dict[str, Tensor] = {}
    sources: dict[str, list[str]] = defaultdict(list)
    for name, module in modules.items():
        roles, place = module.roles, module.place
        for role, held in ((Role.DIFF, deltas), (Role.DIFF_BIAS, deltas), (Role.SET, assigned)):
            if role in roles:
                _expect(
                    shape(roles[role]) == place.shape,
                    name,
                    f"{role} is {_of(roles[role])}",
                    list(place.shape),
                )
                held.update(place.split(roles[role]))
        if (Role.A in roles) != (Role.B in roles):
            missing = Role.B if Role.A in roles else Role.A
            raise UnpairedFactorError(f"{name}: factor {missing} is missing; the other alone changes nothing")
        if Role.A in roles:
            terms, source = _factors(name, module, scales, sized)
            low_rank.update(terms)
            sources[source].append(name)
        elif roles.keys() & {Role.ALPHA, Role.MAGNITUDE}:
            raise UnpairedFactorError(f"{name}: {listed(map(str, roles))} without A and B")
    return Adapter(low_rank, deltas, assigned, component, metadata), sources


def _expect(holds: bool, name: str, found: str, wanted: Any, sized: str = "") -> None:
    if not holds:
        remedy = _pruned_hint(name, found) or (f"; {sized}" if sized else "")
        raise FactorShapeError(f"{name}: {found}; expected {wanted}{remedy}")


def _of(tensor: Tensor) -> list[int]:
    """A shape as every message here prints one."""
    return list(shape(tensor))


def _pruned_hint(name: str, found: str) -> str:
    pruned = "adaln" in name and found.startswith("A is") and found.endswith(" 8]")
    return " (width 8 is the pruned AdaLN; this model is the full one)" if pruned else ""


def _factors(name: str, module: Found, scales: Scales, sized: str) -> tuple[dict[str, LowRank], str]:
    place, a, b = module.place, module.roles[Role.A], module.roles[Role.B]
    _expect(len(place.shape) == 2, name, "low-rank factors for a vector", "a linear module")
    count, stacked = len(place.atoms), len(shape(a)) == 3
    # The rank is the axis before the last: shape[0] of a stacked [n, rank, in] is the number of slices.
    rank = shape(a)[-2] if len(shape(a)) > 1 else 0
    wanted = (count, rank, place.shape[1]) if stacked else (rank, place.shape[1])
    sizes = f"[{count}, rank, {place.shape[1]}]" if stacked else f"[rank, {place.shape[1]}]"
    sizes += "" if rank else " with a rank of 1 or more"
    _expect(rank > 0 and shape(a) == wanted, name, f"A is {_of(a)}", sizes, sized if rank else "")
    if len(shape(b)) == 3:
        each = place.atoms[0].rows
        _expect(
            shape(b) == (count, each, rank),
            name,
            f"B is {_of(b)}",
            [count, each, rank],
            "" if shape(b)[-1] != rank else sized,
        )
        parts = {atom.name: layer(b, i) for i, atom in enumerate(place.atoms)}
    else:
        _expect(
            shape(b) == (place.shape[0], rank),
            name,
            f"B is {_of(b)}",
            [place.shape[0], rank],
            "" if shape(b)[-1:] != (rank,) else sized,
        )
        parts = place.split(b)
    scale, source = scales.find(name, rank)
    magnitudes = _magnitudes(name, module)
    terms = {
        atom.name: LowRank(layer(a, i) if stacked else a, parts[atom.name], scale, magnitudes.get(atom.name))
        for i, atom in enumerate(place.atoms)
    }
    return (terms if stacked or count == 1 else _compact(terms)), source


def _magnitudes(name: str, module: Found) -> dict[str, Tensor]:
    """DoRA's row norms by atom: one value a row, so they move with the rows."""
    magnitude = module.roles.get(Role.MAGNITUDE)
    if magnitude is None:
        return {}
    height, size = module.place.shape[0], shape(magnitude)
    if size not in ((height,), (height, 1)):
        raise UnsupportedAdapterError(
            f"{name}: DoRA magnitude is {list(size)}; expected one value a row ({height}). A norm over columns couples "
            "the rows of q, k and v and cannot be split; merge it with the tool that trained it"
        )
    return module.place.split(reshaped(magnitude, (height,)))


def _compact(terms: dict[str, LowRank]) -> dict[str, LowRank]:
    """Undo a block-diagonal fusion: each atom keeps only the columns of B that it uses.

    Exact: what is dropped are columns of B whose every bit is zero, with their rows of A. Columns that several atoms
    use (a shared A) are left alone.
    """
    if not all(isinstance(term.b, Raw) for term in terms.values()):
        return terms
    used = {name: used_columns(term.b) for name, term in terms.items()}
    ranges = sorted(span for span in used.values() if span != (0, 0))
    if len(ranges) < 2 or any(first[1] > second[0] for first, second in pairwise(ranges)):
        return terms
    starts = [start for start, _ in ranges]
    rank = next(iter(terms.values())).rank
    block = dict(zip(starts, zip([0, *starts[1:]], [*starts[1:], rank], strict=True), strict=True))
    trimmed = {}
    for name, term in terms.items():
        if used[name] != (0, 0):
            start, stop = block[used[name][0]]
            a, b = rows(term.a, start, stop), columns(term.b, start, stop)
            trimmed[name] = LowRank(a, b, term.scale, term.magnitude)
        elif term.magnitude is not None:
            trimmed[name] = term
    return trimmed
