"""LoRA terms in scope `model`: what is laid over the nodes whose linears PEFT has wrapped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from h3_kernels.graph import PackedInputs
from h3_kernels.logical_keys import LogicalKeys
from torch import Tensor

from h3_adapter_diffusers.bindings import QKV
from h3_adapter_diffusers.lora import LoraTerm, active_terms, add_term, base_of, is_wrapper
from h3_adapter_diffusers.method import Settings
from h3_adapter_diffusers.overlays import Outputs, Replacement
from h3_adapter_diffusers.survey import Site


def lora_replacements(
    sites: Mapping[str, list[Site]], s: Settings, inputs: PackedInputs, base: Mapping[str, Replacement]
) -> dict[str, Replacement]:
    """Node name -> a replacement that runs what is there (`base`, else the strict node) and adds the active
    terms.

    `sites`: the linears of each node.
    """
    keys: dict[str, LogicalKeys | None] = {}
    found: dict[str, Replacement] = {}
    for node, linears in sites.items():
        wrapped = [site for site in linears if is_wrapper(site.module)]
        if not wrapped:
            continue
        rows = str(wrapped[0].rule.rows)
        if rows not in keys:
            keys[rows] = inputs.row_keys(rows)
        found[node] = _with_terms(wrapped, s, keys[rows], base.get(node))
    return found


def _with_terms(
    sites: list[Site], s: Settings, keys: LogicalKeys | None, base: Replacement | None
) -> Replacement:
    def lora(strict: Replacement, *inputs: Tensor) -> Outputs:
        outputs = list(strict(*inputs) if base is None else base(strict, *inputs))
        x = inputs[0].flatten(1)
        for site in sites:
            dtype = base_of(site.module).weight.dtype
            for term in active_terms(site.name, site.module, dtype):
                _add(outputs, x.to(dtype), term, site, s, keys)
        return tuple(outputs)

    return lora


def _add(
    outputs: list[Tensor], x: Tensor, term: LoraTerm, site: Site, s: Settings, keys: LogicalKeys | None
) -> None:
    """Add `term` to the outputs the site computes: one of q, k, v; gate and value; or the only one."""
    rule: Any = site.rule
    if len(outputs) == 1:
        outputs[0] = add_term(outputs[0], x, term, rule, s, keys)
    elif len(rule.parts) == 1:
        which = [name.rpartition(".")[2] for name in QKV].index(site.attribute)
        outputs[which] = add_term(outputs[which], x, term, rule, s, keys)
    else:  # stored part i is output parts[i]
        whole = add_term(torch.cat([outputs[i] for i in rule.parts], dim=-1), x, term, rule, s, keys)
        for i, part in zip(rule.parts, whole.chunk(len(rule.parts), dim=-1), strict=True):
            outputs[i] = part
