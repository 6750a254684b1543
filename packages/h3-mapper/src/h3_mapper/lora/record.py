"""What a written adapter says about itself: safetensors metadata and adapter_config.json."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from h3_mapper.lora.adapter import Adapter, LowRank
from h3_mapper.lora.arrays import Tensor
from h3_mapper.lora.formats import Alpha, Format, Naming
from h3_mapper.lora.read import FC1_KEY, PARTITION_KEY, QKV_KEY
from h3_mapper.lora.scale import DIFFUSERS_METADATA, METADATA_ALPHA
from h3_mapper.wrappers import PARTITIONS

_REWRITTEN = frozenset(
    {
        *METADATA_ALPHA,
        *(DIFFUSERS_METADATA, QKV_KEY, FC1_KEY, PARTITION_KEY),
        *("format", "key_format", "qkv_layout", "rank", "lora_rank", "ss_network_dim"),
        *("low_rank_tensors", "diff_tensors", "set_weight_tensors"),
    }
)
"""Metadata keys that describe the file's format: written anew. All others travel with the adapter."""


def alpha_of(term: LowRank) -> float:
    """The alpha that gives the term's scale at its rank."""
    return float(term.scale * term.rank)


def metadata_of(
    adapter: Adapter,
    format_: Format,
    terms: Mapping[str, LowRank],
    tensors: Mapping[str, Tensor],
    component: str,
) -> dict[str, str]:
    """The safetensors metadata of a file of this format. component: as its names have it, for Diffusers' record."""
    metadata = {key: value for key, value in adapter.metadata.items() if key not in _REWRITTEN}
    metadata |= {"format": "pt", **dict(format_.metadata)}
    if format_.naming in (Naming.NATIVE, Naming.FLAT) and format_.qkv and format_.fc1:
        metadata |= {QKV_KEY: format_.qkv, FC1_KEY: format_.fc1}
    first = next(iter(terms.values()), None)
    if adapter.component in PARTITIONS:
        metadata[PARTITION_KEY] = PARTITIONS[adapter.component]
    if format_.alpha is Alpha.METADATA and first is not None:
        alpha = str(_int(alpha_of(first)))
        metadata |= {"alpha": alpha, "lora_alpha": alpha, "lora_rank": str(first.rank)}
    if format_.alpha is Alpha.DIFFUSERS_METADATA:
        entries = {f"{component}.{key}": value for key, value in _patterned(terms, False).items()}
        metadata[DIFFUSERS_METADATA] = json.dumps(entries, indent=2, sort_keys=True)
    if format_.name == "fasth3":
        counts = Counter(_fasth3_kind(name) for name in tensors)
        metadata |= {
            key: str(counts[key]) for key in ("low_rank_tensors", "diff_tensors", "set_weight_tensors")
        }
        if first is not None:
            metadata["rank"] = str(max(term.rank for term in terms.values()))
    return metadata


def _fasth3_kind(name: str) -> str:
    if name.endswith(".set_weight"):
        return "set_weight_tensors"
    return "diff_tensors" if name.endswith((".diff", ".diff_b")) else "low_rank_tensors"


def peft_config_of(format_: Format, terms: Mapping[str, LowRank]) -> dict[str, Any] | None:
    """The adapter_config.json object, for formats that have one."""
    if format_.alpha is Alpha.PEFT_CONFIG:
        return _patterned(terms, any(term.magnitude is not None for term in terms.values()))
    if format_.alpha is Alpha.PLAIN_CONFIG and terms:
        first = next(iter(terms.values()))  # rank and scale are the same everywhere by now
        return _base_config(first.rank, alpha_of(first), sorted({name.rpartition(".")[2] for name in terms}))
    return None


def _patterned(terms: Mapping[str, LowRank], dora: bool) -> dict[str, Any]:
    """PEFT's configuration: the commonest rank and alpha, and a pattern for every module that differs."""
    ranks = {name: term.rank for name, term in terms.items()}
    alphas = {name: alpha_of(term) for name, term in terms.items()}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    config = _base_config(rank, alpha, sorted(terms))
    config["rank_pattern"] = {f"^{re.escape(name)}": value for name, value in ranks.items() if value != rank}
    config["alpha_pattern"] = {
        f"^{re.escape(name)}": _int(value) for name, value in alphas.items() if value != alpha
    }
    return config | {"use_dora": dora}


def _base_config(rank: int, alpha: float, targets: list[str]) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": _int(alpha),
        "target_modules": targets,
        "rank_pattern": {},
        "alpha_pattern": {},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
        "task_type": None,
    }


def _int(value: float) -> float:
    return int(value) if value == int(value) else value
