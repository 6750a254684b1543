"""The forms in which H3 is published besides the full bf16 model, as tables: pruned, quantised, with VSA gates.

Sources: the pruned and quantised files of Comfy-Org (ComfyUI's `comfy_quant` blobs), SGLang #35994, vLLM-Omni #6894.
`classify.py` judges tensors by these tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from h3_mapper.config import H3Config
from h3_mapper.plan import tensors
from h3_mapper.spec import Layout


@dataclass(frozen=True, slots=True)
class VariantRule:
    """How a variant differs from the full model.

    extra: tensors of its own, name -> dtype. absent: names with these prefixes are not there. fp32: name endings
    that are F32 here and BF16 in the full model. width: AdaLN input width; None as config.json says. layouts: those
    that exist.
    """

    name: str
    what: str
    extra: tuple[tuple[str, str], ...] = ()
    absent: tuple[str, ...] = ()
    fp32: tuple[str, ...] = ()
    width: int | None = None
    layouts: tuple[Layout, ...] = tuple(Layout)


VARIANTS = {
    rule.name: rule
    for rule in (
        VariantRule("full", "AdaLN in bf16, 12 parameters and inv_freq in fp32"),
        # Casting the pruned AdaLN to bf16 cost 20 dB (SGLang #35370, LightX2V #1335).
        VariantRule(
            "pruned",
            "AdaLN of width 8 and a table of time embeddings, both fp32; no time embedder",
            extra=(("adaln_t_table", "F32"),),
            absent=("time_embedder.",),
            fp32=("adaln_proj.linear.weight", "adaln_proj.linear.bias"),
            width=8,
            layouts=(Layout.RELEASE, Layout.MODULE),
        ),
    )
}
"""Precision per variant as a table: every other tensor has the dtype of `table.py`."""


class Scale(StrEnum):
    """What a tensor beside a weight is to its rows."""

    ROWS = "rows"
    """One value for the tensor, a part, a row, or a block of rows: moves with them."""
    WHOLE = "whole"
    """One value for the layer, whatever its rows."""
    BLOB = "blob"
    """JSON bytes about the layer."""


ATTACHED: Mapping[str, Scale] = {
    "weight_scale": Scale.ROWS,
    "weight_scale_inv": Scale.ROWS,
    "scale_weight": Scale.ROWS,
    "input_scale": Scale.WHOLE,
    "scale_input": Scale.WHOLE,
    "comfy_quant": Scale.BLOB,
}
"""Last name segments of tensors that belong to a quantised weight."""

MARKERS = frozenset({"scaled_fp8"})
"""Model-level tensors whose presence alone says something; handed on as they are."""

PACKED: Mapping[str, str] = {
    "absmax": "bitsandbytes packs values across rows (NF4, INT8)",
    "quant_map": "bitsandbytes packs values across rows (NF4)",
    "SCB": "bitsandbytes INT8 is not read",
    "qweight": "GPTQ and AWQ pack values across rows",
    "qzeros": "GPTQ and AWQ pack values across rows",
    "g_idx": "GPTQ orders columns by a table",
    "weight_scale_2": "NVFP4 keeps its block scales in a swizzled tile order",
    "weight_packed": "compressed-tensors packs values into words",
}
"""Name endings of formats whose rows cannot be moved one by one, with the reason."""

ROW_FORMATS = frozenset({"int8_tensorwise", "float8_e4m3fn", "float8_e5m2"})
"""`comfy_quant` formats whose weight is one value an element, row-major, so that rows move freely. ConvRot rotates
columns in groups and commutes with that."""

ADAPTER = "an adapter: see `h3-mapper lora inspect`"

OTHER_NAMES: Mapping[str, str] = {
    ".ff.fc_in.": "FastVideo names (its gate order is not verified)",
    "time_embedder.fc_in.": "FastVideo names",
    "time_embedder.table": "the pruned form of a vLLM fork",
    "adaln_proj.folded_bias": "the pruned form of a vLLM fork",
    "adaln_basis": "the pruned form of a vLLM fork",
    "adaln_mean": "the pruned form of a vLLM fork",
    **dict.fromkeys(("model.norm.weight", "model.layers.", "lm_head.weight"), "a language model"),
    **dict.fromkeys((".lora_", ".lokr_", ".hada_", ".oft_", ".set_weight"), ADAPTER),
    **dict.fromkeys(("double_blocks.", "single_transformer_blocks."), "a Flux model"),
    **dict.fromkeys(("encoder.down_blocks.", "encoder.mid_block.", "decoder.up_blocks."), "a VAE"),
}
"""Substrings that identify what a file of unknown names probably is."""


def named(names: Iterable[str]) -> str:
    """What tensors of these names probably are, if they are a known something else; empty if not known."""
    held = tuple(names)
    return next((what for mark, what in OTHER_NAMES.items() if any(mark in name for name in held)), "")


@dataclass(frozen=True, slots=True)
class Variant:
    """What a set of tensors was found to be.

    rule: None if unknown. native: whether names are native. config: None unless every shape agrees. quantised:
    module -> its comfy_quant object (empty without a blob). problems: every reason it is not a sound member of its
    variant. precision: tensors by dtype.
    """

    rule: VariantRule | None
    native: bool
    config: H3Config | None
    gates: bool
    quantised: Mapping[str, Mapping[str, Any]]
    formats: tuple[str, ...]
    precision: Mapping[str, int]
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """`full`, `pruned+int8_tensorwise convrot 256`, `unknown` ..."""
        if self.rule is None:
            return "unknown"
        return "+".join([self.rule.name, *(["vsa"] if self.gates else []), *self.formats])


def expected_specs(
    rule: VariantRule, config: H3Config, layout: Layout
) -> dict[str, tuple[tuple[int, ...] | None, str]]:
    """Name -> (shape, dtype) of the variant's unquantised tensors; shape None where the variant leaves it open."""
    specs: dict[str, tuple[tuple[int, ...] | None, str]] = {}
    for spec in tensors(config, layout):
        if not spec.name.startswith(rule.absent or ("\0",)):
            specs[spec.name] = (spec.shape, "F32" if spec.name.endswith(rule.fp32 or ("\0",)) else spec.dtype)
    return specs | {name: (None, dtype) for name, dtype in rule.extra}
