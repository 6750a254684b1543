"""Scopes `linears` and `projections`: the callables that replace the forwards of single linears."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from h3_kernels.audit import AuditRow
from h3_kernels.binding import Binding, Bound, External, Ran, Refused, Style, served
from h3_kernels.contract import parse_parallel_id
from h3_kernels.errors import ProviderError
from h3_kernels.modes import Mode, Scope
from h3_kernels.providers import GemmCall, capability, choose, unknown_provider
from torch import nn

from h3_adapter_diffusers.bindings import BLOCK_LISTS
from h3_adapter_diffusers.checkpointing import KeyedCheckpointing
from h3_adapter_diffusers.errors import BoundModelError, InstallError
from h3_adapter_diffusers.lora import ContractLora, is_wrapper, wrapper_obstacle
from h3_adapter_diffusers.method import ContractForward
from h3_adapter_diffusers.settings import Settings
from h3_adapter_diffusers.survey import Site, find_sites, obstacles, wrapper_obstacles

_PROBE_ROWS = 1024  # rows of the call by which providers are chosen before anything is changed


class LinearBinding:
    """The bound linears of one model.

    Raises InstallError, with nothing changed, if one of them can not be bound or an overlay pattern names
    none.
    """

    def __init__(self, model: nn.Module, settings: Settings, overlay: tuple[str, ...]) -> None:
        self._model = model
        self._settings = settings
        self._overlay = overlay
        self._sites = {site.name: site for site in find_sites(model)}
        self._forwards: dict[str, ContractForward] = {}
        self._loras: dict[str, ContractLora] = {}
        self._fused = fused_flags(model)
        self._present: list[nn.Module | None] = []
        reasons = self._overlay_obstacles()
        if settings.mode is not Mode.OFF:
            wanted = [site for site in self._sites.values() if self._wants(site)]
            reasons += obstacles(model, wanted, contract=settings.contract, tp=settings.tp)
            reasons += wrapper_obstacles(wanted) if settings.mode is Mode.STRICT else []
            reasons = reasons or provider_obstacles(wanted, settings)
        if reasons:
            raise InstallError(reasons)
        self._checkpointing = KeyedCheckpointing(model, settings.ring)

    def bind(self) -> None:
        """Bind what is there now: linears not bound yet, LoRA wrappers added since, fused projections."""
        if self._settings.mode is Mode.OFF:
            return
        self._checkpointing.refresh()
        self._refuse_partial_gradients()
        if fused_flags(self._model) != self._fused:
            self._resurvey()
        present = [site.parent._modules[site.attribute] for site in self._sites.values()]
        if present == self._present:  # by identity; the whole hook takes 0.1 ms at 50 blocks
            return
        self._present = present
        for name, site in self._sites.items():
            if self._wants(site):
                self._bind_linear(name, site)
                self._bind_wrapper(name, site)

    def nodes(self) -> Iterator[tuple[str, Binding]]:
        """What serves each linear and each LoRA term, read back from the last forward."""
        for name, site in self._sites.items():
            yield name, self._linear(site)
            lora = self._lora(site)
            if lora is not None:
                yield f"{name}.lora", lora

    def audit(self) -> list[AuditRow]:
        """What audit mode has seen, per linear."""
        return [f.auditor.row(name) for name, f in self._forwards.items() if f.auditor is not None]

    def remove(self) -> list[str]:
        """Restore Diffusers' forwards; the names of those that something else has taken since."""
        self._checkpointing.remove()
        foreign = [name for name, lora in self._loras.items() if not restore(lora.wrapper, lora)]
        return foreign + [name for name, f in self._forwards.items() if not restore(f.linear, f)]

    def _wants(self, site: Site) -> bool:
        if site.rule.boundary and self._settings.scope is Scope.LINEARS:
            return False
        return not any(fnmatchcase(site.name, pattern) for pattern in self._overlay)

    def _overlay_obstacles(self) -> list[str]:
        names = list(self._sites)
        unmatched = [p for p in self._overlay if not any(fnmatchcase(name, p) for name in names)]
        return [
            f"overlay {pattern!r} names no linear of the model; report() lists them" for pattern in unmatched
        ]

    def _refuse_partial_gradients(self) -> None:
        """A rank sees its own heads only, and torch's norm knows nothing of the others."""
        if self._settings.tp == 1 or not torch.is_grad_enabled():
            return
        block: Any = next(iter(self._model.transformer_blocks))  # type: ignore[arg-type]
        if block.attn.norm_q.weight.requires_grad or block.attn.norm_k.weight.requires_grad:
            raise BoundModelError(
                f"tp={self._settings.tp} in scope {self._settings.scope} leaves norm_q and norm_k to torch, whose"
                " gradients would cover this rank's heads only: freeze them, or install with scope='model'"
            )

    def _bind_linear(self, name: str, site: Site) -> None:
        forward = self._forwards.get(name)
        if forward is None:
            self._forwards[name] = ContractForward(name, site.rule, site.linear, self._settings)
            vars(site.linear)["forward"] = self._forwards[name]
        elif forward.linear is not site.linear:
            raise BoundModelError(
                f"{name}: the module was replaced after the install; remove() and install again"
            )

    def _bind_wrapper(self, name: str, site: Site) -> None:
        wrapper, known = site.module, self._loras.get(name)
        if known is not None and known.wrapper is not wrapper:  # unloaded, or loaded anew
            restore(known.wrapper, self._loras.pop(name))
        if not is_wrapper(wrapper) or name in self._loras or self._settings.mode is not Mode.STRICT:
            return
        reason = wrapper_obstacle(wrapper)
        if reason is not None:
            raise BoundModelError(f"{name}: {reason}")
        self._loras[name] = ContractLora(name, site.rule, wrapper, self._settings)
        vars(wrapper)["forward"] = self._loras[name]

    def _resurvey(self) -> None:
        """`fuse_qkv_projections` or its inverse ran since the last forward."""
        sites = {site.name: site for site in find_sites(self._model)}
        s = self._settings
        fresh = [site for name, site in sites.items() if name not in self._sites and self._wants(site)]
        reasons = obstacles(self._model, fresh, contract=s.contract, tp=s.tp)
        if reasons:
            raise InstallError(reasons)
        for name in set(self._forwards) - set(sites):
            forward = self._forwards.pop(name)
            restore(forward.linear, forward)
        self._sites, self._fused = sites, fused_flags(self._model)

    def _linear(self, site: Site) -> Binding:
        s, forward = self._settings, self._forwards.get(site.name)
        if forward is None:
            kept = s.mode is not Mode.OFF and not (site.rule.boundary and s.scope is Scope.LINEARS)
            return External("torch linear" + (", kept by the overlay" if kept else ""))
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
        return served(contract, gemm_call(site, s, forward.ran), forward.ran.device, s.provider)

    def _lora(self, site: Site) -> Binding | None:
        if not is_wrapper(site.module):
            return None
        if site.name not in self._loras:
            return External(f"PEFT {type(site.module).__name__}")
        reason = wrapper_obstacle(site.module)
        return (
            Refused(reason) if reason else Bound(site.rule.contract(self._settings.contract), "the linear's")
        )


def fused_flags(model: nn.Module) -> tuple[bool, ...]:
    """Whether each attention runs `to_qkv` in the place of to_q, to_k and to_v."""
    lists: list[Any] = [model.get_submodule(name) for name in BLOCK_LISTS]
    return tuple(block.attn.fused_projections for blocks in lists for block in blocks)


def restore(module: nn.Module, ours: object) -> bool:
    """Delete our forward from the instance; False if something else sits there."""
    if vars(module).get("forward") is not ours:
        return False
    del vars(module)["forward"]
    return True


def provider_obstacles(sites: list[Site], s: Settings) -> list[str]:
    """Linears that no provider can serve: each is chosen once, on its device, so this is known before the
    install. A name that no provider has is one reason for all of them."""
    reasons: list[str] = []
    for site in sites:
        device = site.linear.weight.device
        assert isinstance(device, torch.device)
        unknown = unknown_provider(s.provider, device.type)
        if unknown is not None:
            return [unknown]
        try:
            choose(gemm_call(site, s, Ran(0, _PROBE_ROWS, device, k_contiguous=True)), s.provider, device)
        except ProviderError as error:
            reasons.append(f"{site.name} (weight on {device}): {error}")
    return reasons


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
        capability=capability(ran.device),
    )
