"""The adapter formats as data: the only file to edit when a producer appears or changes.

A format says how modules are named, which prefix and suffixes its tensors carry, in which order fused rows are, and
where the scale is. Reading needs the suffixes and the order; writing needs all of it. The row order of a fused
projection is a property of the producer and cannot be seen in names, shapes or dtypes, so naming a format is how a
caller states it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Naming(StrEnum):
    """How modules are spelled."""

    DIFFUSERS = "diffusers"
    """`transformer_blocks.0.attn.to_q`: q, k and v separate, feed-forward rows [value; gate]."""
    NATIVE = "native"
    """`blocks.0.attn.qkv_proj`: q, k and v fused, gate and value fused."""
    ENGINE = "engine"
    """`blocks.0.attn.to_q`, `blocks.0.mlp.fc1_0`: native blocks, every part alone (verl-omni to vLLM-Omni)."""
    FLAT = "flat"
    """Native names with `_` for `.` (kohya)."""


class QkvRows(StrEnum):
    """Order of the rows of a fused q/k/v projection."""

    GROUPED = "grouped"
    """Per head [q k v]: the released checkpoint on disk, FlashGen, DiffSynth."""
    STACKED = "stacked"
    """[Q; K; V]: a loaded vLLM-Omni module, ComfyUI repacks, musubi-tuner, ai-toolkit."""


class Fc1Rows(StrEnum):
    """Order of the halves of a fused feed-forward input projection."""

    GATE_FIRST = "gate-first"
    VALUE_FIRST = "value-first"


class Alpha(StrEnum):
    """Where a format keeps alpha, and so how finely scales may differ."""

    PEFT_CONFIG = "adapter_config.json"
    """`lora_alpha`, `r`, and per-module patterns: any scales."""
    PLAIN_CONFIG = "adapter_config.json without patterns"
    """One `lora_alpha` and one `r` for the whole adapter (vLLM's loader reads no patterns)."""
    DIFFUSERS_METADATA = "lora_adapter_metadata"
    """The same as `PEFT_CONFIG`, as JSON in the safetensors metadata: any scales."""
    TENSOR = ".alpha"
    """One scalar tensor a module: any scales."""
    METADATA = "metadata alpha"
    """One number in the safetensors metadata: one alpha and one rank."""
    ONE = "none"
    """Nothing is stored; the product is added as it is."""


PER_MODULE = frozenset({Alpha.PEFT_CONFIG, Alpha.DIFFUSERS_METADATA, Alpha.TENSOR})


@dataclass(frozen=True, slots=True)
class Format:
    """One way to store an adapter.

    prefix, ref_prefix: before module names, for the FL2VA and the Ref2VA partition; empty ref_prefix: not recorded.
    dora: suffix of the magnitude vector; no_dora: why there is none. deltas: .diff, .diff_b, .set_weight allowed.
    """

    name: str
    what: str
    naming: Naming
    prefix: str
    a: str
    b: str
    alpha: Alpha
    qkv: QkvRows | None = None
    fc1: Fc1Rows | None = None
    ref_prefix: str = ""
    dora: str = ""
    no_dora: str = ""
    deltas: bool = False
    metadata: tuple[tuple[str, str], ...] = ()


_A, _B = ".lora_A.weight", ".lora_B.weight"
_A_DEFAULT, _B_DEFAULT = ".lora_A.default.weight", ".lora_B.default.weight"
_NO_ENGINE_DORA = "vLLM's LoRA layers have no magnitude"

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        # PEFT 0.21 save_pretrained: adapter_model.safetensors beside adapter_config.json.
        Format(
            "peft", "PEFT folder", Naming.DIFFUSERS, "base_model.model.", _A, _B, Alpha.PEFT_CONFIG,
            dora=".lora_magnitude_vector",
        ),
        # Diffusers 0.42 save_lora_weights; its loader drops magnitudes with a warning.
        Format(
            "diffusers", "Diffusers pipeline file", Naming.DIFFUSERS, "transformer.", _A, _B,
            Alpha.DIFFUSERS_METADATA, ref_prefix="transformer_ref.",
            no_dora="Diffusers' MiniMax-H3 loader drops magnitudes",
        ),
        # LightX2V Turbo as vLLM-Omni 0.30 (minimax_h3/lora.py) reads it.
        Format(
            "turbo", "LightX2V Turbo", Naming.DIFFUSERS, "", _A_DEFAULT, _B_DEFAULT, Alpha.METADATA,
            no_dora=_NO_ENGINE_DORA, metadata=(("key_format", "minimax-h3-diffusers"),),
        ),
        # FlashGen as vLLM-Omni 0.30 (minimax_h3/npu/lora.py) reads it.
        Format(
            "flashgen", "FlashGen, native names, grouped rows", Naming.NATIVE, "transformer.", _A_DEFAULT, _B_DEFAULT,
            Alpha.METADATA, QkvRows.GROUPED, Fc1Rows.GATE_FIRST, no_dora=_NO_ENGINE_DORA,
            metadata=(("key_format", "minimax-h3-native"), ("qkv_layout", "grouped")),
        ),
        # vLLM-Omni's general LoRA manager: a PEFT folder whose fused B is cut in [Q; K; V] and [gate; value]. At tp > 1
        # the 0.30 manager compares the whole B with one rank's rows and refuses it: write `engine` there.
        Format(
            "vllm-omni", "vLLM-Omni folder, fused names, stacked rows", Naming.NATIVE, "transformer.", _A, _B,
            Alpha.PLAIN_CONFIG, QkvRows.STACKED, Fc1Rows.GATE_FIRST, ref_prefix="transformers_ref.",
            no_dora=_NO_ENGINE_DORA,
        ),
        # verl-omni map_lora_update_to_engine: every part alone, fc1 as fc1_0 (gate) and fc1_1 (value).
        Format(
            "engine", "verl-omni engine names", Naming.ENGINE, "transformer.", _A, _B, Alpha.PLAIN_CONFIG,
            ref_prefix="transformers_ref.", no_dora=_NO_ENGINE_DORA,
        ),
        # FastVideo FastH3: factors without a scale, full-rank .diff/.diff_b, assigned .set_weight.
        Format(
            "fasth3", "FastVideo FastH3", Naming.DIFFUSERS, "", _A, _B, Alpha.ONE, deltas=True,
            no_dora="FastH3 adds B @ A as it is", metadata=(("format", "fastvideo-lora-v2"),),
        ),
        # kohya sd-scripts and musubi-tuner.
        Format(
            "kohya", "kohya, musubi-tuner", Naming.FLAT, "lora_unet_", ".lora_down.weight", ".lora_up.weight",
            Alpha.TENSOR, QkvRows.STACKED, Fc1Rows.GATE_FIRST, dora=".dora_scale",
        ),
        # ComfyUI and ai-toolkit.
        Format(
            "comfy", "ComfyUI, ai-toolkit", Naming.NATIVE, "diffusion_model.", _A, _B, Alpha.TENSOR,
            QkvRows.STACKED, Fc1Rows.GATE_FIRST, dora=".dora_scale", deltas=True,
        ),
        # DiffSynth-Studio trains on the released rows as they are on disk.
        Format(
            "diffsynth", "DiffSynth-Studio", Naming.NATIVE, "", _A_DEFAULT, _B_DEFAULT, Alpha.ONE,
            QkvRows.GROUPED, Fc1Rows.GATE_FIRST, no_dora="DiffSynth adds B @ A as it is",
        ),
    )
}  # fmt: skip

UNSUPPORTED_SUFFIXES: dict[str, str] = {
    ".lora_B.bias": "a LoRA bias is not part of any H3 engine's adapter",
    ".lora_mid.weight": "LoCon (a convolution in the middle) does not fit linear layers",
    ".lora_embedding_A": "H3 has no embedding layers",
    ".lora_embedding_B": "H3 has no embedding layers",
    ".lokr_w1": "LoKr is not a low-rank product",
    ".lokr_w2": "LoKr is not a low-rank product",
    ".hada_w1_a": "LoHa is not a low-rank product",
    ".hada_w2_a": "LoHa is not a low-rank product",
    ".oft_blocks": "OFT multiplies the weight",
    ".oft_diag": "OFT multiplies the weight",
    ".boft_R": "BOFT multiplies the weight",
}
"""Suffixes of other adapter kinds, each with the reason it is refused."""
