"""Deterministic collectives over torch.distributed: the wires only copy, the adds are our own tree.

A backend's own all-reduce adds in an order of its choosing (ring, double tree, in-switch), so it is never asked to
add. The forms move the bytes in different ways and give the same bits:

============  ============================================================  =====================================
form          what travels                                                  when
============  ============================================================  =====================================
gather        every root to every rank, in one exchange                     few rows: latency decides
scatter       a root's rows to their ranks, the finished rows to all        many rows: a rank adds its own rows
hierarchical  as scatter, inside a node and then between nodes              several nodes: a node is a subtree
peer          as gather or scatter, by stores into the other GPUs' memory   one host; no backend takes part
auto          gather or scatter, by the bytes of the call (cost.py)         one node
============  ============================================================  =====================================
"""

from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from h3_kernels.collectives import cost, wires
from h3_kernels.collectives.fold import fold
from h3_kernels.collectives.peer import PeerExchange
from h3_kernels.contract import TP_DEGREES, row_range
from h3_kernels.errors import CollectiveError

Form = Literal["auto", "gather", "scatter", "hierarchical", "peer"]


class TorchDistributedCollective:
    """Tree collective of a process group of 1, 2, 4 or 8 ranks; the group's rank order is the tree's leaf order.

    ``form`` is one of the table above. ``hierarchical`` needs ``node_size``, the number of consecutive ranks on a
    node (a divisor of the group's size); building it creates subgroups, so every rank of the group must build it.
    ``peer`` takes CUDA tensors of ranks on one host and its calls one at a time, like any communicator's; see
    ``peer.PeerExchange``. Raises CollectiveError for another size or form.
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
        self._peers = PeerExchange(group) if form == "peer" else None

    def all_reduce_tree(
        self, root: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """See ``Collective``. Raises CollectiveError unless ``root`` is fp32 [T, N]."""
        _check_root(root)
        if self._peers is not None:
            return self._peers.all_reduce(root, bias, out_dtype)
        if self._gathers(root, out_dtype):
            out = torch.empty_like(root, dtype=out_dtype, memory_format=torch.contiguous_format)
            return fold(wires.all_gather(root, self._levels[0]), bias, out)
        return self._gather_chunks(self._reduce_chunk(root, bias, out_dtype), root.shape[0])

    def reduce_scatter_tree(
        self, root: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """See ``Collective``. Raises CollectiveError unless ``root`` is fp32 [T, N]."""
        _check_root(root)
        start, stop = row_range(root.shape[0], self.world_size, self.rank)
        if self._peers is not None:
            return self._peers.reduce_scatter(root, bias, out_dtype)[: stop - start]
        return self._reduce_chunk(root, bias, out_dtype)[: stop - start]

    def all_gather_rows(self, rows: Tensor, total: int) -> Tensor:
        """See ``Collective``. Raises CollectiveError if this rank holds another number of rows than its share."""
        start, stop = row_range(total, self.world_size, self.rank)
        if rows.shape[0] != stop - start:
            raise CollectiveError(
                f"rank {self.rank} of {self.world_size} holds {rows.shape[0]} rows; "
                f"its share of {total} is {stop - start}"
            )
        if self._peers is not None:
            return self._peers.all_gather(rows, total)
        return self._gather_chunks(_pad_rows(rows, -(-total // self.world_size)), total)

    def _gathers(self, root: Tensor, out_dtype: torch.dtype) -> bool:
        if self.form != "auto":
            return self.form == "gather"
        return cost.gathers("backend", self.world_size, root.numel(), out_dtype.itemsize)

    def _reduce_chunk(self, root: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """[ceil(T / ranks), N]: this rank's rows, finished. Rows past its share are not written."""
        rows, columns = root.shape
        chunk = -(-rows // self.world_size)
        if len(self._levels) > 1:
            return self._reduce_levels(root, chunk, bias, out_dtype)
        ranges = [row_range(rows, self.world_size, rank) for rank in range(self.world_size)]
        partials = wires.scatter_rows(root, [stop - start for start, stop in ranges], self._levels[0])
        out = root.new_empty((chunk, columns), dtype=out_dtype)
        fold(partials, bias, out[: partials.shape[1]])
        return out

    def _reduce_levels(self, root: Tensor, chunk: int, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """``_reduce_chunk`` level by level: sums inside nodes, then of nodes, the last of them finished."""
        columns = root.shape[1]
        block = _pad_rows(root, chunk * self.world_size).view(self.world_size, chunk, columns)
        for level in self._levels:
            # Ranks count nodes first: row blocks of one local rank lie dist.get_world_size(level) apart.
            size, last = dist.get_world_size(level), level is self._levels[-1]
            blocks = block.view(-1, size, chunk, columns).transpose(0, 1)
            partials = wires.all_to_all(blocks, level).view(size, -1, columns)
            out = root.new_empty(partials.shape[1:], dtype=out_dtype if last else root.dtype)
            block = fold(partials, bias if last else None, out).view(-1, chunk, columns)
        return block[0]

    def _gather_chunks(self, chunk: Tensor, total: int) -> Tensor:
        """[total, ...] of every rank's ``chunk`` [ceil(total / ranks), ...]."""
        block = chunk.unsqueeze(0)
        for level in reversed(self._levels):
            block = wires.all_gather(block, level).transpose(0, 1).flatten(0, 1)
        return block.flatten(0, 1)[:total]


def _node_groups(group: dist.ProcessGroup, node_size: int) -> list[dist.ProcessGroup]:
    """This rank's node, and the ranks at its place in all nodes."""
    ranks = dist.get_process_group_ranks(group)
    rank = dist.get_rank(group)
    node, place = divmod(rank, node_size)
    members = [ranks[node * node_size : (node + 1) * node_size], ranks[place::node_size]]
    return [dist.new_group(level, use_local_synchronization=True) for level in members]


def _pad_rows(t: Tensor, rows: int) -> Tensor:
    missing = rows - t.shape[0]
    return t if missing == 0 else torch.cat([t, t.new_zeros(missing, *t.shape[1:])])


def _check_root(root: Tensor) -> None:
    if root.dtype != torch.float32 or root.dim() != 2:
        raise CollectiveError(f"root is {root.dtype} {list(root.shape)}; expected fp32 [T, N], unrounded")
