"""Tensor-parallel ranks as threads of one process, with or without a GPU: no collective of a library takes part."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from h3_kernels.contract import row_range
from h3_kernels.reference import finish, fold_tree
from h3_kernels.testing.parallel import shard_columns, shard_parts

_ROW_PARALLEL = ("out_proj", "fc2", "time_embedder.proj_out")
_PARTS = {"qkv_proj": 3, "fc1": 2}


class ThreadCollective:
    """Rank ``rank`` of threads that share ``room``: the tree, over tensors left in each other's sight."""

    def __init__(self, room: dict[str, Any], rank: int) -> None:
        self.world_size, self.rank, self._room = len(room["slots"]), rank, room

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._room["slots"][self.rank] = x.clone()
        self._room["barrier"].wait()
        found = list(self._room["slots"])
        self._room["barrier"].wait()
        return found

    def all_reduce_tree(
        self, root: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """See ``collectives.protocol.Collective``."""
        return finish(fold_tree(torch.stack(self._exchange(root))), bias, out_dtype)

    def reduce_scatter_tree(
        self, root: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """See ``collectives.protocol.Collective``."""
        whole = self.all_reduce_tree(root, bias=bias, out_dtype=out_dtype)
        begin, end = row_range(root.shape[0], self.world_size, self.rank)
        return whole[begin:end]

    def all_gather_rows(self, rows: Tensor, total: int) -> Tensor:
        """See ``collectives.protocol.Collective``."""
        return torch.cat(self._exchange(rows))[:total]


def on_threads(tp: int, work: Callable[[int, ThreadCollective], Any]) -> list[Any]:
    """``work(rank, collective)`` on ``tp`` threads; results by rank. Raises what the first rank to fail raised."""
    barrier = threading.Barrier(tp)
    room = {"slots": [None] * tp, "barrier": barrier}
    collectives = [ThreadCollective(room, rank) for rank in range(tp)]
    return results_by_rank(tp, barrier, lambda rank: work(rank, collectives[rank]))


def results_by_rank(ranks: int, barrier: threading.Barrier, work: Callable[[int], Any]) -> list[Any]:
    """``work(rank)`` on one thread a rank; results by rank. A rank that fails breaks ``barrier``, at which the others
    wait, and what the first of them raised is raised."""
    results: list[Any] = [None] * ranks
    errors: list[Exception] = []

    def body(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:  # noqa: BLE001  # raised again below, in the caller's thread
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def shard(module: Mapping[str, Tensor], tp: int, rank: int) -> dict[str, Tensor]:
    """What ``rank`` of ``tp`` holds of tensors under ``module`` names, as vLLM shards them: blocks of qkv and fc1,
    columns of row-parallel weights; norms and row-parallel biases whole."""
    out = {}
    for name, t in module.items():
        linear, _, kind = name.rpartition(".")
        if linear.endswith(_ROW_PARALLEL):
            out[name] = shard_columns(t, tp, rank).contiguous() if kind == "weight" else t
        elif "norm" in linear.rpartition(".")[2]:
            out[name] = t
        else:
            out[name] = shard_parts(t, tp, rank, parts=_PARTS.get(linear.rpartition(".")[2], 1))
    return out
