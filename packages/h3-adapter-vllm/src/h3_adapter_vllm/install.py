"""Put the contracts behind a real vLLM-Omni MiniMax-H3, and take them off again."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from h3_kernels.audit import AuditRow
from h3_kernels.binding import Ran, Report
from h3_kernels.collectives import Collective
from h3_kernels.contract import UNITS, parallel_id
from h3_kernels.errors import ProviderError
from h3_kernels.modes import DEFAULT_SCOPE, ENVIRONMENT_VARIABLE, Mode, Scope, eager, resolve_mode
from h3_kernels.providers import choose, unknown_provider
from torch import nn
from torch.utils.hooks import RemovableHandle

from h3_adapter_vllm.errors import InstallError, RemoveError
from h3_adapter_vllm.graph_binding import GraphBinding
from h3_adapter_vllm.graph_call import graph_obstacles
from h3_adapter_vllm.group import join_group
from h3_adapter_vllm.linear_binding import LinearBinding
from h3_adapter_vllm.report import gemm_call
from h3_adapter_vllm.settings import Settings
from h3_adapter_vllm.survey import Site, find_sites, obstacles
from h3_adapter_vllm.weights import tensor_obstacles

logger = logging.getLogger(__name__)

_HANDLE = "_h3_handle"  # where a model keeps its handle
_PROBE_ROWS = (1, 1024)  # rows of the calls by which providers are chosen before anything is changed


class Handle:
    """An installed model. Use it as a context manager, or call :meth:`remove`."""

    def __init__(
        self, model: nn.Module, bindings: Sequence[LinearBinding | GraphBinding], settings: Settings
    ):
        self._model = model
        self._bindings = tuple(bindings)
        self.settings = settings
        self._hook: RemovableHandle | None = None

    @property
    def mode(self) -> Mode:
        """The mode in force; ``H3_MODE`` may have overridden the argument."""
        return self.settings.mode

    @property
    def installed(self) -> bool:
        """False after :meth:`remove`, and always in mode off."""
        return vars(self._model).get(_HANDLE) is self

    @property
    def linears(self) -> dict[str, Any]:
        """The engine's layers that hold a contract method, by name in the bare model."""
        return {
            n: s.layer for b in self._bindings if isinstance(b, LinearBinding) for n, s in b.sites.items()
        }

    def report(self) -> Report:
        """Every node as Bound, External or Refused, read back from the last forward. Waits for the device in audit."""
        report = Report(self.settings.title("rollout"))
        bindings = self._bindings
        if self.mode is Mode.STRICT and self.settings.scope is Scope.MODEL:
            bindings = bindings[1:]  # the graph computes the linears too
        for binding in bindings:
            for name, state in binding.nodes():
                report.add(name, state)
        return report

    def audit(self) -> list[AuditRow]:
        """Per linear, in forward order, what audit mode has seen; empty in other modes. Waits for the device."""
        return [row for binding in self._bindings for row in binding.audit()]

    def matches(self, settings: Settings) -> bool:
        """Whether an install with ``settings`` would give this handle's bindings."""
        collective = settings.collective or self.settings.collective
        return (
            dataclasses.replace(settings, collective=collective, clock=self.settings.clock) == self.settings
        )

    def lost(self) -> list[str]:
        """What no longer holds our code since something else replaced it: names of linears, or ``forward``."""
        return [name for binding in self._bindings for name in binding.lost()]

    def bind(self) -> None:
        """Put everything in place; :func:`install_h3_rollout` has done so."""
        for binding in self._bindings:
            binding.bind()
        self._hook = self._model.register_forward_pre_hook(self._count_forward)
        vars(self._model)[_HANDLE] = self

    def remove(self) -> None:
        """Restore the engine's own quant methods, reductions, LoRA path and forward. A second call does nothing.

        Raises RemoveError, after restoring the rest, if something was replaced since: whoever replaced it owns it.
        """
        if not self.installed or self._hook is None:
            return
        del vars(self._model)[_HANDLE]
        self._hook.remove()
        foreign = [name for binding in reversed(self._bindings) for name in binding.restore()]
        if foreign:
            raise RemoveError(
                f"{len(foreign)} bindings were replaced by something else after the install and left as they are "
                f"(first: {foreign[0]}); the others are restored"
            )

    @eager
    def _count_forward(self, *_: Any) -> None:
        self.settings.clock.forwards += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def install_h3_rollout(
    model: nn.Module,
    *,
    mode: Mode | str = Mode.STRICT,
    collective: Collective | None = None,
    tp: int | None = None,
    contract: str = parallel_id(UNITS),
    provider: str = "auto",
    attention: str = "auto",
    scope: Scope | str = DEFAULT_SCOPE,
) -> Handle:
    """Make a vLLM-Omni ``MiniMaxH3DiTModel`` compute the contracts.

    Nothing is changed unless everything can be bound. Installing again with the same arguments returns the same
    handle. The weights may change afterwards (``load_weights`` again, weight sync): they are read at every call. At
    tp > 1 every rank of the group must call this, with the same arguments.

    Args:
        model: A vLLM-Omni ``MiniMaxH3DiTModel`` with its bf16 weights loaded, LoRA-wrapped or not. On a CPU it must be
            installed before ``process_weights_after_loading``, which drops the weights there.
        mode: strict, audit or off (nothing is touched). The environment variable ``H3_MODE`` overrides it.
        collective: Sums the fp32 partial results of row-parallel linears over the tp group; by default one over
            vLLM's own tp group.
        tp: Expected tensor-parallel degree; by default what the layers were built for.
        contract: Row-parallel contract id, "h3-parallel-v1-u8" unless a cheaper promise is enough. The trainer must
            state the same.
        provider: A provider of h3-kernels by name, or "auto".
        attention: In scope "model", a provider of ``h3_kernels.attention_providers`` by name, or "auto". On CUDA each
            has its own bits, so name one where the trainer's installation offers another.
        scope: "model" binds every node: the graph of h3-kernels runs in the place of the engine's forward.
            "projections" binds every linear, "linears" ``attn.qkv_proj``, ``attn.out_proj``, ``mlp.fc1`` and
            ``mlp.fc2`` of every block. The trainer must be bound to the same.

    Raises:
        InstallError: With every reason: missing modules, quantised, packed or wrong-dtype weights, an unsupported tp or
            provider, a patch or fusion that would bypass the contracts, an earlier install that differs.
        ModeError: ``mode`` or ``H3_MODE`` is not one of the three words.
    """
    scope = Scope(scope)
    mode = resolve_mode(None if os.environ.get(ENVIRONMENT_VARIABLE) else mode)
    sites = [] if mode is Mode.OFF else find_sites(model, scope)
    degree = tp if tp is not None else sites[0].layer.tp_size if sites else 1
    rank = sites[0].layer.tp_rank if sites else 0
    group = collective if degree > 1 else None
    settings = Settings(
        mode=mode,
        scope=scope,
        contract=contract,
        provider=provider,
        attention=attention,
        tp=degree,
        rank=rank,
        collective=group,
    )
    if mode is Mode.OFF:
        return Handle(model, [LinearBinding(model, [], settings)], settings)
    earlier = _earlier(model, sites, settings)
    if earlier is not None:
        return earlier
    reasons = settings.obstacles() or obstacles(sites, contract=contract, tp=degree)
    reasons = reasons or _provider_obstacles(sites, settings)
    if scope is Scope.MODEL and not reasons:
        reasons = [*tensor_obstacles(model), *graph_obstacles(model, settings)]
    settings, reasons = join_group(settings, sites[0].layer.weight.device, reasons)
    if reasons:
        raise InstallError(reasons)
    handle = Handle(model, _bindings(model, sites, settings), settings)
    handle.bind()
    logger.info("h3 contracts bound to %s: %s", type(model).__name__, settings.describe())
    return handle


