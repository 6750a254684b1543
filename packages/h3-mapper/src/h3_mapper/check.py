"""Names, shapes and dtypes -> layout and configuration, or a refusal. Works on files and on state dicts.

Everything is set algebra against the table's own names: nothing unknown is skipped, nothing is guessed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import replace
from enum import StrEnum
from functools import cache

from h3_mapper.config import H3Config
from h3_mapper.errors import (
    AmbiguousLayoutError,
    DerivedTensorError,
    DtypeError,
    IncompleteGroupError,
    LayoutError,
    LayoutMismatchError,
    MissingTensorError,
    MixedLayoutsError,
    PrunedVariantError,
    QuantisedVariantError,
    ShapeError,
    UnknownNameError,
    counted,
    listed,
)
from h3_mapper.plan import derived, spans, tensors
from h3_mapper.spec import Layout
from h3_mapper.table import TABLE
from h3_mapper.variants import ADAPTER, named
from h3_mapper.wrappers import unwrap

Seen = Mapping[str, tuple[tuple[int, ...], str]]
"""Tensor name -> (shape, safetensors dtype name)."""

PRUNED_MARKS = ("adaln_t_table", "time_embedder.table", "adaln_basis", "adaln_mean", "folded_bias")
"""Ends of names that only pruned H3 checkpoints have (ComfyUI's and the vLLM fork's)."""

QUANTISED_MARKS = (
    *("weight_scale", "weight_scale_inv", "input_scale", "comfy_quant", "scale_weight", "scaled_fp8"),
    *("absmax", "quant_map", "quant_state.bitsandbytes__nf4", "qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_zero_point", "SCB"),
)
"""Last name segments that only quantised checkpoints have."""

QUANTISED_DTYPES = re.compile(r"F4|F6_.*|F8_.*|I8|U8|I16|U16|I32|U32")


class Origin(StrEnum):
    """Where the dimensions came from that tensors are checked against."""

    FILE = "config.json"
    CALLER = "the given config"
    SHAPES = "the other tensors"

    @property
    def remedy(self) -> str:
        """What to do if tensors and dimensions are not one model's."""
        return {
            Origin.FILE: "put the config.json of these weights beside them",
            Origin.CALLER: "pass the config of these weights",
            Origin.SHAPES: "put their config.json beside them if the model has it so; else save or download them again",
        }[self]


WHOLE = "save or copy the whole checkpoint again"
"""What to do about tensors that are absent."""

REMEDIES = {
    "BF16": "use or export the BF16 checkpoint",
    "F32": "save the model as it is, without a cast of the whole of it",
}
"""What to do about tensors that should have been of a dtype."""

UNDECLARED = (
    "{where}: native names with no stated row order. `release` (MiniMax's own files: qkv_proj rows per head, q k v "
    "q k v ...) and `module` (a loaded model's state dict, Comfy-style files: all q, then all k, then all v) have "
    "equal names and shapes, and the wrong one scrambles every attention. Say which: --from release or --from module"
)


SAMPLES = "transformer_blocks.0.attn.to_q.weight or blocks.0.attn.qkv_proj.weight"


@cache
def _templates(layout: Layout) -> frozenset[str]:
    """Names with the block number as `{n}`."""
    return frozenset(
        section.prefix(layout) + slot.name
        for section in TABLE
        for rule in section.rules
        for slot in rule.slots(layout)
    )


def _template(name: str) -> str:
    """`blocks.7.norm1.weight` -> `blocks.{n}.norm1.weight`; `007` is no block number."""
    return re.sub(r"(?<=blocks\.)(0|[1-9][0-9]{0,5})(?=\.)", "{n}", name, count=1)


def layout_of(
    seen: Seen, declared: Collection[str] = (), stated: Layout | None = None, where: str = "checkpoint"
) -> Layout:
    """The layout of these tensors: names tell Diffusers from native, a statement tells release from module.

    declared: layouts found in file metadata; stated: what the caller says. Raises a LayoutError kind or
    UnknownNameError; AmbiguousLayoutError if the names are native and nobody says which.
    """
    refuse_variants(seen, where)
    by_names = names_layout(seen, where)
    claims = {_layout(text, where) for text in declared}
    if len(claims) > 1:
        raise MixedLayoutsError(f"{where}: files declare different layouts: {listed(claims)}")
    for claim, origin, remedy in [
        (next(iter(claims), None), "its metadata", UNDECLARE),
        (stated, STATEMENT, "state that or leave it out"),
    ]:
        if claim is not None and claim.native != by_names.native:
            kind = "native" if by_names.native else "Diffusers"
            right = "release or module" if by_names.native else "diffusers"
            raise LayoutMismatchError(
                f"{where}: the names are {kind} but {origin} says {claim}; expected {right}: {remedy}"
            )
    if stated and claims and stated not in claims:
        raise misstated(where, next(iter(claims)), stated)
    layout = stated or next(iter(claims), None)
    if layout is None and by_names.native:
        raise AmbiguousLayoutError(UNDECLARED.format(where=where))
    return layout or by_names


