"""Where two runs part: the first node, step and row, and what differs after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from h3_kernels.errors import InputError
from h3_kernels.trace.record import Output, Trace


@dataclass(frozen=True, slots=True)
class Divergence:
    """One difference. ``step`` is None before the first step.

    ``row``: the first row of the output that differs, padding rows not counted (the first of a run of rows, where
    several share a digest); ``differing`` of ``rows`` digests differ. ``operators``: what computed it in either run.
    """

    step: int | None
    node: str
    slot: str
    row: int | None
    differing: int
    rows: int
    operators: tuple[str, str]

    def __str__(self) -> str:
        step = "before the first step" if self.step is None else f"step {self.step}"
        row = "" if self.row is None else f", row {self.row} first, {self.differing} of {self.rows} differ"
        left, right = self.operators
        by = "" if left == right else f" ({left} against {right})"
        return f"{step}: {self.node} [{self.slot}]{row}{by}"


class NotComparableError(InputError):
    """Two traces that cannot be compared row by row."""


def divergences(a: Trace, b: Trace) -> Iterator[Divergence]:
    """Every difference in the order computed: noise, sigmas, then each step's nodes, velocity and latents.

    Nodes that only one trace recorded are passed over. Raises NotComparableError if fingerprints differ, if
    digests cover different numbers of rows, if a rank's trace was not merged, or if no node, or nothing, is in both.
    """
    _check(a, b)
    yield from _tensors(None, "noise", a.noise, b.noise)
    yield from _tensors(None, "sigmas", a.sigmas, b.sigmas)
    for number, (left, right) in enumerate(zip(a.steps, b.steps, strict=False)):
        for key, output in left.outputs.items():
            if key in right.outputs:
                yield from _outputs(number, a.rows_per_digest, output, right.outputs[key])
        yield from _tensors(number, "velocity", left.velocity, right.velocity)
        yield from _tensors(number, "latents", left.latents, right.latents)
    if len(a.steps) != len(b.steps):
        short = min(len(a.steps), len(b.steps))
        yield Divergence(short, "steps", "", None, 0, 0, (f"{len(a.steps)} steps", f"{len(b.steps)} steps"))


def first_divergence(a: Trace, b: Trace) -> Divergence | None:
    """The first of ``divergences``, or None if everything both runs recorded is equal."""
    return next(divergences(a, b), None)


def velocity_drift(a: Trace, b: Trace) -> list[dict[str, float]]:
    """Largest absolute difference of each stream's velocity, step by step, over the steps both have.

    A stream without rows has none (0.0); one of different shapes is left out, as it is among the ``divergences``.
    """
    return [
        {
            name: _largest_difference(mine, right.velocity[name])
            for name, mine in left.velocity.items()
            if name in right.velocity and mine.shape == right.velocity[name].shape
        }
        for left, right in zip(a.steps, b.steps, strict=False)
    ]


def _largest_difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().amax()) if a.numel() else 0.0


def _check(a: Trace, b: Trace) -> None:
    if a.fingerprint.get("id") != b.fingerprint.get("id"):
        keys = _differing_keys(a.fingerprint, b.fingerprint)
        raise NotComparableError(f"fingerprints of {a.label!r} and {b.label!r} differ in {', '.join(keys)}")
    if a.rows_per_digest != b.rows_per_digest:
        raise NotComparableError(
            f"{a.rows_per_digest} rows share a digest in {a.label!r}, {b.rows_per_digest} in {b.label!r}"
        )
    for trace in (a, b):
        p = trace.parallel
        if p is not None and p.ranks > 1:
            raise NotComparableError(f"{trace.label!r} is rank {p.rank} of {p.ranks}; call merge_ranks first")
    left, right = (trace.steps[0].outputs.keys() if trace.steps else set() for trace in (a, b))
    if left and right and not left & right:
        raise NotComparableError(f"no node is in both {a.label!r} and {b.label!r}")
    if not recorded_by_both(a, b):
        raise NotComparableError(
            f"nothing was recorded in both {a.label!r} and {b.label!r}: that is not equality"
        )


def recorded_by_both(a: Trace, b: Trace) -> int:
    """Number of outputs and trajectory tensors that both traces hold."""
    pairs: list[tuple[Mapping[Any, object], Mapping[Any, object]]] = [
        (a.noise, b.noise),
        (a.sigmas, b.sigmas),
    ]
    for x, y in zip(a.steps, b.steps, strict=False):
        pairs += [(x.outputs, y.outputs), (x.velocity, y.velocity), (x.latents, y.latents)]
    return sum(len(x.keys() & y.keys()) for x, y in pairs)


def _differing_keys(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the entries two fingerprints disagree on, ``id`` aside."""
    names: list[str] = []
    for key in sorted({*a, *b} - {"id"}):
        left, right = a.get(key), b.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            names += _differing_keys(left, right, f"{prefix}{key}: ")
        elif left != right:
            names.append(prefix + key)
    return names


def _outputs(step: int, group: int, a: Output, b: Output) -> Iterator[Divergence]:
    operators = (a.actual, b.actual)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        described = (f"{list(a.shape)} {a.dtype} by {a.actual}", f"{list(b.shape)} {b.dtype} by {b.actual}")
        yield Divergence(step, a.node, a.slot, None, 0, 0, described)
        return
    where = (a.rows != b.rows).nonzero().squeeze(1)
    if where.numel():
        yield Divergence(
            step, a.node, a.slot, int(where[0]) * group, where.numel(), a.rows.shape[0], operators
        )


def _tensors(step: int | None, kind: str, a: dict[str, Tensor], b: dict[str, Tensor]) -> Iterator[Divergence]:
    for name in sorted(a.keys() & b.keys()):
        left, right = a[name], b[name]
        if left.shape != right.shape or left.dtype != right.dtype:
            described = (f"{list(left.shape)} {left.dtype}", f"{list(right.shape)} {right.dtype}")
            yield Divergence(step, kind, name, None, 0, 0, described)
            continue
        rows, columns = left.shape[0], left.shape[1:].numel()
        flat = [t.reshape(rows, columns).contiguous().view(torch.uint8) for t in (left, right)]
        where = (flat[0] != flat[1]).any(1).nonzero().squeeze(1)
        if where.numel():
            yield Divergence(step, kind, name, int(where[0]), where.numel(), left.shape[0], ("", ""))
