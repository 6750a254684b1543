"""A plan on tensors in memory: torch (any device, also meta) and numpy.

A target that is one whole source tensor is that tensor (no copy), unless it is a window of a larger
storage; everything else is written into one new tensor by strided copies, a run of equal blocks at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from h3_mapper.backends import Array, backend
from h3_mapper.check import (
    Seen,
    check,
    check_derived,
    check_names,
    check_specs,
    names_layout,
    refuse_variants,
)
from h3_mapper.config import H3Config
from h3_mapper.errors import AlreadyConvertedError, LayoutError, UnsupportedTensorError
from h3_mapper.plan import groups, plan
from h3_mapper.runs import Run, runs
from h3_mapper.spec import Layout, Plan, Target

WHERE = "state dict"
Config = H3Config | Mapping[str, Any]


def diffusers_to_native(
    state_dict: Mapping[str, Array], *, layout: Layout | str, config: Config
) -> dict[str, Array]:
    """A Diffusers state dict in native names, rows in `layout` (`release` or `module`).

    `release` is what vLLM-Omni's load_weights takes, `module` what load_state_dict takes: the names and
    shapes are the same, so choose with care. config: H3Config, or config.json's object in either spelling.
    Renamed-only tensors are the caller's own; the rest is new memory, contiguous, on the source's device.
    Raises a MapperError kind before anything is copied.
    """
    return convert_state_dict(state_dict, _plan(state_dict, Layout.DIFFUSERS, _native(layout), config))


def native_to_diffusers(
    state_dict: Mapping[str, Array], *, layout: Layout | str, config: Config
) -> dict[str, Array]:
    """The inverse of `diffusers_to_native`; `layout` says what the native tensors are.

    rope.inv_freq's bits are checked and dropped. q, k and v are new memory, never windows of qkv_proj: a
    saved dict must not keep, or write, three times the bytes.
    """
    return convert_state_dict(state_dict, _plan(state_dict, _native(layout), Layout.DIFFUSERS, config))


def diffusers_to_native_groups(
    state_dict: Mapping[str, Array], *, layout: Layout | str, config: Config
) -> Iterator[tuple[str, dict[str, Array]]]:
    """`diffusers_to_native`, one group at a time: `model`, the refiner blocks, the blocks (53 as released).

    state_dict may load lazily: names are checked first, and each tensor is asked for once, with its group.
    Peak memory is one group, if the caller drops each before asking for the next. A wrong shape or dtype
    raises when its group is reached.
    """
    return _groups(state_dict, _plan(state_dict, Layout.DIFFUSERS, _native(layout), config))


def native_to_diffusers_groups(
    state_dict: Mapping[str, Array], *, layout: Layout | str, config: Config
) -> Iterator[tuple[str, dict[str, Array]]]:
    """`native_to_diffusers`, one group at a time, as `diffusers_to_native_groups`."""
    return _groups(state_dict, _plan(state_dict, _native(layout), Layout.DIFFUSERS, config))


def convert_state_dict(
    state_dict: Mapping[str, Array], mapping: Plan, *, out: Mapping[str, Array] | None = None
) -> dict[str, Array]:
    """Run a plan between any two layouts; names, shapes, dtypes and derived bits are checked first.

    out: tensors of the target layout to copy every value into, instead of making new ones (a loaded model,
    or the result of an earlier call: fresh memory costs several times the copy in page faults).
    """
    _require_mapping(state_dict, WHERE)
    seen = _seen(state_dict)
    refuse_variants(seen, WHERE)
    check(seen, mapping.config, mapping.source, WHERE)
    if out is not None:
        _require_mapping(out, "out")
        check(_seen(out), mapping.config, mapping.target, "out")
    return _mapped(state_dict, mapping.targets, mapping.checks, out)


def _require_mapping(given: Any, where: str) -> None:
    """A mapping, or a lazy one that has a mapping's keys and items; a module has neither, or more besides."""
    if hasattr(given, "state_dict") or not (hasattr(given, "keys") and hasattr(given, "__getitem__")):
        raise UnsupportedTensorError(
            f"{where}: a {type(given).__name__}; expected a mapping of names to tensors: pass "
            f"{'its state_dict()' if hasattr(given, 'state_dict') else 'a state dict'}"
        )


def _native(layout: Layout | str) -> Layout:
    chosen = Layout(layout)
    if not chosen.native:
        raise LayoutError("layout must be release or module: it says how the native side's rows lie")
    return chosen


def _plan(state_dict: Mapping[str, Array], source: Layout, target: Layout, config: Config) -> Plan:
    _require_mapping(state_dict, WHERE)
    names = set(state_dict.keys())
    if odd := [name for name in names if not isinstance(name, str)]:
        raise UnsupportedTensorError(f"{WHERE}: key {odd[0]!r} is no name; expected names of tensors")
    refuse_variants(dict.fromkeys(names, ((), "F32")), WHERE)
    if names_layout(names, WHERE).native is not source.native:
        kind = "native" if target.native else "Diffusers"
        raise AlreadyConvertedError(f"{WHERE}: has {kind} names already; mapping twice would scramble rows")
    given = config if isinstance(config, H3Config) else H3Config.from_mapping(config)
    gated = given.with_gates(any(name.endswith("to_gate_compress.weight") for name in names))
    check_names(names, gated, source, WHERE)
    return plan(gated, source, target)


def _groups(state_dict: Mapping[str, Array], mapping: Plan) -> Iterator[tuple[str, dict[str, Array]]]:
    for group in groups(mapping.config):
        specs = {s.name: (s.shape, s.dtype) for s in mapping.sources if s.group == group}
        held = {name: state_dict[name] for name in specs if name in state_dict}
        check_specs(_seen(held), specs, WHERE)
        targets = [target for target in mapping.targets if target.group == group]
        yield group, _mapped(held, targets, [check for check in mapping.checks if check.group == group])


def _seen(state_dict: Mapping[str, Array]) -> Seen:
    seen = {}
    for name, array in state_dict.items():
        try:
            seen[name] = backend(array).describe(array)
        except UnsupportedTensorError as error:
            raise UnsupportedTensorError(f"{WHERE}: {name}: {error}") from None
    return seen


def _mapped(
    held: Mapping[str, Array],
    targets: Iterable[Target],
    checks: Iterable[Target],
    out: Mapping[str, Array] | None = None,
) -> dict[str, Array]:
    for stored in checks:
        if stored.name in held and stored.data is not None:
            data = backend(held[stored.name]).to_bytes(held[stored.name])
            if data is not None:
                check_derived(stored.name, data, stored.data, WHERE)
    like = next(iter(held.values()))
    if out is not None:
        return {target.name: _filled(out[target.name], target, held) for target in targets}
    return {target.name: _built(target, held, like) for target in targets}


def _built(target: Target, held: Mapping[str, Array], like: Array) -> Array:
    if target.data is not None:
        return backend(like).from_bytes(target.data, target.shape, like)
    first = held[target.rows[0].name]
    if len(target.rows) == 1 and tuple(first.shape) == target.shape:
        return backend(first).whole(first)
    return _filled(backend(first).empty(target.shape, first), target, held, fresh=True)


def _filled(out: Array, target: Target, held: Mapping[str, Array], *, fresh: bool = False) -> Array:
    library = backend(out)
    if target.data is not None:
        made = library.from_bytes(target.data, target.shape, out)
        library.copy(out, made, Run(target.name, target.shape[0], 1, 0, 1, 0, 1))
        return out
    for run in runs(target.rows):
        library.copy(out, held[run.name], run, fresh=fresh)
    return out