STATEMENT = "--from (stated)"
"""The caller's statement, by its names on the command line and in Python."""

UNDECLARE = "if the metadata is wrong, save the file without its h3.layout entry and state the layout"


def misstated(where: str, declared: Layout | None, stated: Layout) -> LayoutMismatchError:
    """The error of a file that says one layout and a caller that says another."""
    return LayoutMismatchError(
        f"{where}: its metadata says {declared} but {STATEMENT} says {stated}; leave the statement out, or, {UNDECLARE}"
    )


def _layout(text: str, where: str) -> Layout:
    try:
        return Layout(text)
    except ValueError:
        raise LayoutError(
            f"{where}: metadata declares layout {text!r}; known are {listed(Layout)}: {UNDECLARE}"
        ) from None


def names_layout(names: Iterable[str], where: str = "checkpoint") -> Layout:
    """DIFFUSERS or MODULE (here standing for either native layout), from names alone.

    Raises MixedLayoutsError, UnknownNameError, or MissingTensorError if no name is H3's.
    """
    native, diffusers = _templates(Layout.MODULE), _templates(Layout.DIFFUSERS)
    only_native, only_diffusers = native - diffusers, diffusers - native
    forms = {name: _template(name) for name in names}
    as_native = {name for name, form in forms.items() if form in only_native}
    as_diffusers = {name for name, form in forms.items() if form in only_diffusers}
    if as_native and as_diffusers:
        raise MixedLayoutsError(
            f"{where}: {len(as_native)} native names ({listed(as_native, 2)}) beside {len(as_diffusers)} Diffusers "
            f"names ({listed(as_diffusers, 2)}); a checkpoint has one layout"
        )
    if unknown := {name for name, form in forms.items() if form not in native | diffusers}:
        raise UnknownNameError(_unknown(unknown, native | diffusers, where))
    if not as_native and not as_diffusers:
        raise MissingTensorError(
            f"{where}: none of {len(forms)} tensors is an H3 transformer's; expected names such as {SAMPLES}"
        )
    return Layout.MODULE if as_native else Layout.DIFFUSERS


def _unknown(names: set[str], known: Set[str], where: str) -> str:
    what = named(names)
    near = difflib.get_close_matches(_template(min(names)), known, n=1, cutoff=0.6)
    hint = (
        f"nearest known name: {near[0]}"
        if near
        else f"expected a MiniMax-H3 transformer's, such as {SAMPLES}"
    )
    if what:
        hint = f"this is {what}" if what == ADAPTER else f"this is {what}; expected a MiniMax-H3 transformer"
    elif all(_template(unwrap(name).name) in known for name in names):
        hint = "without their wrapper's prefix they are: `convert --variant` takes it off"
    return f"{where}: {counted(names, 'name is', 'names are')} no H3 tensor's: {listed(names)}; {hint}"


def refuse_variants(seen: Seen, where: str = "checkpoint") -> None:
    """Raise PrunedVariantError or QuantisedVariantError if these tensors are not the full bf16/fp32 model."""
    narrow = {
        name: shape[1]
        for name, (shape, _) in seen.items()
        if name.endswith("adaln_proj.linear.weight") and len(shape) == 2 and 16 * shape[1] <= shape[0] // 18
    }
    timed = any(name.startswith("time_embedder.") for name in seen)
    marks = [name for name in seen if name.endswith(PRUNED_MARKS)]
    if marks or (narrow and not timed):
        width = next(iter(narrow.values()), "absent")
        raise PrunedVariantError(
            f"{where}: a pruned H3 (AdaLN input width {width}, {listed(marks) or 'no time_embedder'}); "
            f"expected the full model (width time_embed_dim, {H3Config().time_embed_dim} as released); "
            "`convert --variant` moves it between release and module"
        )
    scales = [name for name in seen if name.rpartition(".")[2] in QUANTISED_MARKS]
    packed = [name for name, (_, dtype) in seen.items() if QUANTISED_DTYPES.fullmatch(dtype)]
    if scales or packed:
        names = {*scales, *packed}  # a blob is both: its name says so, and its bytes do
        raise QuantisedVariantError(
            f"{where}: quantised weights ({listed(names, 3)}); use the BF16 checkpoint "
            "(`convert --variant` moves this one if its scales follow rows)"
        )


