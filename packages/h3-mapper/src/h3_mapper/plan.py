"""Table and configuration -> atoms, tensors, spans and plans.

Everything here is arithmetic on names and row numbers: no tensor, no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from h3_mapper.config import H3Config
from h3_mapper.proof import joined, prove
from h3_mapper.spec import Atom, Layout, Part, Plan, Rows, Span, Target, TensorSpec
from h3_mapper.table import DIFFUSERS_CHILDREN, MODEL_GROUP, TABLE, Rule, Section, Slot


@dataclass(frozen=True, slots=True)
class _Placed:
    """A rule at one place in the model: its section's prefixes filled in."""

    rule: Rule
    native: str
    diffusers: str
    group: str

    def name(self, slot: Slot, layout: Layout) -> str:
        return (self.native if layout.native else self.diffusers) + slot.name

    def atom(self, part: Part) -> str:
        return self.native + self.rule.name + ("" if part is Part.PLAIN else f"[{part}]")

    def shape(self, config: H3Config, slot: Slot | None = None) -> tuple[int, ...]:
        rows, *rest = (int(getattr(config, dim)) for dim in self.rule.shape)
        return (rows * (len(slot.parts) if slot else 1), *rest)


def _placed(config: H3Config, layout: Layout = Layout.MODULE) -> Iterator[_Placed]:
    """Every rule that holds, in the order of `layout`'s state dict."""
    for section in TABLE:
        rules = [r for r in section.rules if r.flag is None or getattr(config, r.flag)]
        if layout is Layout.DIFFUSERS and section.count:
            rules.sort(key=_child)
        for n in range(getattr(config, section.count) if section.count else 1):
            native, diffusers = section.native.format(n=n), section.diffusers.format(n=n)
            for rule in rules:
                yield _Placed(rule, native, diffusers, _group(section, native))


def _group(section: Section, native: str) -> str:
    return native.rstrip(".") if section.count else MODEL_GROUP


def _child(rule: Rule) -> int:
    return next(i for i, child in enumerate(DIFFUSERS_CHILDREN) if rule.diffusers[0].name.startswith(child))


@lru_cache(maxsize=16)
def atoms(config: H3Config) -> tuple[Atom, ...]:
    """Every atom, in one order for all layouts: the module's tensors; q, k, v or gate, value within one."""
    return tuple(
        Atom(p.atom(part), part, p.shape(config), p.rule.dtype, p.group, p.rule.parallel)
        for p in _placed(config)
        if p.rule.derived is None
        for part in p.rule.parts
    )


@lru_cache(maxsize=16)
def tensors(config: H3Config, layout: Layout) -> tuple[TensorSpec, ...]:
    """Every tensor of `layout`: name, shape, dtype, group; in the order of the engine's own state dict."""
    return tuple(
        TensorSpec(p.name(slot, layout), p.shape(config, slot), p.rule.dtype, p.group)
        for p in _placed(config, layout)
        for slot in p.rule.slots(layout)
    )


@lru_cache(maxsize=16)
def derived(config: H3Config, layout: Layout) -> Mapping[str, bytes]:
    """Tensors of `layout` that follow from the configuration: name -> little-endian bytes (rope.inv_freq)."""
    return MappingProxyType(
        {
            p.name(slot, layout): getattr(config, p.rule.derived)()
            for p in _placed(config, layout)
            if p.rule.derived is not None
            for slot in p.rule.slots(layout)
        }
    )


def groups(config: H3Config) -> tuple[str, ...]:
    """The streaming groups: `model`, then each refiner block and each block by native path (53 released)."""
    return tuple(dict.fromkeys(p.group for p in _placed(config)))


@lru_cache(maxsize=16)
def spans(config: H3Config, layout: Layout) -> Mapping[str, tuple[Span, ...]]:
    """Tensor name -> the atom rows it holds, in row order. Derived tensors have none and are left out."""
    return MappingProxyType(
        {
            p.name(slot, layout): tuple(_slot_spans(p, slot, config))
            for p in _placed(config, layout)
            if p.rule.derived is None
            for slot in p.rule.slots(layout)
        }
    )


def _slot_spans(placed: _Placed, slot: Slot, config: H3Config) -> Iterator[Span]:
    rows = placed.shape(config)[0]
    turn = int(getattr(config, slot.turn)) if slot.turn else rows
    row = 0
    for start in range(0, rows, turn):
        for part in slot.parts:
            yield Span(placed.atom(part), start, start + turn, row)
            row += turn


@lru_cache(maxsize=16)
def plan(config: H3Config, source: Layout, target: Layout) -> Plan:
    """How to build `target`'s tensors from `source`'s. Proved before it is returned.

    `source` may equal `target`: the identity plan (used for renumbering shards, digests and tests).
    """
    stored, made = derived(config, source), derived(config, target)
    places: dict[str, list[tuple[int, int, str, int]]] = {}
    for name, held in spans(config, source).items():
        for span in held:
            places.setdefault(span.atom, []).append((span.start, span.stop, name, span.row))
    wanted = spans(config, target)
    result = Plan(
        source,
        target,
        config,
        sources=tensors(config, source),
        targets=tuple(
            _derived_target(t, made[t.name])
            if t.name in made
            else Target(t.name, t.shape, t.dtype, t.group, joined(_found(places, wanted[t.name])))
            for t in tensors(config, target)
        ),
        checks=tuple(_derived_target(s, stored[s.name]) for s in tensors(config, source) if s.name in stored),
    )
    prove(result)
    return result


def _derived_target(spec: TensorSpec, data: bytes) -> Target:
    return Target(spec.name, spec.shape, spec.dtype, spec.group, (), data)


def _found(places: dict[str, list[tuple[int, int, str, int]]], wanted: tuple[Span, ...]) -> Iterator[Rows]:
    """The source rows of each wanted span; a source atom's places are in ascending row order."""
    for span in wanted:
        for start, stop, name, row in places[span.atom]:
            low, high = max(start, span.start), min(stop, span.stop)
            if low < high:
                yield Rows(name, row + low - start, row + high - start)