def _bindings(model: nn.Module, sites: list[Site], settings: Settings) -> list[LinearBinding | GraphBinding]:
    """Scope ``model`` binds the linears too: a module that is called by itself computes the contract all the same, and
    the engine packs no weight away under the graph."""
    bindings: list[LinearBinding | GraphBinding] = [LinearBinding(model, sites, settings)]
    if settings.scope is Scope.MODEL:
        bindings.append(GraphBinding(model, settings))
    return bindings


def handle_of(model: nn.Module) -> Handle | None:
    """The handle of an installed model, or None."""
    handle: Handle | None = vars(model).get(_HANDLE)
    return handle


def _earlier(model: nn.Module, sites: list[Site], settings: Settings) -> Handle | None:
    """The handle of an earlier identical install. Raises InstallError for a different or a damaged one."""
    handle = handle_of(model)
    if handle is not None and not handle.matches(settings):
        how = handle.settings.describe()
        raise InstallError([f"already installed with other arguments ({how}); remove() that handle first"])
    ours = [site.name for site in sites if site.method is not None]
    if handle is None and not ours:
        return None
    lost = ["the handle"] if handle is None else handle.lost()
    if lost:
        raise InstallError(
            [f"half installed: {lost[0]} was replaced after the install; remove() the earlier handle first"]
        )
    return handle


def _provider_obstacles(sites: list[Site], settings: Settings) -> list[str]:
    """Choose providers for every linear, on its own device: what cannot be served is known before the install."""
    unknown = unknown_provider(settings.provider, sites[0].layer.weight.device.type)
    if unknown is not None:
        return [unknown]
    reasons = []
    for site in sites:
        device = site.layer.weight.device
        calls = [gemm_call(site, settings, Ran(0, rows, device, k_contiguous=True)) for rows in _PROBE_ROWS]
        try:
            for call in calls:
                choose(call, settings.provider, device)
        except ProviderError as error:
            reasons.append(f"{site.name} (weight on {device}): {error}")
    return reasons
