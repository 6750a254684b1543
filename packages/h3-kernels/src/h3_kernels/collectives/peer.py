"""The peer form: ranks on one host store roots into each other's GPU memory; no backend carries or adds anything.

Every rank maps two buffers of every other rank through torch's symmetric memory: an *inbox*, which peers store into,
and an *outbox*, which peers read. A *fence* is a barrier of all ranks in the order of the current stream.

==============  =========================================================================
call            steps
==============  =========================================================================
few values      push the root to all inboxes; fence; add; fence
many values     push rows to their ranks' inboxes; fence; add into the outbox; fence; pull
reduce_scatter  push rows to their ranks' inboxes; fence; add; fence
all_gather      fence; copy into the outbox; fence; pull
==============  =========================================================================

Two rules keep one call out of another's memory. An inbox is read only before the last fence of a call, so peers may
store into it from the next call on. An outbox is written only after a fence of the call that writes it, so peers have
finished the reads of the call before. Neither depends on the sizes of the calls, so captured graphs may be replayed in
any order that all ranks share.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from h3_kernels.collectives import cost
from h3_kernels.collectives.fold import fold
from h3_kernels.errors import CollectiveError

_SMALLEST = 1 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of every size, as which finished rows travel."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A buffer of this rank [bytes], its symmetric-memory handle, and where all ranks' buffers are mapped here."""

    local: Tensor
    handle: Any
    pointers: Tensor

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The buffer's first elements as ``shape`` of ``dtype``."""
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.local[:size].view(dtype).view(shape)


class PeerExchange:
    """The exchange of one process group over peer memory; every rank makes the same calls in the same order.

    Buffers are made at the first call that needs them, and again, twice as large, for a larger one; none is freed,
    since captured graphs hold their addresses. That is a meeting of all ranks on their hosts, so a size must have been
    used once before it is captured. Raises CollectiveError for ranks on several hosts, tensors that are not on CUDA,
    memory that cannot be mapped, and a new size under capture.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.world_size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._buffers: dict[str, list[Mapped]] = {"fence": [], "inbox": [], "outbox": []}
        self._stream: torch.cuda.Stream | None = None
        hosts: list[str] = [""] * self.world_size
        dist.all_gather_object(hosts, socket.gethostname(), group=group)
        if len(set(hosts)) > 1:
            raise CollectiveError(
                f"form 'peer' needs all ranks on one host, these are on {len(set(hosts))}; "
                "use form 'hierarchical' with node_size"
            )

    def all_reduce(self, root: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """[T, N] on every rank, of fp32 roots [T, N]."""
        rows, columns = root.shape
        whole = cost.gathers("peer", self.world_size, root.numel(), out_dtype.itemsize)
        with self._call(root):
            if whole or root.numel() == 0:
                out = root.new_empty((rows, columns), dtype=out_dtype)
                fold(self._collect(root, rows, whole=True), bias, out)
                self._fence()
                return out
            chunk = -(-rows // self.world_size)
            partials = self._collect(root, chunk, whole=False)
            outbox = self._buffer("outbox", chunk * columns * out_dtype.itemsize)
            fold(partials, bias, outbox.view((chunk, columns), out_dtype))
            self._fence()
            return self._pull(outbox, chunk, (rows, columns), out_dtype)

    def reduce_scatter(self, root: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """[ceil(T / ranks), N]: this rank's rows; those past its share mean nothing."""
        chunk = -(-root.shape[0] // self.world_size)
        with self._call(root):
            out = root.new_empty((chunk, root.shape[1]), dtype=out_dtype)
            fold(self._collect(root, chunk, whole=False), bias, out)
            self._fence()
            return out

    def all_gather(self, rows: Tensor, total: int) -> Tensor:
        """[total, ...] of every rank's rows, which are its share of ``total``."""
        chunk = -(-total // self.world_size)
        with self._call(rows):
            self._fence()
            outbox = self._buffer("outbox", chunk * rows.shape[1:].numel() * rows.itemsize)
            outbox.view(tuple(rows.shape), rows.dtype).copy_(rows)
            self._fence()
            return self._pull(outbox, chunk, (total, *rows.shape[1:]), rows.dtype)

    def _collect(self, root: Tensor, rows: int, *, whole: bool) -> Tensor:
        """[ranks, rows, N] in the inbox: all ranks' roots, whole or this rank's rows of them."""
        from h3_kernels.triton.peer import push

        columns = root.shape[1]
        block = rows * columns
        inbox = self._buffer("inbox", self.world_size * block * root.itemsize)
        if block:
            push(root.contiguous(), inbox.pointers, block=block, step=0 if whole else block, rank=self.rank)
        self._fence()
        return inbox.view((self.world_size, rows, columns), root.dtype)

    def _pull(self, outbox: Mapped, chunk: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        from h3_kernels.triton.peer import pull

        out = torch.empty(shape, dtype=dtype, device=outbox.local.device)
        if out.numel():
            bits = out.view(_BITS[dtype.itemsize])
            pull(bits, outbox.pointers, block=chunk * out.shape[1:].numel(), rank=self.rank)
        return out

    def _fence(self) -> None:
        """All ranks have reached this place in their streams, and see what the others stored before it."""
        self._buffer("fence", 1).handle.barrier(channel=0)

    @contextmanager
    def _call(self, t: Tensor) -> Iterator[None]:
        """On the tensor's device, after the calls of other streams: they share the buffers."""
        if not t.is_cuda:
            raise CollectiveError(
                f"form 'peer' got a tensor on {t.device}; it moves CUDA tensors, use another form"
            )
        with torch.cuda.device(t.device):
            stream, before = torch.cuda.current_stream(), self._stream
            if before is not None and before != stream and not torch.cuda.is_current_stream_capturing():
                stream.wait_stream(before)
            self._stream = stream
            yield

    def _buffer(self, name: str, size: int) -> Mapped:
        """The newest buffer of that name if it holds ``size`` bytes, else a new one; every rank asks alike."""
        made = self._buffers[name]
        if made and made[-1].local.numel() >= size:
            return made[-1]
        made.append(self._map(max(_SMALLEST, 1 << max(size - 1, 0).bit_length())))
        return made[-1]

    def _map(self, size: int) -> Mapped:
        """A buffer of ``size`` bytes on this and on every other rank, which makes one of its own meanwhile."""
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory as symmetric

        if torch.cuda.is_current_stream_capturing():
            raise CollectiveError(
                f"form 'peer' holds no buffer of {size} bytes yet and cannot map one during a graph capture; "
                "run this size once before it"
            )
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            with _no_multicast():
                local = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
                handle = symmetric.rendezvous(local, self._group)
        except RuntimeError as error:
            raise CollectiveError(
                f"form 'peer' cannot map {size} bytes of {device} into {self.world_size} ranks: "
                f"{str(error).splitlines()[0]}; use another form"
            ) from error
        if handle is None or handle.buffer_ptrs[self.rank] != local.data_ptr():
            raise CollectiveError(
                f"form 'peer' got no mapping of its own memory from torch {torch.__version__}"
            )
        return Mapped(local, handle, torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device))


@contextmanager
def _no_multicast() -> Iterator[None]:
    """Keep torch from making NVLink multicast objects for the memory it maps meanwhile: nothing here would use them."""
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
