"""LoRA terms in scope `model`: what is laid over the nodes whose linears PEFT has wrapped.

A strict node gets the strict term. A node kept on Diffusers' arithmetic gets PEFT's, by PEFT's own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from h3_kernels.graph import PackedInputs
from h3_kernels.logical_keys import LogicalKeys
from h3_kernels.nodes import column_blocks, join_columns
from torch import Tensor

from h3_adapter_diffusers.bindings import QKV
from h3_adapter_diffusers.lora import active_terms, add_term, base_of, is_wrapper, peft_terms
from h3_adapter_diffusers.overlays import Outputs, Replacement
from h3_adapter_diffusers.settings import Settings
from h3_adapter_diffusers.survey import Site

Adder = Callable[[Site, Tensor, Tensor], Tensor]
"""(site, its linear's output y [T, N], x [T, K]) -> y with the site's terms."""


def wrapped_sites(linears: Mapping[str, list[Site]]) -> dict[str, list[Site]]:
    """Node name -> its linears that PEFT has wrapped, for nodes that have any."""
    found = {node: [site for site in sites if is_wrapper(site.module)] for node, sites in linears.items()}
    return {node: sites for node, sites in found.items() if sites}


def strict_terms(s: Settings, inputs: PackedInputs) -> Adder:
    """Adds the strict terms, under the logical keys of `inputs`."""
    keys: dict[str, LogicalKeys | None] = {}

    def add(site: Site, y: Tensor, x: Tensor) -> Tensor:
        rows = str(site.rule.rows)
        if rows not in keys:  # one object per row set and forward, as a backward session counts uses
            keys[rows] = (
                inputs.row_keys(rows) if torch.is_grad_enabled() else None
            )  # gradients alone need them
        for term in active_terms(site.name, site.module, x.dtype):
            y = add_term(y, x, term, site.rule, s, keys[rows])
        return y

    return add


def diffusers_terms(site: Site, y: Tensor, x: Tensor) -> Tensor:
    """Adds the terms as PEFT does."""
    return peft_terms(site.module, y, x)


def with_terms(sites: list[Site], base: Replacement | None, add: Adder) -> Replacement:
    """A replacement that runs `base`, or the strict node, and adds the terms of `sites` to its outputs."""

    def lora(strict: Replacement, *inputs: Tensor) -> Outputs:
        outputs = list(strict(*inputs) if base is None else base(strict, *inputs))
        x = inputs[0].flatten(1)
        for site in sites:
            _add(outputs, x.to(base_of(site.module).weight.dtype), site, add)
        return tuple(outputs)

    return lora


def _add(outputs: list[Tensor], x: Tensor, site: Site, add: Adder) -> None:
    """To the outputs the site computes: one of q, k, v; gate and value; or the only one."""
    rule: Any = site.rule
    if len(outputs) == 1:
        outputs[0] = add(site, outputs[0], x)
    elif len(rule.parts) == 1:
        which = [name.rpartition(".")[2] for name in QKV].index(site.attribute)
        outputs[which] = add(site, outputs[which], x)
    else:  # stored part i is output parts[i]
        whole = add(site, join_columns(tuple(outputs[i] for i in rule.parts)), x)
        for i, part in zip(rule.parts, column_blocks(whole, len(rule.parts)), strict=True):
            outputs[i] = part
