"""Put the contracts behind a real Diffusers MiniMax-H3, and take them off again."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from h3_kernels.audit import AuditRow
from h3_kernels.binding import Report
from h3_kernels.contract import UNITS, parallel_id
from h3_kernels.graph import Tracer
from h3_kernels.logical_keys import LogicalKeys
from h3_kernels.modes import DEFAULT_SCOPE, ENVIRONMENT_VARIABLE, Mode, Scope, eager, resolve_mode
from torch import Tensor, nn

from h3_adapter_diffusers.errors import BoundModelError, InstallError, RemoveError
from h3_adapter_diffusers.graph_binding import GraphBinding
from h3_adapter_diffusers.group import disagreements
from h3_adapter_diffusers.linear_binding import LinearBinding
from h3_adapter_diffusers.overlays import Replacement
from h3_adapter_diffusers.report import linear_report
from h3_adapter_diffusers.settings import Settings
from h3_adapter_diffusers.tensor_parallel import TensorParallel

logger = logging.getLogger(__name__)

_HANDLE = "_h3_handle"  # where a model keeps its handle

Overlay = str | Iterable[str] | Mapping[str, Replacement]


class Handle:
    """An installed model. Use it as a context manager, or call `remove`."""

    def __init__(self, model: nn.Module, settings: Settings, binding: LinearBinding | GraphBinding) -> None:
        self._model: Any = model
        self.settings = settings
        self._binding = binding
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(self._after_forward, always_call=True),
        ]
        vars(model)[_HANDLE] = self
        binding.bind()

    @property
    def mode(self) -> Mode:
        """The mode in force; `H3_MODE` may have overridden the argument."""
        return self.settings.mode

    @property
    def installed(self) -> bool:
        """False after `remove`."""
        return vars(self._model).get(_HANDLE) is self

    def report(self) -> Report:
        """Every node as Bound, External or Refused, read back from the last forward. Waits for the device in
        audit."""
        if isinstance(self._binding, LinearBinding):
            return linear_report(self._model, self._binding, self.settings)
        report = Report(self.settings.title("training"))
        for name, state in self._binding.nodes():
            report.add(name, state)
        return report

    def audit(self) -> list[AuditRow]:
        """Per node, in forward order, what audit mode has seen; empty in other modes. Waits for the
        device."""
        return self._binding.audit()

    @contextmanager
    def rows(self, keys: Mapping[str, Tensor]) -> Iterator[None]:
        """Give the rows of the forwards in the block their logical keys, by row set (`PackedSequence.keys`).

        Weight gradients then sum over rows in ascending key order, whatever the packing. The keys of a
        forward stay with it: they hold for its backward, and for recomputation under
        `enable_gradient_checkpointing`, after the block has ended. Raises LogicalKeysError if a key repeats
        or the number of rows does not fit. In scope `model` the packed rows' keys say those of the others.
        """
        device = next(self._model.parameters()).device
        named = ["packed"] if self.settings.scope is Scope.MODEL and "packed" in keys else list(keys)
        with self.settings.ring.using({name: LogicalKeys(keys[name].to(device)) for name in named}):
            yield

    @contextmanager
    def trace(self, tracer: Tracer) -> Iterator[None]:
        """Let `tracer` (`h3_kernels.trace.Recorder`) see every node of the forwards in the block.

        Raises BoundModelError in a scope other than `model`: only there is every node ours to watch.
        """
        with self._graph().tracing(tracer):
            yield

    def fingerprint(self, *, weights: bool = False, **facts: str | int | float) -> dict[str, Any]:
        """What another run must share before its trace may be compared (`h3_kernels.trace.fingerprint`).

        `weights` digests every base parameter; `facts` are what else must agree. Raises BoundModelError in a
        scope other than `model`.
        """
        return self._graph().fingerprint(weights=weights, **facts)

    def _graph(self) -> GraphBinding:
        if isinstance(self._binding, LinearBinding):
            raise BoundModelError(
                f"scope {self.settings.scope} binds linears, so there is no graph to trace; install with scope='model'"
            )
        return self._binding

    def remove(self) -> None:
        """Restore Diffusers' own forwards. A second call does nothing.

        Raises RemoveError, after restoring the rest, if a hook was put over a bound module since the install.
        """
        if not self.installed:
            return
        del vars(self._model)[_HANDLE]
        for hook in self._hooks:
            hook.remove()
        foreign = self._binding.remove()
        if foreign:
            raise RemoveError(
                f"{len(foreign)} modules were hooked after the install and left as they are (first: {foreign[0]});"
                " remove offload, casting and context parallel hooks before the contracts"
            )

    @eager
    def _before_forward(self, *_: Any) -> None:
        self.settings.clock.forwards += 1
        if self.mode is Mode.STRICT and torch.is_autocast_enabled(next(self._model.parameters()).device.type):
            raise BoundModelError(
                "torch.autocast is on around the model: it would round tensors at places the contracts do not name;"
                " load the checkpoint's own dtypes (bf16, twelve tensors fp32) and call the model without autocast"
            )
        if self.mode is Mode.STRICT:
            self._refuse_context_parallel()
        self._binding.bind()
        self.settings.clock.inside += 1

    @eager
    def _after_forward(self, *_: Any) -> None:
        # torch calls this also when a forward was refused before it began.
        self.settings.clock.inside = max(0, self.settings.clock.inside - 1)

    def _refuse_context_parallel(self) -> None:
        """Diffusers' own: each rank runs some rows. The forward keeps its bits; a weight's gradient would
        not."""
        config = getattr(self._model, "_parallel_config", None)
        if getattr(config, "context_parallel_config", None) is None:
            return
        if self.settings.scope is Scope.MODEL:
            raise BoundModelError(
                "Diffusers' context parallelism hooks modules that scope='model' does not call; install with"
                " scope='projections'"
            )
        if torch.is_grad_enabled() and any(p.requires_grad for p in self._model.parameters()):
            raise BoundModelError(
                "under context parallelism each rank's weight gradients cover its own rows, and whatever adds them up"
                " keeps no order: run it without gradients, or train without it"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def install_h3_training(
    model: nn.Module,
    *,
    mode: Mode | str = Mode.STRICT,
    overlay: Overlay | None = None,
    tp: TensorParallel | None = None,
    contract: str = parallel_id(UNITS),
    provider: str = "auto",
    attention: str = "auto",
    scope: Scope | str = DEFAULT_SCOPE,
) -> Handle:
    """Make a `MiniMaxH3Transformer3DModel` compute the contracts, forward and backward.

    Parameters, names and state dicts do not change, and PEFT LoRA may be added before or after. Nothing is
    changed unless everything can be bound. Installing again with the same arguments returns the same handle.

    Args:
        model: The model, its weights loaded, in the checkpoint's dtypes or wholly in fp32.
        mode: strict, audit or off (nothing is touched). The environment variable `H3_MODE` overrides it.
        overlay: Nodes left on Diffusers' arithmetic, to learn what each one costs or which one breaks
            parity: names or shell patterns of names, as the report lists them. In scope `model` also a
            mapping from names to replacements `f(strict, *inputs) -> outputs` (`h3_kernels.graph.Settings`).
        tp: The result of `tensor_parallel.shard`, if the model is sharded. Every rank of its group must then
            install, with the same arguments.
        contract: Row-parallel contract id. The rollout must state the same.
        provider: A provider of h3-kernels by name, or "auto".
        attention: In scope `model`, a provider of `h3_kernels.attention_providers` by name, or "auto". On CUDA
            each has its own bits, so name one where the rollout's installation offers another.
        scope: "model" binds every node: the graph of h3-kernels runs in the place of Diffusers' forward.
            "projections" binds every linear, "linears" the six of every block. The rollout must be bound to the
            same.

    Raises:
        InstallError: With every reason: missing modules, quantised or wrong-dtype weights, foreign sharding
            or hooks, adapters the rollout could not serve, an earlier install that differs.
        ModeError: `mode` or `H3_MODE` is not one of the three words.
    """
    settings = Settings(
        mode=resolve_mode(None if os.environ.get(ENVIRONMENT_VARIABLE) else mode),
        contract=contract,
        tp=1 if tp is None else tp.size,
        rank=0 if tp is None else tp.rank,
        collective=None if tp is None else tp.collective,
        provider=provider,
        attention=attention,
        scope=Scope(scope),
    )
    earlier = handle_of(model)
    if earlier is not None:
        if earlier.settings.describe() == settings.describe() and not overlay:
            return earlier
        raise InstallError(
            [
                f"already installed with other arguments ({earlier.settings.describe()}); remove() that handle first"
            ]
        )
    binding = _agreed_binding(model, settings, overlay, tp)
    handle = Handle(model, settings, binding)
    logger.info("h3 contracts bound to %s: %s", type(model).__name__, settings.describe())
    return handle


def handle_of(model: nn.Module) -> Handle | None:
    """The handle of an installed model, or None."""
    handle: Handle | None = getattr(model, "__dict__", {}).get(_HANDLE)  # None has no __dict__
    return handle


def _agreed_binding(
    model: nn.Module, s: Settings, overlay: Overlay | None, tp: TensorParallel | None
) -> LinearBinding | GraphBinding:
    """The binding, if every rank of the group makes the same one. Raises InstallError otherwise."""
    found, reasons = None, []
    try:
        found = _binding(model, s, overlay)
    except InstallError as error:
        reasons = list(error.reasons)
    kept = overlay if isinstance(overlay, str) else sorted(overlay or ())
    reasons += disagreements(tp, f"{s.describe()}, overlay={kept}", reasons)
    if found is None or reasons:
        raise InstallError(reasons)
    return found


def _binding(model: nn.Module, s: Settings, overlay: Overlay | None) -> LinearBinding | GraphBinding:
    if s.mode is Mode.OFF:  # nothing is touched: the linears are only listed
        return LinearBinding(model, dataclasses.replace(s, scope=Scope.PROJECTIONS), ())
    reasons = s.obstacles()
    if reasons:
        raise InstallError(reasons)
    if s.scope is Scope.MODEL:
        replaced = overlay if isinstance(overlay, Mapping) else dict.fromkeys(_names(overlay))
        return GraphBinding(model, s, replaced)
    if isinstance(overlay, Mapping):
        raise InstallError([f"scope {s.scope} takes names in overlay; replacements need scope='model'"])
    return LinearBinding(model, s, _names(overlay))


def _names(overlay: str | Iterable[str] | None) -> tuple[str, ...]:
    return (overlay,) if isinstance(overlay, str) else tuple(overlay or ())
