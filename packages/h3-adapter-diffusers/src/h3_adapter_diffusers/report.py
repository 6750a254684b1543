"""The report of an installed model, read back from what ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from h3_kernels.binding import Binding, Bound, External, Refused, Report
from h3_kernels.contract import parse_parallel_id
from h3_kernels.errors import ProviderError
from h3_kernels.modes import Mode
from h3_kernels.providers import GemmCall, choose
from torch import nn

from h3_adapter_diffusers.bindings import (
    BLOCK_LISTS,
    EXTERNAL_AFTER,
    EXTERNAL_BEFORE,
    EXTERNAL_IN_BLOCK,
    EXTERNAL_IN_REFINER,
    Style,
)
from h3_adapter_diffusers.lora import ContractLora, is_wrapper, wrapper_obstacle
from h3_adapter_diffusers.method import ContractForward, Ran, Settings
from h3_adapter_diffusers.survey import Site


def build_report(
    model: nn.Module, sites: Mapping[str, Site], bound: Mapping[str, ContractForward], s: Settings
) -> Report:
    """Every node of the forward, in order, with what serves it.

    A linear is Bound only if it ran our callable in the model's last forward; otherwise the reason is given.
    """
    report = Report(
        f"h3 training, mode {s.mode}, {s.contract}, tp={s.tp} rank {s.rank}, {s.clock.forwards} forwards"
    )
    for name, operator in _external(model):
        report.add(name, External(operator))
    for name, site in sites.items():
        report.add(name, _linear(site, bound.get(name), s))
        lora = _lora(site, s)
        if lora is not None:
            report.add(f"{name}.lora", lora)
    report.nodes = dict(sorted(report.nodes.items(), key=lambda item: _place(item[0])))
    return report


def _external(model: Any) -> Iterator[tuple[str, str]]:
    yield from EXTERNAL_BEFORE.items()
    for blocks in BLOCK_LISTS:
        for index, block in enumerate(model.get_submodule(blocks)):
            backend = getattr(block.attn.processor, "_attention_backend", None)
            attention = f"{getattr(backend, 'value', backend) or 'native (torch SDPA)'} attention"
            nodes = EXTERNAL_IN_BLOCK if hasattr(block, "adaln_proj") else EXTERNAL_IN_REFINER
            for suffix, operator in nodes.items():
                yield f"{blocks}.{index}.{suffix}", operator.format(attention=attention)
    yield from EXTERNAL_AFTER.items()


_ORDER = (
    "adaln",
    "norm1",
    "to_qkv",
    "to_q",
    "to_k",
    "to_v",
    "qk_norm",
    "rope",
    "attention",
    "to_out",
    "norm2",
)


def _place(name: str) -> tuple[int, int, int]:
    """Sort key of a node: before the blocks, refiner blocks, blocks, after; then by its place in the
    block."""
    for group, blocks in enumerate(BLOCK_LISTS, start=1):
        if name.startswith(blocks + "."):
            index, _, suffix = name[len(blocks) + 1 :].partition(".")
            found = [i for i, part in enumerate(_ORDER) if part in suffix]
            tail = ("net.0", "act", "net.2", "residual")
            last = next((i for i, part in enumerate(tail) if part in suffix), len(tail))
            return group, int(index), found[0] if found else len(_ORDER) + last
    after = name.startswith(("norm_out", "proj_out", "audio_proj_out"))
    return (3 if after else 0), 0, 0


def _linear(site: Site, forward: ContractForward | None, s: Settings) -> Binding:
    if forward is None:
        return External("torch linear" + ("" if s.mode is Mode.OFF else ", kept by the overlay"))
    if forward.linear is not site.linear:
        return Refused("the module was replaced after the install: remove() and install again")
    if forward.ran is None:
        return Refused("has not run since the install: run a forward first")
    if forward.ran.forward < s.clock.forwards:
        return Refused("did not run in the last forward: something bypasses it")
    contract = site.rule.contract(s.contract)
    if forward.auditor is not None:
        row = forward.auditor.row(site.name)
        return External(f"torch linear; {row.differing} of {row.compared} values differ from {contract}")
    return _bound(contract, gemm_call(site, s, forward.ran), forward.ran.device, s.provider)


def _lora(site: Site, s: Settings) -> Binding | None:
    wrapper: Any = site.module
    if not is_wrapper(wrapper):
        return None
    if not isinstance(vars(wrapper).get("forward"), ContractLora):
        return External(f"PEFT {type(wrapper).__name__}")
    reason = wrapper_obstacle(wrapper)
    return Refused(reason) if reason else Bound(site.rule.contract(s.contract), "the linear's")


def _bound(contract: str, call: GemmCall, device: torch.device, wanted: str) -> Binding:
    """The provider `choose` gave this call; it remembers its choices, so this is the one that ran."""
    try:
        provider = choose(call, wanted, device)
    except ProviderError as error:
        return Refused(str(error))
    return Bound(contract, provider.name, provider.probe(call, device))


def gemm_call(site: Site, s: Settings, ran: Ran) -> GemmCall:
    """The GEMM a bound linear asks its providers for in the forward, on this rank."""
    linear: Any = site.linear
    tp = 1 if site.rule.boundary else s.tp
    row = site.rule.style is Style.ROW
    dtype = linear.weight.dtype
    return GemmCall(
        m=ran.rows,
        n=linear.out_features,
        k=linear.in_features,
        units=parse_parallel_id(s.contract) // tp if row else 1,
        a_dtype=dtype,
        out_dtype=torch.float32 if row and tp > 1 else dtype,
        a_layout="k" if ran.k_contiguous else "m",
        b_layout="k",
        has_bias=linear.bias is not None and not (row and tp > 1),
        device_type=ran.device.type,
        capability=torch.cuda.get_device_capability(ran.device) if ran.device.type == "cuda" else None,
    )
