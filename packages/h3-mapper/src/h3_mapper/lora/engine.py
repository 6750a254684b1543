"""verl-omni's adapter contract: PEFT tensors of a training step -> what the rollout engine's LoRA manager binds.

q, k and v stay apart; the feed-forward input becomes fc1_0 (gate) and fc1_1 (value) that share A. Tensors are the
caller's own, cut to views: nothing is copied, whatever device they are on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from h3_mapper.config import H3Config
from h3_mapper.errors import listed
from h3_mapper.lora.arrays import Tensor
from h3_mapper.lora.errors import UnmappedModuleError, UnpairedFactorError, UnsupportedAdapterError
from h3_mapper.lora.formats import Naming
from h3_mapper.lora.modules import places
from h3_mapper.lora.names import Role, parse
from h3_mapper.lora.read import read
from h3_mapper.lora.write import write

TARGETS: Mapping[str, tuple[str, ...]] = {
    "to_q": ("to_q",),
    "to_k": ("to_k",),
    "to_v": ("to_v",),
    "to_out.0": ("out_proj",),
    "ff.net.0.proj": ("fc1_0", "fc1_1"),
    "ff.net.2": ("fc2",),
}
"""PEFT target module -> engine target modules. Others are not carried to the rollout by FSDP's layered summon."""

STACKED: tuple[tuple[str, str, str], ...] = (
    (".qkv_proj", ".to_q", "q"),
    (".qkv_proj", ".to_k", "k"),
    (".qkv_proj", ".to_v", "v"),
    (".fc1", ".fc1_0", "0"),
    (".fc1", ".fc1_1", "1"),
)
"""Entries that the engine model's `stacked_params_mapping` needs, so that its LoRA manager finds the parts."""


def check_targets(target_modules: Any) -> tuple[str, ...]:
    """The requested target modules, checked. Raises UnsupportedAdapterError for anything that is not synced."""
    requested = [target_modules] if isinstance(target_modules, str) else list(target_modules or ())
    unknown = sorted(set(map(str, requested)) - TARGETS.keys())
    if not requested or unknown:
        raise UnsupportedAdapterError(
            f"target_modules {target_modules!r}: only {listed(TARGETS, 9)} reach the rollout; name them one by one "
            "(all-linear, AdaLN and model-level modules are trained but never synced)"
        )
    return tuple(target for target in TARGETS if target in requested)


def map_lora_update_to_engine(
    tensors: Mapping[str, Tensor],
    peft_config: Mapping[str, Any],
    config: H3Config | None = None,
    *,
    component: str = "transformer",
    requested_only: bool = False,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(engine name -> tensor, adapter configuration for the engine).

    tensors: PEFT names with any wrapper prefixes; A [r, in], B [out, r]. component: the engine attribute to bind to
    (`transformers_ref` for Ref2VA). requested_only: list only the engine names of the requested targets (FlowGRPO);
    otherwise all seven (DiffusionNFT). r and lora_alpha are passed through.
    Raises AdapterError if a target is unsupported, a tensor outside the blocks is sent, a shape is wrong, or any
    expected module of any block lacks A or B: the engine would serve base weights there and say nothing.
    """
    config = config or H3Config()
    targets = check_targets(peft_config.get("target_modules"))
    for key in ("rank_pattern", "alpha_pattern", "use_dora"):
        if peft_config.get(key):
            raise UnsupportedAdapterError(
                f"{key}={peft_config[key]!r}: vLLM's LoRA loader has one rank and one alpha"
            )
    _require_every(tensors, targets, config)
    written = write(read(tensors, config, peft_config=peft_config), "engine", config)
    prefix = written.format.prefix
    mapped = {f"{component}.{name.removeprefix(prefix)}": tensor for name, tensor in written.tensors.items()}
    names = targets if requested_only else tuple(TARGETS)
    return mapped, {**peft_config, "target_modules": [engine for name in names for engine in TARGETS[name]]}


def _require_every(names: Iterable[str], targets: Iterable[str], config: H3Config) -> None:
    """Both factors of every target of every block, and nothing else."""
    endings = tuple(f".{target}.weight" for target in targets)
    expected = {
        (place.removesuffix(".weight"), role)
        for place in places(config, Naming.DIFFUSERS)
        if place.endswith(endings)
        and place.startswith(("transformer_blocks.", "token_refiner.refiner_blocks."))
        for role in (Role.A, Role.B)
    }
    found = {(key.module, key.role) for key in map(parse, names)}
    if missing := expected - found:
        raise UnpairedFactorError(
            f"{len(missing)} of {len(expected)} expected factors are missing: "
            f"{listed(f'{module}.lora_{role}' for module, role in missing)}; the engine would serve base weights there"
        )
    if extra := found - expected:
        raise UnmappedModuleError(
            f"adapter tensors outside the targets {listed(targets)}: {listed(module for module, _ in extra)}"
        )


def _fused(block: Any) -> bool:
    attention, feed_forward = getattr(block, "attn", None), getattr(block, "mlp", None)
    return hasattr(attention, "qkv_proj") and hasattr(feed_forward, "fc1")


def complete_stacked_mapping(transformer: Any) -> bool:
    """Give an engine transformer the `STACKED` entries it lacks; whether any was added.

    Existing entries stay first and as they are (vLLM-Omni 0.30 declares q, k and v, scoped by `.attn`). The instance
    gets the list, not its class, so another partition's transformer is not touched. Calling again adds nothing.
    Raises UnsupportedAdapterError for what is no engine transformer: no block of it has attn.qkv_proj and mlp.fc1.
    """
    if not any(map(_fused, getattr(transformer, "blocks", None) or ())):
        raise UnsupportedAdapterError(
            f"a {type(transformer).__name__} has no blocks with attn.qkv_proj and mlp.fc1; expected the engine's "
            "MiniMax-H3 transformer: pass pipeline.transformer"
        )
    existing = tuple(getattr(transformer, "stacked_params_mapping", None) or ())

    def leaf(entry: tuple[str, str, Any]) -> tuple[str, str]:  # the engine's manager compares leaf names
        return entry[0].rpartition(".")[2], entry[1].rpartition(".")[2]

    present = {leaf(entry) for entry in existing}
    missing = tuple(entry for entry in STACKED if leaf(entry) not in present)
    if missing:
        transformer.stacked_params_mapping = (*existing, *missing)
    return bool(missing)
