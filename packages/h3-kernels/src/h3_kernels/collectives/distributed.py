"""Deterministic collectives over any torch.distributed backend: the wires only copy, the adds are our own
tree.

A backend's own all-reduce adds in an order of its choosing (ring, double tree, in-switch), so it is never
asked to add. Three forms move the bytes; they give the same bits:

============  =============================================  =========================================
form          fp32 tensors [T, N] a rank sends                when
============  =============================================  =========================================
gather        tp - 1, in one exchange                         few rows: latency decides
scatter       (tp - 1) / tp, and as much again of the output  many rows: a rank adds only its own rows
hierarchical  as scatter in a node; 1 / node_size between     several nodes: a node is a whole subtree
============  =============================================  =========================================
"""

from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from h3_kernels.contract import TP_DEGREES, row_range
from h3_kernels.errors import CollectiveError
from h3_kernels.reference import finish, fold_tree

Form = Literal["gather", "scatter", "hierarchical"]


class TorchDistributedCollective:
    """Tree collective of a process group of 1, 2, 4 or 8 ranks; the group's rank order is the tree's leaf
    order.

    ``form`` is one of the table above. ``hierarchical`` needs ``node_size``, the number of consecutive ranks
    on a node (a divisor of the group's size); building it creates subgroups, so every rank of the group must
    build it. Raises CollectiveError for another size or form.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, form: Form = "gather", node_size: int | None = None
    ) -> None:
        group = dist.group.WORLD if group is None else group
        if group is None:
            raise CollectiveError("torch.distributed is not initialised; call init_process_group first")
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.form = form
        if self.world_size not in TP_DEGREES:
            raise CollectiveError(f"group has {self.world_size} ranks; the tree needs one of {TP_DEGREES}")
        if form not in get_args(Form):
            raise CollectiveError(f"form {form!r} is not one of {', '.join(get_args(Form))}")
        if (form == "hierarchical") != (node_size is not None):
            raise CollectiveError(
                f"form {form!r} with node_size={node_size}; hierarchical needs it, others do not"
            )
        if node_size is not None and (node_size < 1 or self.world_size % node_size):
            raise CollectiveError(
                f"node_size={node_size} does not divide the group's {self.world_size} ranks"
            )
        # Groups to exchange with, innermost first: each level's ranks hold whole subtrees of the next one.
        self._levels = [group] if node_size is None else _node_groups(group, node_size)

    def all_reduce_tree(
        self, root: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """See ``Collective``. Raises CollectiveError unless ``root`` is fp32 [T, N]."""
        if self.form == "gather":
            _check_root(root)
            return finish(fold_tree(_all_gather(root, self._levels[0])), bias, out_dtype)
        mine = self.reduce_scatter_tree(root, bias=bias, out_dtype=out_dtype)
        return self.all_gather_rows(mine, root.shape[0])

    def reduce_scatter_tree(
        self, root: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """See ``Collective``. Raises CollectiveError unless ``root`` is fp32 [T, N]."""
        _check_root(root)
        rows, columns = root.shape
        chunk = -(-rows // self.world_size)
        block = _pad_rows(root, chunk * self.world_size).view(self.world_size, chunk, columns)
        for level in self._levels:
            # Ranks count nodes first: row blocks of one local rank lie dist.get_world_size(level) apart.
            size = dist.get_world_size(level)
            blocks = block.view(-1, size, *block.shape[1:]).transpose(0, 1)
            block = fold_tree(_all_to_all(blocks, level))
        start, stop = row_range(rows, self.world_size, self.rank)
        return finish(block[0, : stop - start], bias, out_dtype)

    def all_gather_rows(self, rows: Tensor, total: int) -> Tensor:
        """See ``Collective``. Raises CollectiveError if this rank holds another number of rows than its
        share."""
        start, stop = row_range(total, self.world_size, self.rank)
        if rows.shape[0] != stop - start:
            raise CollectiveError(
                f"rank {self.rank} of {self.world_size} holds {rows.shape[0]} rows; "
                f"its share of {total} is {stop - start}"
            )
        block = _pad_rows(rows, -(-total // self.world_size)).unsqueeze(0)
        for level in reversed(self._levels):
            block = _all_gather(block, level).transpose(0, 1).flatten(0, 1)
        return block.flatten(0, 1)[:total]


def _node_groups(group: dist.ProcessGroup, node_size: int) -> list[dist.ProcessGroup]:
    """This rank's node, and the ranks at its place in all nodes."""
    ranks = dist.get_process_group_ranks(group)
    rank = dist.get_rank(group)
    node, place = divmod(rank, node_size)
    members = [ranks[node * node_size : (node + 1) * node_size], ranks[place::node_size]]
    return [dist.new_group(level, use_local_synchronization=True) for level in members]


def _all_gather(block: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...]: the block of every rank. Bytes travel, so every backend carries every dtype."""
    size = dist.get_world_size(group)
    block = block.contiguous()
    gathered = block.new_empty((size, *block.shape))
    dist.all_gather_into_tensor(gathered.view(torch.uint8), block.view(torch.uint8).unsqueeze(0), group=group)
    return gathered


def _all_to_all(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...]: from every rank the block it holds for this one, of ``blocks`` [ranks, ...]."""
    blocks = blocks.contiguous()
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=group)
    return received


def _pad_rows(t: Tensor, rows: int) -> Tensor:
    missing = rows - t.shape[0]
    return t if missing == 0 else torch.cat([t, t.new_zeros(missing, *t.shape[1:])])


def _check_root(root: Tensor) -> None:
    if root.dtype != torch.float32 or root.dim() != 2:
        raise CollectiveError(f"root is {root.dtype} {list(root.shape)}; expected fp32 [T, N], unrounded")
