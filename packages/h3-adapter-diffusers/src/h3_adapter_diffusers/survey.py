"""Find the linears of a model and list every reason not to bind them, without changing anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from h3_kernels.binding import Style, differing_dtypes, dtype_reasons
from h3_kernels.contract import Rejected, legality
from h3_mapper import H3Config, Layout, tensors
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from h3_adapter_diffusers.bindings import (
    ADALN,
    AFTER_BLOCKS,
    BEFORE_BLOCKS,
    BLOCK_LISTS,
    FUSED,
    IN_BLOCK,
    QKV,
    LinearRule,
)
from h3_adapter_diffusers.errors import InstallError
from h3_adapter_diffusers.lora import is_wrapper, wrapper_obstacle

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
_LOAD = "load with from_pretrained(torch_dtype=torch.bfloat16), which keeps the fp32 tensors, and call no .to(dtype)"


@dataclass(frozen=True, slots=True)
class Site:
    """One place a linear sits: its name in the bare model, its rule, and where to look the module up."""

    name: str
    rule: LinearRule
    parent: nn.Module
    attribute: str

    @property
    def module(self) -> nn.Module:
        """What sits there now: the linear, or a LoRA wrapper around it."""
        module = self.parent._modules[self.attribute]
        assert module is not None
        return module

    @property
    def linear(self) -> nn.Module:
        """The base linear."""
        module: Any = self.module
        while is_wrapper(module):
            module = module.base_layer
        linear: nn.Module = module
        return linear


def expected_names(model: nn.Module) -> Iterator[tuple[str, LinearRule]]:
    """Names of the linears the model's structure calls for, in forward order.

    Raises InstallError if the model has no such block lists.
    """
    yield from ((rule.suffix, rule) for rule in BEFORE_BLOCKS)
    for blocks, rows in BLOCK_LISTS.items():
        for index, block in enumerate(_block_list(model, blocks)):
            if hasattr(block, "adaln_proj"):
                yield f"{blocks}.{index}.{ADALN.suffix}", ADALN
            for rule in _in_block(block):
                yield f"{blocks}.{index}.{rule.suffix}", replace(rule, rows=rows)
    yield from ((rule.suffix, rule) for rule in AFTER_BLOCKS)


def find_sites(model: nn.Module) -> list[Site]:
    """Every linear to bind, in forward order. Raises InstallError naming the modules that are missing."""
    sites, missing = [], []
    for name, rule in expected_names(model):
        parent_name, _, attribute = name.rpartition(".")
        try:
            parent = model.get_submodule(parent_name)
            site = Site(name, rule, parent, attribute)
            linear = site.linear
        except (AttributeError, KeyError, AssertionError):
            missing.append(f"{name}: no such module, expected a Linear")
            continue
        if isinstance(linear, nn.Linear):
            sites.append(site)
        else:
            missing.append(f"{name}: is a {type(linear).__name__}, expected a Linear (no quantised weights)")
    if missing:
        raise InstallError(missing)
    return sites


def obstacles(model: nn.Module, sites: list[Site], *, contract: str, tp: int) -> list[str]:
    """Every reason not to bind `sites`, one line each; empty if there is none. Tensors in other dtypes than the
    checkpoint's are looked for once every linear could be bound."""
    sharded = {
        id(p) for module in model.modules() if isinstance(module, FSDPModule) for p in module.parameters()
    }
    reasons = [f"{s.name}: {reason}" for s in sites for reason in _of_site(s, contract, tp, sharded)]
    reasons += _of_attention(model)
    return reasons or list(_of_dtypes(model))


def wrapper_obstacles(sites: list[Site]) -> list[str]:
    """Every reason why the strict LoRA term does not cover the wrappers around `sites`."""
    reasons = [(site.name, wrapper_obstacle(site.module)) for site in sites if is_wrapper(site.module)]
    return [f"{name}: {reason}" for name, reason in reasons if reason is not None]


