"""A component on disk -> the variant, layout and partition it is, in values and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h3_mapper.check import Seen, misstated
from h3_mapper.classify import classify
from h3_mapper.errors import DuplicateTensorError, MixedLayoutsError, listed
from h3_mapper.identify import seen
from h3_mapper.pieces import opened
from h3_mapper.source import Component
from h3_mapper.spec import Layout
from h3_mapper.variants import Variant
from h3_mapper.wrappers import PARTITIONS, unwrap

SHOWN = 8
"""Problems printed for people; --json has all."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A component and what it was found to be. names: bare name -> stored name. layout: None if nobody states it."""

    component: Component
    variant: Variant
    names: Mapping[str, str]
    layout: Layout | None
    partition: str

    @property
    def sound(self) -> bool:
        """Whether it is a known variant without any problem."""
        return self.variant.rule is not None and not self.variant.problems

    @property
    def seen(self) -> Seen:
        """Bare name -> (shape, dtype)."""
        stored = seen(self.component)
        return {bare: stored[name] for bare, name in self.names.items()}


def judge(component: Component, folder: str = "", stated: Layout | None = None) -> Judged:
    """Classify one component; reads headers and `comfy_quant` blobs. Raises only for contradictory statements."""
    stored = seen(component)
    names: dict[str, str] = {}
    for name in stored:
        bare = unwrap(name).name
        if bare in names:
            raise DuplicateTensorError(
                f"{component.given}: {name} and {names[bare]} are one tensor under two prefixes"
            )
        names[bare] = name
    with opened(component) as files:
        blobs = {name: files.read(name) for name in stored if name.endswith(".comfy_quant")}
    variant = classify(stored, blobs, component.config)
    declared = {Layout(text) for text in component.declared if text in set(Layout)}
    if len(declared) > 1:
        raise MixedLayoutsError(f"{component.given}: files declare different layouts: {listed(declared)}")
    layout = next(iter(declared), stated)
    if stated and layout is not stated:
        raise misstated(str(component.given), layout, stated)
    if not variant.native:
        layout = Layout.DIFFUSERS
    return Judged(component, variant, names, layout, _partition(component, folder))


def describe(found: Judged, refusal: str | None = None) -> tuple[list[str], dict[str, Any]]:
    """(lines for people, JSON object) about a judged component. refusal: why `convert` refuses it, if it does."""
    variant, problems = found.variant, _problems(found.variant.problems, refusal)
    counts = ", ".join(f"{count} {dtype}" for dtype, count in sorted(variant.precision.items()))
    lines = [
        f"  variant   {variant.name}{'' if variant.rule is None else ': ' + variant.rule.what}",
        f"  partition {found.partition}",
        f"  precision {counts}; {'as the variant has it' if found.sound else 'not as a known variant has it'}",
        *([f"  quantised {len(variant.quantised)} layers"] if variant.quantised else []),
        *(f"  problem   {problem}" for problem in problems[:SHOWN]),
        *([f"  problem   and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []),
    ]
    data = {
        "variant": variant.name,
        "partition": found.partition,
        "layout": found.layout,
        "precision": dict(variant.precision),
        "quantised": len(variant.quantised),
        "gates": variant.gates,
        "problems": list(variant.problems),
    }
    return lines, data


def _problems(problems: Sequence[str], refusal: str | None) -> list[str]:
    """The refusal, then the problems that it does not say: both judge the same tensors, each in its own words."""
    if refusal is None:
        return list(problems)
    heads = {problem: problem.removeprefix("checkpoint: ").partition(";")[0] for problem in problems}
    return [refusal, *(problem for problem, head in heads.items() if head not in refusal)]


def _partition(component: Component, folder: str) -> str:
    """FL2VA or Ref2VA as a folder or file name says it; both have the same names and shapes."""
    words = [*Path(folder).parts, component.path.name, *(header.path.stem for header in component.headers)]
    for word in words:
        if word in PARTITIONS:
            return f"{PARTITIONS[word]} (named {word})"
        for partition in set(PARTITIONS.values()):
            if partition.lower() in word.lower():
                return f"{partition} (named {word})"
    return "not stated"
