"""Which H3 a set of tensors is: full or pruned, quantised how, with VSA gates or not.

What the tables of `variants.py` do not cover is `unknown`, with every reason; nothing is taken for its nearest
relative.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from h3_mapper.check import Seen, more_like, names_layout, unlike
from h3_mapper.config import H3Config
from h3_mapper.errors import MapperError, QuantisedVariantError, counted, listed
from h3_mapper.infer import infer_config
from h3_mapper.spec import Layout
from h3_mapper.variants import (
    ATTACHED,
    MARKERS,
    PACKED,
    ROW_FORMATS,
    VARIANTS,
    Scale,
    Variant,
    VariantRule,
    expected_specs,
    named,
)
from h3_mapper.wrappers import unwrap


def classify(seen: Seen, blobs: Mapping[str, bytes], config: Mapping[str, Any] | None = None) -> Variant:
    """Judge tensors by name, shape and dtype. blobs: contents of `comfy_quant` tensors by tensor name.

    Wrapper prefixes (`model.diffusion_model.`) are taken off first; MapperError if one stands twice. Everything else
    that is wrong with the tensors is a value: a problem.
    """
    bare = {unwrap(name).name: value for name, value in seen.items()}
    problems: list[str] = []
    precision = dict(Counter(dtype for _, dtype in seen.values()))
    attached, base = _apart(bare)
    packed = {end: reason for end, reason in PACKED.items() if any(n.rpartition(".")[2] == end for n in bare)}
    problems += [f"{end}: {reason}" for end, reason in packed.items()]
    rule = _rule(base, problems)
    own = dict(rule.extra) if rule else {}
    try:
        native = names_layout({name for name in base if name not in own}).native
    except MapperError as error:
        native = False
        problems.append(named(seen) or str(error))
        rule = None
    quantised = _quantised(base, attached, {unwrap(n).name: data for n, data in blobs.items()}, problems)
    found = _config(rule, base, config, native, problems) if rule else None
    if rule and found:
        _check(rule, found, base, native, quantised, problems)
    formats = tuple(sorted({_format(base, module, blob) for module, blob in quantised.items()}))
    gates = any(name.endswith("attn.to_gate_compress.weight") for name in base)
    return Variant(rule, native, found, gates, quantised, formats, precision, tuple(problems))


def _apart(
    bare: Seen,
) -> tuple[dict[str, tuple[tuple[int, ...], str]], dict[str, tuple[tuple[int, ...], str]]]:
    """(tensors attached to weights, the rest without markers)."""
    attached = {
        name: value for name, value in bare.items() if name.rpartition(".")[2] in {**ATTACHED, **PACKED}
    }
    base = {name: value for name, value in bare.items() if name not in attached and name not in MARKERS}
    return attached, base


def _rule(base: Seen, problems: list[str]) -> VariantRule | None:
    """The variant whose marks are all there and none of another's; None for a hybrid."""
    widths = {
        shape[1]
        for name, (shape, _) in base.items()
        if name.endswith("adaln_proj.linear.weight") and len(shape) == 2
    }
    pruned = VARIANTS["pruned"]
    table = any(name in dict(pruned.extra) for name in base)
    timed = any(name.startswith(pruned.absent) for name in base)
    if len(widths) > 1:
        problems.append(
            f"a hybrid: AdaLN widths {sorted(widths)} in one model (pruned is {pruned.width}, full wider)"
        )
        return None
    if table and timed:
        problems.append("a hybrid: adaln_t_table of the pruned model beside time_embedder of the full one")
        return None
    if timed and widths == {pruned.width}:
        full = H3Config().time_embed_dim
        problems.append(
            f"a hybrid: AdaLN of width {pruned.width} (pruned) beside the full model's time_embedder (width {full})"
        )
        return None
    if table:
        return pruned
    if not timed and widths == {pruned.width}:
        problems.append(f"AdaLN of width {pruned.width} without adaln_t_table: half of a pruned model")
        return None
    return VARIANTS["full"]


def _quantised(
    base: Seen, attached: Seen, blobs: Mapping[str, bytes], problems: list[str]
) -> dict[str, dict[str, Any]]:
    """Module -> comfy_quant object, of every module whose weight is quantised or has something attached."""
    modules: dict[str, dict[str, Any]] = {
        name.removesuffix(".weight"): {}
        for name, (_, dtype) in base.items()
        if name.endswith(".weight") and dtype not in ("BF16", "F32", "F16")
    }
    for name in attached:
        module = name.rpartition(".")[0]
        if f"{module}.weight" not in base:
            problems.append(f"{name}: no {module}.weight beside it")
        else:
            modules.setdefault(module, {})
    scaled = {n.rpartition(".")[0] for n in attached if ATTACHED.get(n.rpartition(".")[2]) is Scale.ROWS}
    if bare := modules.keys() - scaled:
        problems.append(f"quantised without a weight scale: {listed(bare, 3)}")
    for name, data in blobs.items():
        module = name.rpartition(".")[0]
        try:
            modules[module] = read_blob(name, data)
        except QuantisedVariantError as error:
            problems.append(str(error))
    return modules


