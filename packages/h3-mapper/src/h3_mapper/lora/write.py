"""Adapter -> named tensors, metadata and adapter_config.json of one format. The inverse of `read`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from h3_mapper.config import H3Config
from h3_mapper.errors import listed
from h3_mapper.lora.adapter import Adapter, LowRank
from h3_mapper.lora.arrays import Tensor, reshaped, scalar_like, shape, zeros
from h3_mapper.lora.errors import UnmappedModuleError, UnstatedError, UnsupportedAdapterError
from h3_mapper.lora.formats import FORMATS, PER_MODULE, Alpha, Format
from h3_mapper.lora.fuse import fuse, level, unify
from h3_mapper.lora.modules import Place, RowOrder, places
from h3_mapper.lora.record import alpha_of, metadata_of, peft_config_of
from h3_mapper.wrappers import PARTITIONS


@dataclass(frozen=True, slots=True)
class Written:
    """An adapter in one format. peft_config: the adapter_config.json object, where the format has one."""

    format: Format
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    peft_config: dict[str, Any] | None


def write(
    adapter: Adapter, to: str, config: H3Config | None = None, *, round_scales: bool = False
) -> Written:
    """Put an adapter into format `to`, a key of `FORMATS`.

    Fusing atoms that do not share A gives the summed rank, and alpha grows with it; a format with one rank for all
    gets zero rows of A and zero columns of B. Rows only move, so products are bit for bit the same. Where the format
    has one scale and the adapter several, B takes the ratio; ScaleError if that rounds, unless `round_scales`.
    Raises UnsupportedAdapterError for what the format cannot hold.
    """
    if to not in FORMATS:
        raise UnstatedError(f"unknown adapter format {to!r}; expected one of {listed(FORMATS, len(FORMATS))}")
    format_ = FORMATS[to]
    known = places(config or H3Config(), format_.naming, RowOrder(format_.qkv, format_.fc1))
    _refuse(adapter, format_, known)
    fused = {_module(name): fuse(place, adapter.low_rank, round_scales) for name, place in known.items()}
    terms = {name: term for name, term in fused.items() if term is not None}
    if format_.alpha not in PER_MODULE:
        terms = unify(terms, Fraction(1) if format_.alpha is Alpha.ONE else None, round_scales)
    if format_.alpha in (Alpha.METADATA, Alpha.PLAIN_CONFIG):
        terms = level(terms)
    prefix = _prefix(adapter, format_)
    tensors: dict[str, Tensor] = {}
    for name, term in terms.items():
        tensors |= _named(format_, prefix + name, term)
    for place in known.values():
        tensors |= _full_rank(adapter, place, prefix)
    metadata = metadata_of(adapter, format_, terms, tensors, prefix.rstrip("."))
    return Written(format_, tensors, metadata, peft_config_of(format_, terms))


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _prefix(adapter: Adapter, format_: Format) -> str:
    reference = PARTITIONS.get(adapter.component or "") == "Ref2VA"
    return format_.ref_prefix if reference and format_.ref_prefix else format_.prefix


def _refuse(adapter: Adapter, format_: Format, known: Mapping[str, Place]) -> None:
    covered = {atom.name for place in known.values() for atom in place.atoms}
    if lost := adapter.touched - covered:
        raise UnmappedModuleError(
            f"{listed(lost)}: no such module; was the adapter read with another config?"
        )
    dora = [name for name, term in adapter.low_rank.items() if term.magnitude is not None]
    if dora and not format_.dora:
        raise UnsupportedAdapterError(
            f"{listed(dora, 2)}: DoRA cannot be written as {format_.name}: {format_.no_dora}"
        )
    if dora and format_.alpha is Alpha.PEFT_CONFIG and len(dora) < len(adapter.low_rank):
        raise UnsupportedAdapterError(
            f"{len(dora)} of {len(adapter.low_rank)} atoms have a DoRA magnitude; PEFT has one switch"
        )
    full = {*adapter.deltas, *adapter.assigned}
    if full and not format_.deltas:
        raise UnsupportedAdapterError(
            f"{listed(full, 2)}: {format_.name} holds low-rank factors only; merge this adapter into the base instead"
        )


def _named(format_: Format, name: str, term: LowRank) -> dict[str, Tensor]:
    named = {name + format_.a: term.a, name + format_.b: term.b}
    if format_.alpha is Alpha.TENSOR:
        named[f"{name}.alpha"] = scalar_like(term.b, alpha_of(term))
    if term.magnitude is not None:
        column = format_.dora == ".dora_scale"
        named[name + format_.dora] = (
            reshaped(term.magnitude, (*shape(term.magnitude), 1)) if column else term.magnitude
        )
    return named


def _full_rank(adapter: Adapter, place: Place, prefix: str) -> dict[str, Tensor]:
    kind = "_b" if place.name.endswith(".bias") else ""
    module = prefix + place.name.rpartition(".")[0]
    named = {}
    deltas = {atom.name: adapter.deltas[atom.name] for atom in place.atoms if atom.name in adapter.deltas}
    if deltas:
        first = next(iter(deltas.values()))
        blank = {atom.name: zeros(first, shape(first)) for atom in place.atoms if atom.name not in deltas}
        named[f"{module}.diff{kind}"] = place.join(deltas | blank)
    assigned = {
        atom.name: adapter.assigned[atom.name] for atom in place.atoms if atom.name in adapter.assigned
    }
    if assigned:
        if len(assigned) < len(place.atoms):
            raise UnsupportedAdapterError(
                f"{place.name}: only {listed(assigned)} is assigned; the rest is the base's"
            )
        named[f"{module}.set_weight"] = place.join(assigned)
    return named
