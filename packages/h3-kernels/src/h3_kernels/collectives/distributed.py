"""Deterministic collectives over any torch.distributed backend: the wires only copy, the adds are our own tree.

A backend's own all-reduce adds in an order of its choosing (ring, double tree, in-switch), so it is never asked to
add. The forms move the bytes in different ways and give the same bits:

============  =============================================  =========================================
form          fp32 tensors [T, N] a rank sends                when
============  =============================================  =========================================
gather        tp - 1, in one exchange                         few rows: latency decides
scatter       (tp - 1) / tp, and as much again of the output  many rows: a rank adds only its own rows
hierarchical  as scatter in a node; 1 / node_size between     several nodes: a node is a whole subtree
auto          gather or scatter, by the size of the call      one node
============  =============================================  =========================================
"""

from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from h3_kernels.contract import TP_DEGREES, row_range
from h3_kernels.errors import CollectiveError
from h3_kernels.reference import finish

Form = Literal["auto", "gather", "scatter", "hierarchical"]

GATHER_BYTES = 8 << 20
"""What ``auto`` lets a rank receive in one exchange. Calculated, not measured: at 400 GB/s a second exchange pays for
its 20 us of latency from about 8 MiB saved."""


class TorchDistributedCollective:
    """Tree collective of a process group of 1, 2, 4 or 8 ranks; the group's rank order is the tree's leaf order.

    ``form`` is one of the table above. ``hierarchical`` needs ``node_size``, the number of consecutive ranks on a
    node (a divisor of the group's size); building it creates subgroups, so every rank of the group must build it.
    Raises CollectiveError for another size or form.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, form: Form = "auto", node_size: int | None = None
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
        if self._gathers(root):
            _check_root(root)
            return finish(_fold_in_place(_all_gather(root, self._levels[0])), bias, out_dtype)
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
            block = _fold_in_place(_all_to_all(blocks, level))
        start, stop = row_range(rows, self.world_size, self.rank)
        return finish(block[0, : stop - start], bias, out_dtype)

    def all_gather_rows(self, rows: Tensor, total: int) -> Tensor:
        """See ``Collective``. Raises CollectiveError if this rank holds another number of rows than its share."""
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

    def _gathers(self, root: Tensor) -> bool:
        received = (self.world_size - 1) * root.numel() * root.element_size()
        return self.form == "gather" or (self.form == "auto" and received <= GATHER_BYTES)


def _node_groups(group: dist.ProcessGroup, node_size: int) -> list[dist.ProcessGroup]:
    """This rank's node, and the ranks at its place in all nodes."""
    ranks = dist.get_process_group_ranks(group)
    rank = dist.get_rank(group)
    node, place = divmod(rank, node_size)
    members = [ranks[node * node_size : (node + 1) * node_size], ranks[place::node_size]]
    return [dist.new_group(level, use_local_synchronization=True) for level in members]


def _all_gather(block: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...]: the block of every rank, in new memory. Bytes travel, so every backend carries every dtype."""
    sent = _on_wire(block, group)
    gathered = sent.new_empty((dist.get_world_size(group), *block.shape))
    dist.all_gather_into_tensor(gathered.view(torch.uint8), sent.view(torch.uint8).unsqueeze(0), group=group)
    return gathered.to(block.device)


def _all_to_all(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...], in new memory: from every rank the block it holds for this one, of ``blocks`` [ranks, ...]."""
    sent = _on_wire(blocks, group)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.to(blocks.device)


def _on_wire(block: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The block, contiguous, where the group's backend reads it: gloo gathers host memory only."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(",") if ":" in pair)
    return (block.cpu() if backends.get(block.device.type) == "gloo" else block).contiguous()


def _fold_in_place(partials: Tensor) -> Tensor:
    """``fold_tree`` of memory nobody else reads: no second copy of the roots."""
    while partials.shape[0] > 1:
        partials = partials[0::2].add_(partials[1::2])
    return partials[0]


def _pad_rows(t: Tensor, rows: int) -> Tensor:
    missing = rows - t.shape[0]
    return t if missing == 0 else torch.cat([t, t.new_zeros(missing, *t.shape[1:])])


def _check_root(root: Tensor) -> None:
    if root.dtype != torch.float32 or root.dim() != 2:
        raise CollectiveError(f"root is {root.dtype} {list(root.shape)}; expected fp32 [T, N], unrounded")
