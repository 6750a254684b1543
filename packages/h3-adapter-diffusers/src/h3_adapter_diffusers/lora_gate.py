"""The LoRA gradient gate: strict gradients of A and B against fp64 and against the provider, on the same
inputs.

One forward and backward of the model as it is records, for every LoRA wrapper, the activation that entered it
and the gradient that came back to its output. From those same tensors the gradients of A and B are then
computed three times: in fp64, by the provider (PEFT's arithmetic), and by the strict term; once more by the
strict term to see that it repeats, and once more with the rows permuted under logical keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from h3_kernels.contract import UNITS, parallel_id
from h3_kernels.logical_keys import LogicalKeys
from h3_kernels.modes import Mode, Scope
from torch import Tensor, nn
from torch.nn import functional

from h3_adapter_diffusers.bindings import LinearRule
from h3_adapter_diffusers.errors import InputError
from h3_adapter_diffusers.lora import LoraTerm, active_terms, add_term, is_wrapper
from h3_adapter_diffusers.settings import Settings
from h3_adapter_diffusers.survey import Site, find_sites

SLACK = 1.01
"""A strict error up to this multiple of the provider's counts as not worse. Both round the same products to
bf16; where they add in another order, single roundings fall either way. Measured on the small model: ratios
from 0.993 to 1.004."""


@dataclass(frozen=True, slots=True)
class GateRow:
    """One gradient: relative errors (Frobenius norm) to fp64, and whether the strict bits repeat and
    permute."""

    target: str
    matrix: str
    """A or B."""
    strict_error: float
    provider_error: float
    repeats: bool
    """Computed twice: the same bits."""
    permutes: bool
    """Computed with the rows permuted, under logical keys: the same bits."""

    @property
    def passed(self) -> bool:
        """Not worse than the provider, and deterministic."""
        return self.strict_error <= SLACK * self.provider_error and self.repeats and self.permutes


@dataclass(frozen=True, slots=True)
class GateReport:
    """All gradients of a gate run; `str()` is a table."""

    rows: tuple[GateRow, ...]

    @property
    def passed(self) -> bool:
        """Whether every row passed."""
        return all(row.passed for row in self.rows)

    def __str__(self) -> str:
        width = max(len(row.target) for row in self.rows)
        lines = [f"{'target':<{width}}  grad  strict    provider  repeats  permutes"]
        for r in self.rows:
            verdict = "" if r.passed else "  FAILED"
            lines.append(
                f"{r.target:<{width}}  {r.matrix:<4}  {r.strict_error:.2e}  {r.provider_error:.2e}"
                f"  {r.repeats!s:<7}  {r.permutes!s}{verdict}"
            )
        return "\n".join(lines)


@dataclass(slots=True)
class _Seen:
    """What passed through one wrapper: x [T, K], and dy [T, N] once backward has run."""

    x: Tensor
    dy: Tensor | None = None


def lora_gate(
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    targets: str = "*",
    contract: str = parallel_id(UNITS),
    provider: str = "auto",
    seed: int = 0,
) -> GateReport:
    """Run the gate on the LoRA wrappers of `model` whose names match the shell pattern `targets`.

    `model` must not be installed in scope `model`, where wrappers are not called. `loss()` runs one forward
    on it and returns the scalar to differentiate. `provider` names the strict provider, `seed` picks the
    permutation. Parameter gradients are left as `loss().backward()` leaves them.

    Raises InputError if no wrapper matches or one was not reached by the forward and the backward.
    """
    sites = [s for s in find_sites(model) if is_wrapper(s.module) and fnmatchcase(s.name, targets)]
    if not sites:
        raise InputError(f"no LoRA wrapper matches {targets!r}; add an adapter before the gate")
    seen = _record(sites, loss)
    missed = [site.name for site in sites if site.name not in seen or seen[site.name].dy is None]
    if missed:
        raise InputError(
            f"{len(missed)} wrappers saw no forward or no gradient (first: {missed[0]}); the loss must depend on"
            " them, and the model must not be installed in scope 'model'"
        )
    settings = Settings(
        mode=Mode.STRICT,
        scope=Scope.PROJECTIONS,
        contract=contract,
        provider=provider,
        attention="auto",
        tp=1,
        rank=0,
        collective=None,
    )
    return GateReport(tuple(row for site in sites for row in _rows(site, seen[site.name], settings, seed)))


def _record(sites: list[Site], loss: Callable[[], Tensor]) -> dict[str, _Seen]:
    seen: dict[str, _Seen] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if name not in seen and output.requires_grad:  # recomputation under checkpointing comes second
                seen[name] = _Seen(inputs[0].detach().flatten(0, -2))
            if name in seen and output.requires_grad:
                output.register_hook(lambda dy: setattr(seen[name], "dy", dy.detach().flatten(0, -2)))  # type: ignore[no-untyped-call]

        return hook

    hooks = [site.module.register_forward_hook(watch(site.name)) for site in sites]
    try:
        loss().backward()  # type: ignore[no-untyped-call]
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _rows(site: Site, seen: _Seen, s: Settings, seed: int) -> Iterator[GateRow]:
    assert seen.dy is not None
    rows = seen.x.shape[0]
    keys = torch.stack((torch.zeros(rows, dtype=torch.int64), torch.arange(rows)), dim=1).to(seen.x.device)
    place = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).to(seen.x.device)
    for term in active_terms(site.name, site.module, seen.x.dtype):
        ours = _strict(site.rule, s, term, seen.x, seen.dy, keys)
        again = _strict(site.rule, s, term, seen.x, seen.dy, keys)
        moved = _strict(site.rule, s, term, seen.x[place], seen.dy[place], keys[place])
        theirs, truth = _provider(term, seen.x, seen.dy), _truth(term, seen.x, seen.dy)
        for i, matrix in enumerate("AB"):
            yield GateRow(
                site.name,
                matrix,
                _error(ours[i], truth[i]),
                _error(theirs[i], truth[i]),
                repeats=_same(ours[i], again[i]),
                permutes=_same(ours[i], moved[i]),
            )


def _strict(rule: LinearRule, s: Settings, term: LoraTerm, x: Tensor, dy: Tensor, keys: Tensor) -> list[Any]:
    with torch.enable_grad():
        a, b = (t.detach().clone().requires_grad_() for t in (term.a, term.b))
        y = add_term(torch.zeros_like(dy), x, LoraTerm(a, b, term.scaling), rule, s, LogicalKeys(keys))
        return list(torch.autograd.grad(y, (a, b), dy))


def _provider(term: LoraTerm, x: Tensor, dy: Tensor) -> list[Any]:
    with torch.enable_grad():
        a, b = (t.detach().clone().requires_grad_() for t in (term.a, term.b))
        y = functional.linear(functional.linear(x, a), b) * term.scaling
        return list(torch.autograd.grad(y, (a, b), dy))


def _truth(term: LoraTerm, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    a, b, x, dy = (t.detach().double() for t in (term.a, term.b, x, dy))
    return term.scaling * ((dy @ b).t() @ x), term.scaling * (dy.t() @ (x @ a.t()))


def _error(gradient: Tensor, truth: Tensor) -> float:
    return float((gradient.double() - truth).norm() / truth.norm())


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