def _block_list(model: nn.Module, name: str) -> nn.ModuleList:
    try:
        blocks = model.get_submodule(name)
    except AttributeError:
        blocks = model
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        hint = "; pass pipe.transformer" if hasattr(model, "transformer") else ""
        message = (
            f"{type(model).__name__} has no blocks {name!r}: expected a MiniMaxH3Transformer3DModel{hint}"
        )
        raise InstallError([message])
    return blocks


def _in_block(block: Any) -> Iterator[LinearRule]:
    fused = getattr(getattr(block, "attn", None), "fused_projections", False)
    if fused:
        yield FUSED
    yield from (rule for rule in IN_BLOCK if not (fused and rule.suffix in QKV))


def _of_site(site: Site, contract: str, tp: int, sharded: set[int]) -> Iterator[str]:
    linear: Any = site.linear
    if "forward" in vars(linear) or (site.module is not linear and "forward" in vars(site.module)):
        yield (
            "its forward is already replaced on the instance (offload, layerwise casting, context parallel or another"
            " install); install the contracts first, hooks after"
        )
    yield from _of_weight(linear, site.rule, sharded)
    shards = 1 if site.rule.boundary else tp
    n = linear.out_features * (shards if site.rule.style is Style.COLUMN else 1)
    k = linear.in_features * (shards if site.rule.style is Style.ROW else 1)
    verdict = legality(site.rule.contract(contract), n=n, k=k, tp=shards, parts=len(site.rule.parts))
    if isinstance(verdict, Rejected):
        yield verdict.reason


def _of_weight(linear: Any, rule: LinearRule, sharded: set[int]) -> Iterator[str]:
    weight = linear.weight
    if isinstance(weight, DTensor):
        if id(weight) not in sharded or weight.device_mesh.ndim != 1:
            yield (
                "weight is a DTensor of torch tensor parallelism; Diffusers has no plan for H3, so the order of its"
                " reductions is nobody's: use h3_adapter_diffusers.tensor_parallel.shard and tp="
            )
    elif weight.is_meta or type(weight.data) is not Tensor:
        kind = "on the meta device" if weight.is_meta else f"a {type(weight.data).__name__}"
        yield f"weight is {kind}: load plain tensors first (no quantisation, no deferred loading)"
    if weight.dtype not in (torch.bfloat16, torch.float32):
        yield f"weight is {weight.dtype}, expected torch.bfloat16 or torch.float32"
    if linear.bias is not None and linear.bias.dtype != weight.dtype:
        yield f"bias is {linear.bias.dtype}, weight {weight.dtype}; expected one dtype"


def _of_attention(model: nn.Module) -> Iterator[str]:
    """A fused projection bypasses the wrappers around to_q, to_k and to_v, and their LoRA with them."""
    for blocks in BLOCK_LISTS:
        for index, block in enumerate(_block_list(model, blocks)):
            attention: Any = block.attn
            wrapped = [q for q in ("to_q", "to_k", "to_v") if is_wrapper(getattr(attention, q))]
            if attention.fused_projections and wrapped:
                yield (
                    f"{blocks}.{index}.attn: projections are fused, which bypasses the LoRA on {', '.join(wrapped)};"
                    " unfuse_qkv_projections() before adding LoRA"
                )


def _of_dtypes(model: Any) -> Iterator[str]:
    """Tensors in neither h3-mapper's dtypes nor, with all the others, fp32: the rollout has not rounded them."""
    config = H3Config.from_mapping(dict(model.config))
    table = {t.name: _DTYPES[t.dtype] for t in tensors(config, Layout.DIFFUSERS)}
    # Diffusers computes rope.inv_freq, so only the native layouts list it.
    table |= {t.name: _DTYPES[t.dtype] for t in tensors(config, Layout.RELEASE) if t.name == "rope.inv_freq"}
    held = {name.replace(".base_layer", ""): p.dtype for name, p in model.named_parameters()}
    held |= {name: buffer.dtype for name, buffer in model.named_buffers()}
    whole = dict.fromkeys(table, torch.float32)
    found = min((differing_dtypes(held, t) for t in (table, whole)), key=lambda d: sum(map(len, d.values())))
    yield from (f"{reason}; {_LOAD}" for reason in dtype_reasons(found))
