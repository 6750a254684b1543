"""Trainer names in, checked source names out: what a weight sync accepts, routes aside, or refuses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from h3_mapper.backends import Array, backend
from h3_mapper.check import check_derived
from h3_mapper.config import H3Config
from h3_mapper.errors import (
    AlreadyConvertedError,
    DtypeError,
    DuplicateTensorError,
    MapperError,
    ShapeError,
    UnsupportedTensorError,
    listed,
)
from h3_mapper.plan import derived, tensors
from h3_mapper.spec import Layout, TensorSpec
from h3_mapper.wrappers import unwrap


class IncompleteSyncError(MapperError):
    """A sync ended with tensors missing, or was sent names the model does not have; `missing` and `extra` have all."""

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


SEND = "send them before finish(), or finish(partial=True)"
READ = "nothing has arrived: push() and push_shards() work while what they yield is read, as in load_weights(push(...))"
"""What to do about missing tensors, where some came and where none did."""


def pairs(bucket: Any) -> Iterable[tuple[str, Array]]:
    """The bucket, if it can be one: (name, tensor) pairs. Raises UnsupportedTensorError for a mapping or a module."""
    if isinstance(bucket, Mapping) or hasattr(bucket, "state_dict"):
        way = (
            "its .items()"
            if isinstance(bucket, Mapping)
            else "its state_dict().items() or named_parameters()"
        )
        raise UnsupportedTensorError(
            f"a bucket is {type(bucket).__name__}; expected (name, tensor) pairs: pass {way}"
        )
    return bucket  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Names:
    """What a source's names may be. other: those of the other dialect. derived: recomputed buffers, by their bytes."""

    specs: Mapping[str, TensorSpec]
    other: frozenset[str]
    derived: Mapping[str, bytes]


@lru_cache(maxsize=16)
def _names(config: H3Config, source: Layout) -> Names:
    dropped = derived(config, source)
    specs = {s.name: s for s in tensors(config, source) if s.name not in dropped}
    opposite = Layout.DIFFUSERS if source.native else Layout.MODULE
    other = frozenset(s.name for s in tensors(config, opposite)) - specs.keys()
    return Names(specs, other, derived(config, Layout.MODULE))


@dataclass(slots=True)
class Intake:
    """The accounts of one sync.

    components: the ones expected. round_to_bf16: torch fp32 is taken for bf16 parameters (numpy has no bfloat16).
    passthrough: first name segments that belong to other models and are handed on untouched.
    lora: adapter tensors found, by the name they came with; copies.
    """

    config: H3Config
    source: Layout
    components: Collection[str]
    round_to_bf16: bool = False
    passthrough: Collection[str] = ()
    lora: dict[str, Array] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)
    seen: dict[str, set[str]] = field(default_factory=dict)
    _names: Names = field(init=False)
    _only: str = field(init=False)

    def __post_init__(self) -> None:
        self._names = _names(self.config, self.source)
        self.seen = {component: set() for component in self.components}
        self._only = next(iter(self.components)) if len(self.components) == 1 else ""

    def passes(self, name: str) -> bool:
        """Whether the name belongs to another model of the pipeline."""
        return bool(self.passthrough) and name.partition(".")[0] in self.passthrough

    def accept(self, name: str, tensor: Array) -> tuple[str, str] | None:
        """Check one tensor in: (component, bare source name).

        None if it was routed aside: an adapter's, a recomputed buffer, or no H3 tensor.
        Raises AlreadyConvertedError for the other dialect's names, DuplicateTensorError, ShapeError, DtypeError.
        """
        if "lora_" in name and any(segment.startswith("lora_") for segment in name.split(".")):
            self.lora[name] = owned(tensor)
            return None
        bare = unwrap(name)
        component = bare.component or self._only
        seen = self.seen.get(component)
        if seen is None:
            self.extra.append(name)
            return None
        spec = self._names.specs.get(bare.name)
        if spec is None:
            if bare.name in self._names.derived:
                self._check_derived(name, bare.name, tensor)
                return None
            if bare.name in self._names.other:
                kind = "Diffusers" if self.source.native else "native"
                raise AlreadyConvertedError(
                    f"{name}: a {kind} name where {self.source} names are expected; somebody mapped it already, and "
                    "mapping twice swaps halves back"
                )
            self.extra.append(name)
            return None
        if bare.name in seen:
            raise DuplicateTensorError(f"{name}: sent twice in one sync; call finish() between syncs")
        self._check(name, spec, tensor)
        seen.add(bare.name)
        return component, bare.name

    def _check(self, name: str, spec: TensorSpec, tensor: Array) -> None:
        shape, dtype = backend(tensor).describe(tensor)
        if (shape, dtype) == (spec.shape, spec.dtype):
            return
        if shape != spec.shape:
            raise ShapeError(f"{name}: shape {list(shape)}; this model has {list(spec.shape)}")
        rounds = self.round_to_bf16 and (dtype, spec.dtype) == ("F32", "BF16") and hasattr(tensor, "detach")
        if not rounds:
            hint = "; allow it with round_to_bf16" if (dtype, spec.dtype) == ("F32", "BF16") else ""
            raise DtypeError(f"{name}: {dtype}; H3 keeps it in {spec.dtype} and a sync does not cast{hint}")

    def _check_derived(self, name: str, bare: str, tensor: Array) -> None:
        """A native trainer's rope.inv_freq must hold the formula's bits; a Diffusers trainer's is not state at all."""
        data = backend(tensor).to_bytes(tensor) if self.source.native else None
        if data is not None:
            check_derived(name, data, self._names.derived[bare], "sync")

    def close(self, partial: bool) -> None:
        """Raise IncompleteSyncError unless every tensor of every component came, and nothing else did."""
        missing = [
            f"{component}.{name}"
            for component, seen in self.seen.items()
            for name in self._names.specs.keys() - seen
        ]
        if self.extra or (missing and not partial):
            sides = [
                f"{len(names)} {what} ({listed(names)}): {remedy}"
                for names, what, remedy in (
                    (missing, "missing", SEND if any(self.seen.values()) else READ),
                    (
                        self.extra,
                        "extra",
                        "send only this model's, or name the others' first segments in passthrough",
                    ),
                )
                if names
            ]
            error = IncompleteSyncError(f"sync is not the whole model: {'; '.join(sides)}")
            error.missing, error.extra = tuple(sorted(missing)), tuple(self.extra)
            raise error


def owned(tensor: Any) -> Array:
    """A copy the caller cannot change."""
    return tensor.detach().clone() if hasattr(tensor, "detach") else tensor.copy()
