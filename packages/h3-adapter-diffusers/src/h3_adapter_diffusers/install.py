"""Put the contracts behind a real Diffusers MiniMax-H3, and take them off again."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, Self

import torch
from h3_kernels.audit import AuditRow
from h3_kernels.binding import Report
from h3_kernels.contract import UNITS, parallel_id
from h3_kernels.logical_keys import LogicalKeys
from h3_kernels.modes import Mode, resolve_mode
from torch import Tensor, nn

from h3_adapter_diffusers.bindings import BLOCK_LISTS, BOUNDARY
from h3_adapter_diffusers.checkpointing import KeyedCheckpointing
from h3_adapter_diffusers.errors import BoundModelError, InstallError, RemoveError
from h3_adapter_diffusers.lora import ContractLora, is_wrapper, wrapper_obstacle
from h3_adapter_diffusers.method import Clock, ContractForward, KeyRing, Settings
from h3_adapter_diffusers.report import build_report
from h3_adapter_diffusers.survey import Site, find_sites, obstacles
from h3_adapter_diffusers.tensor_parallel import TensorParallel

logger = logging.getLogger(__name__)

_HANDLE = "_h3_handle"  # where a model keeps its handle


class Handle:
    """An installed model. Use it as a context manager, or call `remove`."""

    def __init__(
        self, model: nn.Module, sites: list[Site], settings: Settings, overlay: tuple[str, ...]
    ) -> None:
        self._model: Any = model
        self._settings = settings
        self._overlay = overlay
        self._sites = {site.name: site for site in sites}
        self._forwards: dict[str, ContractForward] = {}
        self._loras: dict[str, ContractLora] = {}
        self._fused = _fused_flags(model)
        self._checkpointing = KeyedCheckpointing(model, settings.ring)
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, always_call=True),
        ]
        self._inside = 0
        vars(model)[_HANDLE] = self
        self._bind()

    @property
    def mode(self) -> Mode:
        """The mode in force; `H3_MODE` decides it when no argument was given."""
        return self._settings.mode

    @property
    def installed(self) -> bool:
        """False after `remove`."""
        return vars(self._model).get(_HANDLE) is self

    def report(self) -> Report:
        """Every node as Bound, External or Refused, read back from the last forward. Waits for the device in
        audit."""
        return build_report(self._model, self._sites, self._forwards, self._settings)

    def audit(self) -> list[AuditRow]:
        """Per linear, in forward order, what audit mode has seen; empty in other modes. Waits for the
        device."""
        forwards = self._forwards.items()
        return [f.auditor.row(name) for name, f in forwards if f.auditor is not None]

    @contextmanager
    def rows(self, keys: Mapping[str, Tensor]) -> Iterator[None]:
        """Give the rows of the forwards in the block their logical keys, by row set (`PackedSequence.keys`).

        Weight gradients then sum over rows in ascending key order, whatever the packing. The keys of a
        forward stay with it: they hold for its backward, and for recomputation under
        `enable_gradient_checkpointing`, after the block has ended. Raises LogicalKeysError if a key repeats
        or the number of rows does not fit.
        """
        with self._settings.ring.using({name: LogicalKeys(value) for name, value in keys.items()}):
            yield

    def remove(self) -> None:
        """Restore Diffusers' own forwards. A second call does nothing.

        Raises RemoveError, after restoring the rest, if a hook was put over a bound linear since the install.
        """
        if not self.installed:
            return
        del vars(self._model)[_HANDLE]
        for hook in self._hooks:
            hook.remove()
        self._checkpointing.remove()
        foreign = [name for name, lora in self._loras.items() if not _restore(lora.wrapper, lora)]
        foreign += [name for name, forward in self._forwards.items() if not _restore(forward.linear, forward)]
        if foreign:
            raise RemoveError(
                f"{len(foreign)} linears were hooked after the install and left as they are (first: {foreign[0]});"
                " remove offload, casting and context parallel hooks before the contracts"
            )

    def _bind(self) -> None:
        """Bind what is there now: linears not bound yet, LoRA wrappers added since, fused projections."""
        if self._settings.mode is Mode.OFF:
            return
        for name, site in self._sites.items():
            if _kept(site, self._overlay):
                continue
            self._bind_linear(name, site)
            self._bind_wrapper(name, site)

    def _bind_linear(self, name: str, site: Site) -> None:
        forward = self._forwards.get(name)
        if forward is not None and forward.linear is site.linear:
            return
        if forward is not None:
            raise BoundModelError(
                f"{name}: the module was replaced after the install; remove() and install again"
            )
        self._forwards[name] = ContractForward(name, site.rule, site.linear, self._settings)
        vars(site.linear)["forward"] = self._forwards[name]

    def _bind_wrapper(self, name: str, site: Site) -> None:
        wrapper, known = site.module, self._loras.get(name)
        if known is not None and known.wrapper is not wrapper:  # unloaded, or loaded anew
            _restore(known.wrapper, self._loras.pop(name))
        if not is_wrapper(wrapper) or name in self._loras or self._settings.mode is not Mode.STRICT:
            return
        reason = wrapper_obstacle(wrapper)
        if reason is not None:
            raise BoundModelError(f"{name}: {reason}")
        self._loras[name] = ContractLora(name, site.rule, wrapper, self._settings)
        vars(wrapper)["forward"] = self._loras[name]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, *_: Any) -> None:
        self._settings.clock.forwards += 1
        self._inside += 1
        if self._settings.mode is not Mode.STRICT:
            return
        device = next(self._model.parameters()).device.type
        if torch.is_autocast_enabled(device):
            raise BoundModelError(
                "torch.autocast is on around the model: it would round tensors at places the contracts do not name;"
                " load the checkpoint's own dtypes (bf16, twelve tensors fp32) and call the model without autocast"
            )
        if _fused_flags(self._model) != self._fused:
            self._resurvey()
        self._checkpointing.refresh()
        self._bind()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_forward(self, *_: Any) -> None:
        self._inside -= 1

    def _resurvey(self) -> None:
        """`fuse_qkv_projections` or its inverse ran since the last forward."""
        sites = {site.name: site for site in find_sites(self._model)}
        for name in set(self._forwards) - set(sites):
            forward = self._forwards.pop(name)
            _restore(forward.linear, forward)
        fresh = [site for name, site in sites.items() if name not in self._sites]
        s = self._settings
        reasons = obstacles(self._model, fresh, contract=s.contract, tp=s.tp)
        if reasons:
            raise InstallError(reasons)
        self._sites, self._fused = sites, _fused_flags(self._model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def install_h3_training(
    model: nn.Module,
    *,
    mode: Mode | str | None = None,
    overlay: str | Iterable[str] | None = None,
    tp: TensorParallel | None = None,
    contract: str = parallel_id(UNITS),
    provider: str = "auto",
) -> Handle:
    """Make the linears of a `MiniMaxH3Transformer3DModel` compute the contracts, forward and backward.

    Bound: to_q, to_k, to_v (or the fused to_qkv), to_out.0, ff.net.0.proj and ff.net.2 of every block, the
    patch, audio, text, time and AdaLN projections and both output heads, and PEFT LoRA around any of them,
    wrapped before or after. Parameters, names and state dicts do not change.

    `mode`: `strict` (the default, or what `H3_MODE` says), `audit` or `off` (`h3_kernels.modes`). `overlay`:
    names of linears (or shell patterns of names, or `boundary` for all outside attention and feed-forward)
    left on torch's linear, to learn what each one costs or which one breaks parity. `tp`: the result of
    `tensor_parallel.shard`, if the model is sharded. `contract`: row-parallel contract id, the rollout's.
    `provider`: name of one of `h3_kernels.providers`, or `auto`.

    Raises InstallError naming every obstacle, with nothing changed.
    """
    if vars(model).get(_HANDLE) is not None:
        raise InstallError(["the model already has the contracts; call remove() on its handle first"])
    resolved = resolve_mode(mode)
    settings = Settings(
        mode=resolved,
        contract=contract,
        tp=1 if tp is None else tp.size,
        rank=0 if tp is None else tp.rank,
        collective=None if tp is None else tp.collective,
        provider=provider,
        clock=Clock(),
        ring=KeyRing(),
    )
    patterns = (overlay,) if isinstance(overlay, str) else tuple(overlay or ())
    sites = find_sites(model)
    reasons = _overlay_obstacles(sites, patterns)
    if resolved is not Mode.OFF:
        kept = [site for site in sites if not _kept(site, patterns)]
        reasons += obstacles(model, kept, contract=contract, tp=settings.tp)
        wrapped = [(site.name, wrapper_obstacle(site.module)) for site in kept if is_wrapper(site.module)]
        reasons += [f"{name}: {reason}" for name, reason in wrapped if reason and resolved is Mode.STRICT]
    if reasons:
        raise InstallError(reasons)
    return Handle(model, sites, settings, patterns)


def _kept(site: Site, overlay: tuple[str, ...]) -> bool:
    """Whether the overlay leaves this linear on torch."""
    return any(
        site.rule.boundary if pattern == BOUNDARY else fnmatchcase(site.name, pattern) for pattern in overlay
    )


def _overlay_obstacles(sites: list[Site], overlay: tuple[str, ...]) -> list[str]:
    unmatched = [pattern for pattern in overlay if not any(_kept(site, (pattern,)) for site in sites)]
    return [f"overlay {pattern!r} names no linear of the model" for pattern in unmatched]


def _fused_flags(model: nn.Module) -> tuple[bool, ...]:
    lists: list[Any] = [model.get_submodule(name) for name in BLOCK_LISTS]
    blocks = [block for blocks in lists for block in blocks]
    return tuple(block.attn.fused_projections for block in blocks)


def _restore(module: nn.Module, ours: object) -> bool:
    """Delete our forward from the instance; False if something else sits there."""
    if vars(module).get("forward") is not ours:
        return False
    del vars(module)["forward"]
    return True
