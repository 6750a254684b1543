"""Where an adapter's scale is recorded, and what it is.

Order of precedence, first found wins: the caller's override; a module's `.alpha` tensor; adapter_config.json or its
copy in Diffusers' metadata; one `alpha` in the metadata; the caller's (or the format's) assumption. Nothing recorded
and nothing stated is an error: assuming alpha = rank for a file trained with alpha 8 at rank 128 is 16 times too
strong, and nobody notices until they look.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, TypeAlias

from h3_mapper.lora.arrays import Raw, Tensor, raw
from h3_mapper.lora.errors import ScaleError, UnstatedError, UnsupportedAdapterError
from h3_mapper.wrappers import PARTITIONS

AlphaChoice: TypeAlias = float | Literal["rank"]
METADATA_ALPHA = ("lora_alpha", "alpha", "ss_network_alpha")
DIFFUSERS_METADATA = "lora_adapter_metadata"


def scalar(tensor: Tensor) -> float:
    """The one value of a tensor of one element."""
    value = raw(tensor)
    if math.prod(value.shape) != 1:
        raise ScaleError(f"an alpha tensor has shape {list(value.shape)}; expected one value")
    return _decode(value)


def _decode(value: Raw) -> float:
    data = bytes(value.data)
    if value.dtype == "BF16":
        return float(struct.unpack("<f", b"\x00\x00" + data)[0])
    return float(
        struct.unpack({"F16": "<e", "F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}[value.dtype], data)[0]
    )


@dataclass(frozen=True, slots=True)
class Scales:
    """Looks a module's scale up. config: an adapter_config.json object; tensors: module name -> alpha."""

    override: AlphaChoice | None = None
    assume: AlphaChoice | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, float] = field(default_factory=dict)
    metadata_alpha: float | None = None

    @classmethod
    def of(
        cls,
        metadata: Mapping[str, str],
        config: Mapping[str, Any],
        tensors: Mapping[str, float],
        override: AlphaChoice | None,
        assume: AlphaChoice | None,
    ) -> Scales:
        """Collect what a file records. Raises UnsupportedAdapterError for configurations that are not plain LoRA."""
        for key, reason in _REFUSED_CONFIG.items():
            if config.get(key) not in (None, False, [], {}, "none"):
                raise UnsupportedAdapterError(
                    f"adapter_config.json: {key}={config[key]!r} is refused: {reason}"
                )
        _check_config(config)
        recorded = next((metadata[key] for key in METADATA_ALPHA if key in metadata), None)
        return cls(
            override, assume, dict(config), dict(tensors), None if recorded is None else _number(recorded)
        )

    def find(self, module: str, rank: int) -> tuple[Fraction, str]:
        """(exact scale, where it came from) of one module. Raises UnstatedError, ScaleError."""
        if self.override is not None:
            return _plain(self.override, rank), "stated by the caller"
        if module in self.tensors:
            return _plain(self.tensors[module], rank), "its alpha tensor"
        if "lora_alpha" in self.config:
            return self._configured(module, rank), "adapter config"
        if self.metadata_alpha is not None:
            return _plain(self.metadata_alpha, rank), "file metadata"
        if self.assume is not None:
            return _plain(self.assume, rank), "assumed"
        raise UnstatedError(
            f"{module}: no alpha is recorded for rank {rank}; pass alpha=<number>, or alpha='rank' for scale 1, "
            "by --alpha on the command line (Diffusers and ComfyUI assume alpha = rank; LightX2V's script assumes 8)"
        )

    def _configured(self, module: str, rank: int) -> Fraction:
        declared = _pattern(self.config, "rank_pattern", module, self.config.get("r"))
        if declared is not None and declared != rank:
            raise ScaleError(
                f"{module}: adapter_config.json says rank {declared}, its A has {rank} rows; alpha / rank is unsure: "
                "state alpha (--alpha)"
            )
        alpha = float(_pattern(self.config, "alpha_pattern", module, self.config["lora_alpha"]))
        return Fraction(alpha / math.sqrt(rank)) if self.config.get("use_rslora") else _plain(alpha, rank)


def _check_config(config: Mapping[str, Any]) -> None:
    """Raise ScaleError unless an adapter_config.json's numbers are numbers and its patterns regular expressions."""
    for key in ("r", "lora_alpha"):
        if config.get(key) is not None and not _is_number(config[key]):
            raise ScaleError(f"adapter_config.json: {key} is {config[key]!r}; expected a number")
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, Mapping):
            raise ScaleError(
                f"adapter_config.json: {key} is {patterns!r}; expected an object of pattern -> number"
            )
        for pattern, value in patterns.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ScaleError(
                    f"adapter_config.json: {key} has {pattern!r}, no regular expression ({error})"
                ) from None
            if not _is_number(value):
                raise ScaleError(f"adapter_config.json: {key}[{pattern!r}] is {value!r}; expected a number")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_REFUSED_CONFIG = {
    "lora_bias": "a bias on B is not part of any H3 engine's adapter",
    "modules_to_save": "whole trained modules are not a low-rank adapter",
    "fan_in_fan_out": "H3's linears store weights as [out, in]",
    "target_parameters": "adapters on bare parameters are not supported",
}


def _plain(alpha: AlphaChoice, rank: int) -> Fraction:
    if alpha == "rank":
        return Fraction(1)
    if not math.isfinite(alpha) or alpha == 0:
        raise ScaleError(f"alpha is {alpha}; expected a finite number other than 0")
    return Fraction(alpha) / rank


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ScaleError(f"metadata alpha is {text!r}; expected a number") from None


def diffusers_config(metadata: Mapping[str, str], component: str | None) -> dict[str, Any]:
    """The adapter configuration that Diffusers keeps in a file's metadata, of one component; empty if there is none."""
    text = metadata.get(DIFFUSERS_METADATA)
    if text is None:
        return {}
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        raise ScaleError(f"metadata {DIFFUSERS_METADATA} is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise ScaleError(f"metadata {DIFFUSERS_METADATA} is not an object")
    found = {}
    for key, value in entries.items():
        head, _, rest = key.partition(".")
        if head not in PARTITIONS:
            found[key] = value
        elif component in (head, None):
            found[rest] = value
    return found


def _pattern(config: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    """PEFT's rule (`get_pattern_key`): a pattern matches the whole name or its dotted tail; the first wins."""
    for pattern, value in (config.get(key) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
