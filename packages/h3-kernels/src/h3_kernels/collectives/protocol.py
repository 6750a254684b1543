"""What a collective promises, the collective of one rank, and the names by which ops refer to collectives."""

import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor

from h3_kernels.contract import rank_units
from h3_kernels.errors import CollectiveError
from h3_kernels.reference import finish


class Collective(Protocol):
    """Exchange of fp32 subtree roots [T, N] between the ranks of one tensor-parallel group.

    Rank r's root stands for units [U r / tp, U (r + 1) / tp). Results are the canonical tree's, bit for bit what one
    process computes, and the same bytes on every rank. ``bias`` [N] is added in fp32 at the root of the whole tree
    and the sum is rounded once to ``out_dtype``; both happen before bytes travel where that sends fewer.
    """

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def rank(self) -> int:
        """This process's place in the tree."""
        ...

    def all_reduce_tree(
        self, root: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """[T, N] on every rank."""
        ...

    def reduce_scatter_tree(
        self, root: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The rows of [T, N] that ``contract.row_range(T, tp, rank)`` gives this rank."""
        ...

    def all_gather_rows(self, rows: Tensor, total: int) -> Tensor:
        """[total, ...] from the rows each rank holds by ``contract.row_range``. Copies only."""
        ...


class LocalCollective:
    """The collective of one rank: the tree is complete, so only the bias and the rounding are left."""

    world_size = 1
    rank = 0

    def all_reduce_tree(
        self, root: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """[T, N]: the root itself, finished."""
        return finish(root, bias, out_dtype)

    def reduce_scatter_tree(
        self, root: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """All rows."""
        return finish(root, bias, out_dtype)

    def all_gather_rows(self, rows: Tensor, total: int) -> Tensor:
        """The rows themselves. Raises CollectiveError if they are not all of them."""
        if rows.shape[0] != total:
            raise CollectiveError(
                f"one rank holds {rows.shape[0]} rows of {total}; with tp=1 it must hold all"
            )
        return rows


_names: weakref.WeakKeyDictionary[Collective, str] = weakref.WeakKeyDictionary()
_by_name: weakref.WeakValueDictionary[str, Collective] = weakref.WeakValueDictionary()
_serial = itertools.count()
LOCAL = LocalCollective()


def name_of(collective: Collective | None) -> str:
    """Name for op arguments, which may be strings but not objects; "" is the collective of one rank."""
    if collective is None or collective.world_size == 1:
        return ""
    if collective not in _names:
        _names[collective] = f"collective-{next(_serial)}"
        _by_name[_names[collective]] = collective
    return _names[collective]


def by_name(name: str) -> Collective:
    """The collective ``name_of`` named. Raises CollectiveError if it has been dropped since."""
    if not name:
        return LOCAL
    if name not in _by_name:
        raise CollectiveError(
            f"{name} no longer exists; keep the collective alive as long as the model that uses it"
        )
    return _by_name[name]


def check_collective(collective: Collective | None, tp: int, rank: int, units: int) -> None:
    """Raise CollectiveError unless ``collective`` is the one of ``rank`` in ``tp`` ranks sharing ``units`` units."""
    try:
        rank_units(tp, rank, units)
    except ValueError as error:
        raise CollectiveError(str(error)) from None
    if collective is None and tp == 1:
        return
    if collective is None:
        raise CollectiveError(
            f"tp={tp} needs a collective; pass collective=TorchDistributedCollective(group)"
        )
    if (collective.world_size, collective.rank) != (tp, rank):
        raise CollectiveError(
            f"collective is rank {collective.rank} of {collective.world_size}, the call says {rank} of {tp}"
        )
