"""The report of an installed model, read back from what ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from h3_kernels.binding import Binding, Bound, External, Ran, Refused, Style, served
from h3_kernels.contract import parse_parallel_id
from h3_kernels.errors import ProviderError
from h3_kernels.lora import LoraSlice
from h3_kernels.providers import GemmCall, capability, choose
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA

from h3_adapter_vllm.bindings import EngineNode
from h3_adapter_vllm.lora import active_slices
from h3_adapter_vllm.method import ContractMethod
from h3_adapter_vllm.settings import Settings
from h3_adapter_vllm.survey import Site, forward_nodes, module_at


def linear_nodes(
    model: nn.Module, sites: Mapping[str, Site], settings: Settings
) -> Iterator[tuple[str, Binding]]:
    """Every node of the engine's forward, in order, with what serves it.

    A linear is Bound only if it holds our method and ran in the model's last forward; otherwise the reason is given.
    """
    for name, node in forward_nodes(model):
        if name in sites:
            yield from _linear_and_lora(module_at(model, name), sites[name], settings)
        elif not isinstance(node, EngineNode):
            yield name, External(node.operator)
        elif not node.optional or _exists(model, name):
            yield name, External(_operator(model, name, node))


def _exists(model: nn.Module, name: str) -> bool:
    parent, _, leaf = name.rpartition(".")
    return getattr(module_at(model, parent), leaf, None) is not None


def _operator(model: nn.Module, name: str, node: EngineNode) -> str:
    if node.operator != "{attention}":
        return node.operator
    return f"{module_at(model, name).attn_backend.get_name()} attention"


def _linear_and_lora(module: Any, site: Site, settings: Settings) -> Iterator[tuple[str, Binding]]:
    binding = _linear(getattr(module, "base_layer", module), site, settings)
    yield site.name, binding
    slices = active_slices(module) if isinstance(module, BaseLayerWithLoRA) else []
    if slices and isinstance(binding, Bound):
        yield f"{site.name}.lora", bound_lora(site, slices, settings, site.layer.quant_method.ran)
    elif slices:
        yield f"{site.name}.lora", External(f"vLLM-Omni {type(module).__name__}")


def _linear(layer: Any, site: Site, settings: Settings) -> Binding:
    if layer is not site.layer:
        return Refused("the module was replaced after the install: remove() and install again")
    method = layer.quant_method
    if not isinstance(method, ContractMethod) or method.settings is not settings:
        return Refused(f"its quant method was replaced by a {type(method).__name__} after the install")
    if method.ran is None:
        return Refused("has not run since the install: run a forward first")
    if method.ran.forward < settings.clock.forwards:
        return Refused("did not run in the last forward: something bypasses its quant method")
    contract = site.rule.contract(settings.contract)
    if method.auditor is not None:
        row = method.auditor.row(site.name)
        return External(
            f"{site.rule.operator}; {row.differing} of {row.compared} values differ from {contract}"
        )
    return bound_linear(site, settings, method.ran)


def bound_linear(site: Site, settings: Settings, ran: Ran) -> Binding:
    """What served the call ``ran``."""
    contract = site.rule.contract(settings.contract)
    return served(contract, gemm_call(site, settings, ran), ran.device, settings.provider)


def bound_lora(site: Site, slices: Sequence[LoraSlice], settings: Settings, ran: Ran) -> Binding:
    """The providers of a LoRA term's products: A's of all slices at once, then B's of each."""
    base = replace(gemm_call(site, settings, ran), has_bias=False)
    calls = [replace(base, n=sum(len(s.a) for s in slices))]
    expand = replace(base, units=1, out_dtype=torch.float32, a_layout="k")
    calls += [replace(expand, n=s.b.shape[0], k=s.b.shape[1]) for s in slices]
    try:
        names = {choose(call, settings.provider, ran.device).name for call in calls}
    except ProviderError as error:
        return Refused(str(error))
    return Bound(site.rule.contract(settings.contract), " and ".join(sorted(names)))


def gemm_call(site: Site, settings: Settings, ran: Ran) -> GemmCall:
    """The GEMM a bound linear asks its providers for, on this rank."""
    reduced = site.rule.style is Style.ROW and settings.tp > 1
    n, k = site.layer.weight.shape
    dtype = site.layer.weight.dtype
    return GemmCall(
        m=ran.rows,
        n=n,
        k=k,
        units=parse_parallel_id(settings.contract) // settings.tp if site.rule.style is Style.ROW else 1,
        a_dtype=dtype,
        out_dtype=torch.float32 if reduced else dtype,
        a_layout="k" if ran.k_contiguous else "m",
        b_layout="k",
        has_bias=site.layer.bias is not None and not reduced,
        device_type=ran.device.type,
        capability=capability(ran.device),
    )