def read_blob(name: str, data: bytes) -> dict[str, Any]:
    """A `comfy_quant` tensor's JSON. Raises QuantisedVariantError naming the layer and the field that is wrong."""
    layer = name.rpartition(".")[0]
    try:
        blob = json.loads(data.rstrip(b"\0"))
    except ValueError as error:
        raise QuantisedVariantError(f"{layer}: comfy_quant is not JSON: {error}") from None
    if not isinstance(blob, dict) or not isinstance(blob.get("format"), str):
        raise QuantisedVariantError(
            f"{layer}: comfy_quant lacks its field 'format'; loaders call that unknown"
        )
    if blob["format"] not in ROW_FORMATS:
        raise QuantisedVariantError(
            f"{layer}: comfy_quant format {blob['format']!r}; rows are known to move freely in {listed(ROW_FORMATS)}"
        )
    size = blob.get("convrot_groupsize")
    if blob.get("convrot") and not (isinstance(size, int) and size > 0):
        raise QuantisedVariantError(
            f"{layer}: comfy_quant has convrot without a positive 'convrot_groupsize'"
        )
    return blob


def _format(base: Seen, module: str, blob: Mapping[str, Any]) -> str:
    name = blob.get("format") or base.get(f"{module}.weight", ((), "unknown"))[1].lower()
    return f"{name} convrot {blob['convrot_groupsize']}" if blob.get("convrot") else str(name)


def _config(
    rule: VariantRule, base: Seen, given: Mapping[str, Any] | None, native: bool, problems: list[str]
) -> H3Config | None:
    gated = any(name.endswith("to_gate_compress.weight") for name in base)
    layout = Layout.MODULE if native else Layout.DIFFUSERS
    try:
        if given is not None and rule.width is None:
            found = H3Config.from_mapping(given)
        else:
            found = infer_config({**_stand_ins(rule), **base}, layout)
    except MapperError as error:
        problems.append(str(error))
        return None
    return replace(found, time_embed_dim=rule.width or found.time_embed_dim, vsa_gates=gated)


def _stand_ins(rule: VariantRule) -> Seen:
    """Shapes of the released time embedder, for a variant that has none: its sizes occur nowhere else."""
    if not rule.absent:
        return {}
    default = H3Config()
    return {
        "time_embedder.proj_in.weight": ((default.time_embed_hidden_dim, default.freq_dim), "F32"),
        "time_embedder.proj_out.weight": ((rule.width or 1, default.time_embed_hidden_dim), "F32"),
    }


def _check(
    rule: VariantRule,
    config: H3Config,
    base: Seen,
    native: bool,
    quantised: Mapping[str, Any],
    problems: list[str],
) -> None:
    expected = expected_specs(rule, config, Layout.MODULE if native else Layout.DIFFUSERS)
    optional = {"rope.inv_freq"}
    if missing := expected.keys() - base.keys() - optional:
        problems.append(f"{counted(missing, 'tensor is', 'tensors are')} absent: {listed(missing)}")
    if extra := base.keys() - expected.keys():
        problems.append(f"no place for {listed(extra)}; {rule.name} H3 of these sizes has no such tensors")
    dtypes: dict[str, tuple[str, str]] = {}
    for name in sorted(base.keys() & expected.keys()):
        shape, dtype = base[name]
        wanted, precision = expected[name]
        whole = name.removesuffix(".weight") not in quantised
        if wanted is not None and shape != wanted:
            problems.append(f"{name} has shape {list(shape)}; expected {list(wanted)}")
        elif whole and dtype != precision:
            dtypes[name] = dtype, precision
        elif not whole and precision == "F32":
            problems.append(f"{name} is quantised to {dtype}; {rule.name} H3 keeps it in F32")
    problems += [
        f"{names[0]} is {dtype}{more_like(names)}; {rule.name} H3 keeps {'them' if names[1:] else 'it'} in {precision}"
        for (dtype, precision), names in unlike(dtypes)
    ]
    for module, blob in quantised.items():
        width = base[f"{module}.weight"][0][-1] if f"{module}.weight" in base else 0
        if blob.get("convrot") and width % blob["convrot_groupsize"]:
            problems.append(
                f"{module}: {width} columns are no whole ConvRot groups of {blob['convrot_groupsize']}"
            )