def check(
    seen: Seen,
    config: H3Config,
    layout: Layout,
    where: str = "checkpoint",
    origin: Origin = Origin.CALLER,
) -> None:
    """Every tensor of the layout is there, nothing else is, and shapes and dtypes are exactly the model's.

    origin: where `config` came from, for messages. Raises as `check_names` and `check_specs`.
    """
    check_names(seen.keys(), config, layout, where, origin)
    expected = {spec.name: (spec.shape, spec.dtype) for spec in tensors(config, layout)}
    check_specs(seen, expected, where, origin)


def check_names(
    names: Set[str],
    config: H3Config,
    layout: Layout,
    where: str = "checkpoint",
    origin: Origin = Origin.CALLER,
) -> None:
    """Raise UnknownNameError, IncompleteGroupError or MissingTensorError unless `names` is the layout's set.

    A `module` checkpoint may lack derived tensors (rope.inv_freq): files made from parameters do.
    """
    expected = {spec.name for spec in tensors(config, layout)}
    optional = set(derived(config, layout)) if layout is Layout.MODULE else set()
    if extra := names - expected:
        raise UnknownNameError(
            f"{where}: {origin} ({config.num_layers} blocks, {config.num_refiner_layers} refiner blocks) has no "
            f"place for {listed(extra)}; {origin.remedy}"
        )
    if missing := expected - names - optional:
        _refuse_missing(missing, names, config, layout, where)


def check_specs(
    seen: Seen, expected: Seen, where: str = "checkpoint", origin: Origin = Origin.CALLER
) -> None:
    """Raise ShapeError or DtypeError unless each tensor is exactly as expected; larger is wrong too.

    The error names the first of its kind and counts the others.

    (Engines narrow an oversized tensor without a word: vLLM-Omni 0.30 does for adaln, out_proj, fc1 and fc2.)
    """
    shapes = [name for name, (shape, _) in sorted(seen.items()) if shape != expected[name][0]]
    if shapes:
        name, many = shapes[0], 2 * len(shapes) > len(seen)
        remedy = origin.remedy if many else f"{origin.remedy}, or save or download that tensor's file again"
        raise ShapeError(
            f"{where}: {name} has shape {list(seen[name][0])}{more_like(shapes)}; {origin} "
            f"{'give' if origin is Origin.SHAPES else 'gives'} {list(expected[name][0])}: {remedy}"
        )
    kinds = unlike(
        {name: (dtype, expected[name][1]) for name, (_, dtype) in seen.items() if dtype != expected[name][1]}
    )
    if kinds:
        (dtype, right), names = kinds[0]
        raise DtypeError(
            f"{where}: {names[0]} is {dtype}{more_like(names)}; H3 keeps {'them' if names[1:] else 'it'} in {right} "
            f"and nothing is ever cast: {REMEDIES[right]}"
        )


def unlike(dtypes: Mapping[str, tuple[str, str]]) -> list[tuple[tuple[str, str], list[str]]]:
    """((dtype found, dtype expected), sorted names), the commonest first."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, kind in sorted(dtypes.items()):
        kinds.setdefault(kind, []).append(name)
    return sorted(kinds.items(), key=lambda item: -len(item[1]))


def more_like(names: Collection[str]) -> str:
    """How many more are like the one just named."""
    return f", and {len(names) - 1} more like it" if len(names) > 1 else ""


def _refuse_missing(missing: Set[str], names: Set[str], config: H3Config, layout: Layout, where: str) -> None:
    fused: dict[str, set[str]] = {}
    for name, held in spans(replace(config, num_attention_heads=1), layout).items():
        fused.setdefault(held[0].atom.partition("[")[0], set()).add(name)
    for module, parts in fused.items():
        if parts & missing and parts & names:
            raise IncompleteGroupError(
                f"{where}: {module} needs {listed(parts)}; absent: {listed(parts & missing)}; {WHOLE}"
            )
    raise MissingTensorError(
        f"{where}: {counted(missing, 'tensor is', 'tensors are')} absent: {listed(missing)}; {WHOLE}"
    )


def check_derived(name: str, data: bytes, expected: bytes, where: str = "checkpoint") -> None:
    """Raise DerivedTensorError unless a stored derived tensor has the bits its formula gives."""
    if data != expected:
        at = next((i for i in range(0, len(expected), 4) if data[i : i + 4] != expected[i : i + 4]), 0)
        raise DerivedTensorError(
            f"{where}: {name}[{at // 4}] holds {data[at : at + 4].hex()}, and 1/theta**(2i/2n) in fp32 is "
            f"{expected[at : at + 4].hex()}; other layouts recompute it, so converting would change it"
        )
