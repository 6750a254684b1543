"""Tensor parallelism for the trainer's model, whose bits are those of one process.

Diffusers has no tensor-parallel plan for H3. `shard` cuts the linears of attention and feed-forward the way
the rollout engine does: heads and feed-forward features by rank, everything else whole on every rank. The
collective is the contract's tree in the forward of to_out.0 and ff.net.2 and in the input gradients of the
column-parallel linears.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from h3_kernels.binding import Style
from h3_kernels.collectives import Collective, TorchDistributedCollective
from h3_kernels.contract import TP_DEGREES
from torch import Tensor, nn

from h3_adapter_diffusers.bindings import LinearRule
from h3_adapter_diffusers.errors import InstallError
from h3_adapter_diffusers.lora import is_wrapper


@dataclass(frozen=True)
class TensorParallel:
    """This process's place in a tensor-parallel group, and how the group adds."""

    size: int
    rank: int
    collective: Collective
    group: Any = None
    """The torch process group; None is the default one."""


def shard(model: nn.Module, group: Any = None, *, form: Any = "gather") -> TensorParallel:
    """Keep this rank's share of every sharded linear of a whole, plain model; the parameters are replaced in
    place.

    `group` is a torch process group of 1, 2, 4 or 8 ranks (the default group if None); `form` the
    collective's (`h3_kernels.collectives`). Pass the result to `install_h3_training(tp=...)`. Add LoRA after
    sharding: its A or B is then created in the shard's shape. Raises InstallError, with nothing changed, if
    heads, features or units do not divide, or if the model is already wrapped.
    """
    from h3_adapter_diffusers.survey import find_sites

    collective = TorchDistributedCollective(group, form)
    size, rank = collective.world_size, collective.rank
    sites = [site for site in find_sites(model) if not site.rule.boundary]
    reasons = []
    for site in sites:
        linear: Any = site.linear
        if is_wrapper(site.module):
            reasons.append(f"{site.name}: already wrapped by LoRA; shard first, add LoRA after")
        cut = (
            linear.in_features
            if site.rule.style is Style.ROW
            else linear.out_features // len(site.rule.parts)
        )
        if cut % size:
            reasons.append(f"{site.name}: {cut} features do not divide by tp={size}")
    attentions: list[Any] = list({id(s.parent): s.parent for s in sites if s.attribute == "to_q"}.values())
    reasons += [f"{a.heads} heads do not divide by tp={size}" for a in attentions[:1] if a.heads % size]
    if size not in TP_DEGREES or reasons:
        raise InstallError(reasons or [f"tp={size} is not one of {TP_DEGREES}"])
    for site in sites:
        _cut(site.linear, site.rule, size, rank)
    for attention in attentions:
        attention.heads //= size
        attention.inner_dim //= size
    return TensorParallel(size, rank, collective, group)


def local_shard(weight: Tensor, rule: LinearRule, size: int, rank: int) -> Tensor:
    """This rank's share of a whole weight [N, K]: its columns, or its rows of each of the rule's parts."""
    if rule.style is Style.ROW:
        return weight.chunk(size, dim=1)[rank].contiguous()
    return torch.cat([part.chunk(size, dim=0)[rank] for part in weight.chunk(len(rule.parts), dim=0)])


def _cut(linear: Any, rule: LinearRule, size: int, rank: int) -> None:
    weight = linear.weight
    linear.weight = nn.Parameter(
        local_shard(weight.detach(), rule, size, rank), requires_grad=weight.requires_grad
    )
    linear.out_features, linear.in_features = linear.weight.shape
