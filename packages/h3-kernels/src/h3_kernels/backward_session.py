"""One reduction of dW and dbias over all microbatches, in ascending logical-key order.

Adding the rounded gradients of microbatches gives bits that depend on how the rows were cut into microbatches. A
session keeps the rows instead: each backward pass hands it (dy, x, keys), and leaving the session sorts the rows of
all microbatches by key and reduces each parameter once. It holds the activations and output gradients until then.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from h3_kernels.autograd import BIAS_GRAD, WEIGHT_GRAD
from h3_kernels.errors import SessionError
from h3_kernels.logical_keys import LogicalKeys


@dataclass(slots=True)
class _Use:
    """One linear's rows in one microbatch: dy [T, N] and x [T, K] once backward has run, None before."""

    keys: LogicalKeys
    dy: Tensor | None = None
    x: Tensor | None = None
    versions: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class _Parameter:
    weight: Tensor
    bias: Tensor | None
    provider: str
    uses: dict[int, _Use] = field(default_factory=dict)


@dataclass(slots=True)
class _Derived:
    """A leaf that stands for ``make(source)`` during the session."""

    source: Tensor
    make: Callable[[Tensor], Tensor]
    leaf: Tensor
    version: int


class BackwardSession:
    """Records the uses of every linear with trainable weight or bias, and reduces each once. See
    ``backward_session``.

    ``model``, if given, only lends its parameter names to messages.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._names = {} if model is None else {id(p): name for name, p in model.named_parameters()}
        self._parameters: dict[int, _Parameter] = {}
        self._bias_owners: dict[int, _Parameter] = {}
        self._derived: dict[tuple[int, str], _Derived] = {}
        self._finished = False
        # A session is a Python object that must see every call as it happens, even inside a compiled region. Wrapped
        # here and not at import: the wrapper loads the compiler, which would double the time this package takes.
        self.eagerly = torch.compiler.disable(_call)  # type: ignore[no-untyped-call]

    def expect(self, weight: Tensor, bias: Tensor | None, keys: LogicalKeys | None, provider: str) -> None:
        """A forward pass used ``weight`` on the rows of ``keys``; recomputing it under checkpointing is the same use.

        Raises SessionError without keys, if weight or bias is not a leaf, or if either appears in another pair.
        """
        self._check_open()
        if keys is None:
            raise SessionError(
                f"{self._name(weight)} is used in a backward session without logical_keys; pass LogicalKeys"
            )
        for t in (weight, bias):
            if t is not None and t.requires_grad and not t.is_leaf:
                raise SessionError(
                    f"{self._name(t)} is computed, not a leaf; its gradient cannot wait for the session"
                )
        parameter = self._parameters.setdefault(id(weight), _Parameter(weight, bias, provider))
        owner = self._bias_owners.setdefault(id(bias), parameter)
        if parameter.bias is not bias or (bias is not None and owner is not parameter):
            raise SessionError(
                f"{self._name(weight)} and its bias are shared with another linear in other pairs"
            )
        parameter.uses.setdefault(id(keys), _Use(keys))

    def derived(self, source: Tensor, make: Callable[[Tensor], Tensor], key: str) -> Tensor:
        """``make(source)`` for use as a weight: a leaf, the same at every call with this ``source`` and ``key``.

        A weight that is computed from a parameter (rounded from an fp32 master, scaled) is reduced once like any other,
        and its gradient passes through ``make`` to ``source.grad`` when the session ends. ``key`` says what ``make``
        does. A source that needs no gradient has ``make(source)`` itself.
        """
        self._check_open()
        if not source.requires_grad:
            return make(source)
        found = self._derived.get((id(source), key))
        if found is None:
            with torch.no_grad():
                leaf = make(source).detach().clone()
            found = _Derived(source, make, leaf.requires_grad_(), source._version)
            self._derived[id(source), key] = found
            self._names[id(found.leaf)] = self._name(source)
        return found.leaf

    def record(self, weight: Tensor, keys: LogicalKeys, dy: Tensor, x: Tensor) -> None:
        """Backward of one use: dy [T, N] and x [T, K]. Raises SessionError if this use was recorded before."""
        self._check_open()
        use = self._parameters[id(weight)].uses[id(keys)]
        if use.dy is not None:
            raise SessionError(
                f"{self._name(weight)} was used twice on the same LogicalKeys; "
                "keys are unique over all uses of a parameter"
            )
        use.dy, use.x, use.versions = dy.detach(), x.detach(), (dy._version, x._version)

    def validate_complete(self) -> None:
        """Raise SessionError, listing the parameters, if a use in a forward pass has had no backward pass."""
        missing = sorted(
            f"{self._name(p.weight)} ({use.keys.rows} rows)"
            for p in self._parameters.values()
            for use in p.uses.values()
            if use.dy is None
        )
        if missing:
            raise SessionError(
                f"{len(missing)} uses had a forward pass and no backward pass: {', '.join(missing)}"
            )

    def finish(self) -> None:
        """Reduce every parameter once and set its ``grad``; nothing is set unless every parameter can be reduced.

        Raises SessionError for a missing backward pass, a gradient that is already there, or rows changed in place
        since they were recorded; LogicalKeysError for an active key on two rows of one parameter.
        """
        self._check_open()
        self.validate_complete()
        for derived in self._derived.values():
            self._check_source(derived)
        reduced = [(p, *self._reduce(p)) for p in self._parameters.values()]
        for parameter, dw, db in reduced:
            if dw is not None:
                parameter.weight.grad = dw
            if parameter.bias is not None and db is not None:
                parameter.bias.grad = db
        for derived in self._derived.values():
            if derived.leaf.grad is not None:
                derived.make(derived.source).backward(derived.leaf.grad)  # type: ignore[no-untyped-call]
        self._parameters.clear()
        self._derived.clear()
        self._finished = True

    def _check_source(self, derived: _Derived) -> None:
        source = derived.source
        if source._version != derived.version:
            raise SessionError(f"{self._name(source)} was changed in place during the session")
        if source.grad is not None:
            raise SessionError(
                f"{self._name(source)} already has a gradient; clear it before the session (set_to_none)"
            )

    def _reduce(self, parameter: _Parameter) -> tuple[Tensor | None, Tensor | None]:
        weight, bias = parameter.weight, parameter.bias
        for t in (weight, bias):
            if t is not None and t.untyped_storage().nbytes() == 0 < t.numel():
                raise SessionError(
                    f"{self._name(t)} was freed or sharded during the session; keep parameters whole"
                )
            if t is not None and t.grad is not None:
                raise SessionError(
                    f"{self._name(t)} already has a gradient; clear it before the session (set_to_none)"
                )
        uses = list(parameter.uses.values())
        dy, x = (self._rows(weight, uses, name) for name in ("dy", "x"))
        keys = uses[0].keys if len(uses) == 1 else LogicalKeys(torch.cat([use.keys.keys for use in uses]))
        provider = parameter.provider
        dw = WEIGHT_GRAD(dy, x, keys.order, provider) if weight.requires_grad else None
        needs_bias = bias is not None and bias.requires_grad
        db = BIAS_GRAD(dy, keys.order, bias.dtype, provider) if needs_bias and bias is not None else None
        return dw, db

    def _rows(self, weight: Tensor, uses: list[_Use], name: str) -> Tensor:
        rows = []
        for use in uses:
            t: Tensor = getattr(use, name)
            if t._version != use.versions[name == "x"]:
                raise SessionError(
                    f"{name} of {self._name(weight)} was changed in place after backward; clone it first"
                )
            rows.append(t)
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _check_open(self) -> None:
        if self._finished:
            raise SessionError("this backward session has finished; open another for the next step")

    def _name(self, t: Tensor) -> str:
        return self._names.get(id(t)) or f"parameter {list(t.shape)}"


def _call(function: Callable[..., tuple[Tensor, ...]], *arguments: Any) -> tuple[Tensor, ...]:
    return function(*arguments)


_active: list[BackwardSession] = []


@contextmanager
def backward_session(model: nn.Module | None = None) -> Iterator[BackwardSession]:
    """Defer dW and dbias of every strict linear inside to one reduction, done when the block ends without an error.

    Every forward pass inside needs ``LogicalKeys``, one object per microbatch; dX flows as usual. Sessions do not
    nest. The session lives in eager mode: compiled regions fall back to it. Parameters must be whole and their
    gradients unset: sharded (FSDP) parameters free their storage before the session ends and are refused.
    """
    if _active:
        raise SessionError("a backward session is already open; sessions do not nest")
    session = BackwardSession(model)
    _active.append(session)
    try:
        yield session
        session.finish()
    finally:
        _active.remove(session)


def active_session() -> BackwardSession | None:
    """The session that is open, if any."""
    return _active[0] if _active else None
