"""CPU memory for fused tensors, taken back as soon as nobody holds a tensor, or any view, of it.

A process's first touch of a page costs more than copying 4 KiB into it, and `torch.empty` and numpy give new pages for
every large tensor. A consumer that copies and drops each tensor, as `load_weights` does, thus fills the same few slabs
again and again; one that keeps them all gets new ones. Devices have allocators that do this already.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import weakref

from h3_mapper.backends import Array, backend

SMALLEST = 1 << 20
"""Bytes below which an allocator reuses pages by itself (glibc maps larger ones anew)."""


class Slabs:
    """Slabs by size. Freed with the last tensor of it once the pool itself is gone."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}

    def empty(self, shape: tuple[int, ...], like: Array) -> Array:
        """Uninitialised memory of `like`'s dtype and device; from a slab if it is large and on a CPU."""
        nbytes = math.prod(shape) * like.dtype.itemsize
        host = not hasattr(like, "detach") or like.device.type == "cpu"
        if not host or nbytes < SMALLEST or not hasattr(mmap, "MADV_HUGEPAGE"):
            return backend(like).empty(shape, like)
        free = self._free.setdefault(nbytes, [])
        try:
            slab = free.pop()
        except IndexError:
            slab = _mapped(nbytes)
        owner = (ctypes.c_char * nbytes).from_buffer(slab)  # what the tensor and all its views hold
        weakref.finalize(owner, free.append, slab).atexit = False
        library = sys.modules["torch" if hasattr(like, "detach") else "numpy"]
        made: Array = library.frombuffer(owner, dtype=like.dtype).reshape(shape)
        return made


def _mapped(nbytes: int) -> mmap.mmap:
    """Private anonymous memory, in huge pages where the system grants them on request."""
    slab = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    slab.madvise(mmap.MADV_HUGEPAGE)
    return slab
