"""Ranks around the nodes: gathered columns of column-parallel products, and Ulysses sequence parallelism.

Everything here copies bytes; no bit of a result depends on the number of ranks.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from h3_kernels.collectives.protocol import Collective
from h3_kernels.contract import row_range
from h3_kernels.errors import CollectiveError, InputError


class SequenceParallel(Protocol):
    """Rows of the packed sequence spread over ranks, heads exchanged around attention."""

    def shard(self, x: Tensor) -> Tensor:
        """This rank's rows of ``x`` [T, ...]."""
        ...

    def gather(self, x: Tensor, total: int) -> Tensor:
        """All ``total`` rows from every rank's."""
        ...

    def to_heads(self, x: Tensor, total: int) -> Tensor:
        """[T, heads / ranks, D] of this rank's heads, from its rows [t, heads, D]."""
        ...

    def to_rows(self, x: Tensor, total: int) -> Tensor:
        """The inverse of ``to_heads``."""
        ...


def gather_columns(y: Tensor, width: int, tp: int, collective: Collective | None) -> Tensor:
    """All ``width`` columns of a column-parallel product ``y`` [T, width / tp]; returns ``y`` if it has them.

    The backward takes this rank's columns of the gradient: what follows is the same on every rank. Raises
    InputError if the ranks' columns do not add up to ``width``.
    """
    if y.shape[1] == width:
        return y
    if collective is None or y.shape[1] * tp != width:
        raise InputError(
            f"a linear gave {y.shape[1]} columns of {width} at tp={tp}; check the weight's shard"
        )
    gathered: Tensor = _GatherColumns.apply(y, width, collective)  # type: ignore[no-untyped-call]
    return gathered


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, width: int, collective: Collective) -> Tensor:
        ctx.columns = row_range(width, collective.world_size, collective.rank)
        return collective.all_gather_rows(y.t().contiguous(), width).t().contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        start, stop = ctx.columns
        return grad[:, start:stop].contiguous(), None, None


def sum_gradient(weight: Tensor, tp: int, collective: Collective | None) -> Tensor:
    """``weight`` [D] in float32 for use on this rank's heads; its gradient is the canonical tree over the
    ranks' sums.
    """
    if tp == 1 or collective is None or not (weight.requires_grad and torch.is_grad_enabled()):
        return weight
    summed: Tensor = _SumGradient.apply(weight.float(), collective)  # type: ignore[no-untyped-call]
    return summed


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, collective: Collective) -> Tensor:
        ctx.collective = collective
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.collective.all_reduce_tree(grad.unsqueeze(0)).squeeze(0), None


class Ulysses:
    """Sequence parallelism over a process group of any size that divides the heads; rows need not divide.

    Rank r holds the rows ``contract.row_range(T, ranks, r)``. Around attention each rank trades its rows of
    all heads for all rows of its heads. Differentiable: the backward of each exchange is the opposite one,
    and gradients of replicated parameters stay partial sums of this rank's rows. Raises CollectiveError if
    heads do not divide.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = dist.group.WORLD if group is None else group
        self.world_size = dist.get_world_size(self._group)
        self.rank = dist.get_rank(self._group)

    def shard(self, x: Tensor) -> Tensor:
        """This rank's rows of ``x`` [T, ...]."""
        start, stop = row_range(x.shape[0], self.world_size, self.rank)
        return x[start:stop]

    def gather(self, x: Tensor, total: int) -> Tensor:
        """All ``total`` rows; the backward hands each rank the gradient of its own rows."""
        gathered: Tensor = _GatherRows.apply(x, total, self)  # type: ignore[no-untyped-call]
        return gathered

    def to_heads(self, x: Tensor, total: int) -> Tensor:
        """[T, heads / ranks, D] of this rank's heads, from its rows [t, heads, D]."""
        if x.shape[1] % self.world_size:
            raise CollectiveError(
                f"{x.shape[1]} heads do not divide over {self.world_size} sequence-parallel ranks"
            )
        exchanged: Tensor = _Exchange.apply(x, total, self, True)  # type: ignore[no-untyped-call]
        return exchanged

    def to_rows(self, x: Tensor, total: int) -> Tensor:
        """[t, heads, D] of this rank's rows, from its heads of all rows [T, heads / ranks, D]."""
        exchanged: Tensor = _Exchange.apply(x, total, self, False)  # type: ignore[no-untyped-call]
        return exchanged

    def _sizes(self, total: int) -> list[int]:
        ranges = [row_range(total, self.world_size, rank) for rank in range(self.world_size)]
        return [stop - start for start, stop in ranges]

    def _swap(self, received: Tensor, into: list[int], sent: Tensor, out: list[int]) -> Tensor:
        """Fill ``received`` with ``into[r]`` values from each rank r, sending it ``out[r]`` of ``sent``, as bytes.

        Both are contiguous, rank after rank.
        """
        size = sent.element_size()
        dist.all_to_all_single(
            received.view(-1).view(torch.uint8),
            sent.view(-1).view(torch.uint8),
            [count * size for count in into],
            [count * size for count in out],
            group=self._group,
        )
        return received

    def exchange(self, x: Tensor, total: int, to_heads: bool) -> Tensor:
        """One direction of the exchange, without autograd."""
        sizes, ranks, dim = self._sizes(total), self.world_size, x.shape[2]
        mine = sizes[self.rank]
        heads = x.shape[1] // ranks if to_heads else x.shape[1]
        all_rows, my_rows = [rows * heads * dim for rows in sizes], [mine * heads * dim] * ranks
        if to_heads:
            by_rank = x.reshape(mine, ranks, heads, dim).transpose(0, 1).contiguous()
            return self._swap(x.new_empty((total, heads, dim)), all_rows, by_rank, my_rows)
        by_rank = self._swap(x.new_empty((ranks, mine, heads, dim)), my_rows, x.contiguous(), all_rows)
        return by_rank.transpose(0, 1).reshape(mine, ranks * heads, dim)

    def gather_bytes(self, x: Tensor, total: int) -> Tensor:
        """All rows, without autograd."""
        sizes, width = self._sizes(total), x.shape[1:].numel()
        copies = x.expand(self.world_size, *x.shape).contiguous()
        my_rows = [x.shape[0] * width] * self.world_size
        return self._swap(
            x.new_empty((total, *x.shape[1:])), [rows * width for rows in sizes], copies, my_rows
        )


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: int, group: Ulysses, to_heads: bool) -> Tensor:
        ctx.total, ctx.group, ctx.to_heads = total, group, to_heads
        return group.exchange(x, total, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.group.exchange(grad, ctx.total, not ctx.to_heads), None, None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: int, group: Ulysses) -> Tensor:
        ctx.group = group
        return group.gather_bytes(x, total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.shard(grad).contiguous(), None, None
