"""Byte ranges in, digests and byte ranges out: the one loop that moves tensor data.

A job is one output tensor: pieces of source files, in order, tagged with the atom they belong to. Each
worker owns one 1 MiB buffer, so memory does not depend on the checkpoint. All calls in the loop (preadv,
pwrite, hashing) release the GIL.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from h3_mapper.digest import Digest, Hasher
from h3_mapper.errors import MapperError, TruncatedFileError

CHUNK = 1 << 20
"""Bytes a worker reads and digests at a time; a multiple of WRITE."""

WRITE = 1 << 17
"""Bytes of one aligned pwrite. A write's size is the size of the page-cache folios it asks for: on a 2-core VM
that gives free memory back to its host, 1 MiB writes cost 0.4 to 0.9 s of CPU per GiB and 128 KiB writes
0.33 (`cp`: 0.32); elsewhere the two are equal."""

FLUSH = 1 << 24
"""Bytes after which write-back of what was just written is started, so that the disk works during the copy and
the final fsync finds little left (0.06 s instead of 0.5 s for 2.3 GB)."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) from worker threads, one call at a time."""


class Piece(NamedTuple):
    """`length` bytes at `offset` of the open file `fd`, rows of `atom` (None: not digested)."""

    fd: int
    offset: int
    length: int
    atom: str | None


@dataclass(frozen=True, slots=True)
class Job:
    """One tensor: the concatenation of `pieces`, written at `offset` of `out` (None: only digested)."""

    pieces: tuple[Piece, ...]
    out: int | None = None
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes the job moves."""
        return sum(piece.length for piece in self.pieces)


def check_threads(threads: int) -> None:
    """Raise MapperError unless a number of worker threads is a positive integer."""
    if not isinstance(threads, int) or threads < 1:
        raise MapperError(f"threads is {threads!r}; expected a positive integer")


def run(
    lanes: Iterable[Iterable[Job]],
    digest: Digest,
    threads: int,
    progress: Progress | None = None,
    finished: Callable[[int], None] | None = None,
) -> dict[str, str]:
    """Run every job and return atom -> digest. An atom must lie in one job, its rows ascending.

    A lane is one output file's jobs in file order: workers prefer different lanes, because writes to one
    file exclude each other. `finished(lane)` is called once a lane's last job is done (to fsync it).
    Raises MapperError for a number of threads that is none, TruncatedFileError if a source shrinks under us, OSError
    from the system; other workers then stop.
    """
    check_threads(threads)
    work = _Work([deque(lane) for lane in lanes], progress, finished)
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="h3-mapper") as pool:
        futures = [pool.submit(_worker, work, digest) for _ in range(threads)]
        try:
            for future in futures:
                future.result()
        except BaseException:  # includes KeyboardInterrupt: stop the other workers, then pass it on
            work.stop.set()
            raise
    return work.digests


class _Work:
    """The shared state of one run: jobs left, workers per lane, digests, progress."""

    def __init__(
        self, lanes: list[deque[Job]], progress: Progress | None, finished: Callable[[int], None] | None
    ):
        self.lanes, self.progress, self.finished = lanes, progress, finished
        self.total = sum(job.nbytes for lane in lanes for job in lane)
        self.done = 0
        self.active = [0] * len(lanes)
        self.digests: dict[str, str] = {}
        self.stop = threading.Event()
        self.lock = threading.Lock()
        # Two writers of one file would spin on its inode's lock; here one sleeps, or reads on.
        self.writers: dict[int, threading.Lock] = defaultdict(threading.Lock)

    def jobs(self) -> Iterator[Job]:
        """Jobs for one worker, from the lane with the fewest workers on it."""
        while not self.stop.is_set():
            with self.lock:
                left = [n for n, lane in enumerate(self.lanes) if lane]
                if not left:
                    return
                lane = min(left, key=lambda n: (self.active[n], n))
                job = self.lanes[lane].popleft()
                self.active[lane] += 1
            yield job
            with self.lock:
                self.active[lane] -= 1
                over = not self.lanes[lane] and not self.active[lane]
            if over and self.finished:
                self.finished(lane)

    def add(self, count: int) -> None:
        with self.lock:
            self.done += count
            if self.progress:
                self.progress(self.done, self.total)


def _worker(work: _Work, digest: Digest) -> None:
    buffer = memoryview(mmap.mmap(-1, CHUNK + mmap.PAGESIZE))
    try:
        for job in work.jobs():
            hashers: dict[str, Hasher] = {}
            offset = job.offset
            for chunk, parts, hole in _chunks(job, buffer):
                if work.stop.is_set():
                    return
                for atom, view in parts:
                    hasher = hashers.get(atom) or hashers.setdefault(atom, digest.hasher())
                    hasher.update(view)
                if job.out is not None and not hole:
                    with work.writers[job.out]:
                        _write(job.out, chunk, offset)
                offset += len(chunk)
                work.add(len(chunk))
            work.digests.update({atom: hasher.hexdigest() for atom, hasher in hashers.items()})
    except BaseException:
        work.stop.set()
        raise


def _chunks(job: Job, buffer: memoryview) -> Iterator[tuple[memoryview, list[tuple[str, memoryview]], bool]]:
    """Fill the buffer from the pieces; yield (its filled part, [(atom, that atom's part of it)], all hole).

    All but the first and last chunk lie at multiples of CHUNK in the output, and bytes lie in the buffer as they
    will in the page cache: writes that straddle pages cost a quarter more, or twice (measured: 0.30 and 0.53
    against 0.23 s of CPU per GiB).
    """
    low = job.offset % mmap.PAGESIZE
    high = low + CHUNK - job.offset % CHUNK
    at, parts, hole = low, list[tuple[str, memoryview]](), True
    for piece in job.pieces:
        offset, left = piece.offset, piece.length
        while left:
            view = buffer[at : min(at + left, high)]
            hole &= _read(piece.fd, view, offset)
            if piece.atom is not None:
                parts.append((piece.atom, view))
            at, offset, left = at + len(view), offset + len(view), left - len(view)
            if at == high:
                yield buffer[low:high], parts, hole
                at, low, high, parts, hole = 0, 0, CHUNK, [], True
    if at > low:
        yield buffer[low:at], parts, hole


def _read(fd: int, view: memoryview, offset: int) -> bool:
    """Fill the view; return whether it all came from a hole of a sparse file (which the output then keeps)."""
    if _next_data(fd, offset) >= offset + len(view):
        view[:] = _ZEROS[: len(view)]
        return True
    while len(view):
        count = os.preadv(fd, [view], offset)
        if count == 0:
            raise TruncatedFileError(f"a source file ended at byte {offset}; was it changed during the run?")
        view, offset = view[count:], offset + count
    return False


_ZEROS = bytes(CHUNK)


def _next_data(fd: int, offset: int) -> int:
    """Offset of the next byte that is no hole; the file's size if only a hole follows."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return os.fstat(fd).st_size
        return offset  # a file system that does not tell: read


def _write(fd: int, view: memoryview, offset: int) -> None:
    end = offset + len(view)
    while len(view):
        count = os.pwrite(fd, view[: WRITE - offset % WRITE], offset)
        view, offset = view[count:], offset + count
    if end % FLUSH < CHUNK:
        # DONTNEED starts write-back of dirty pages; it drops only clean ones, and these are not clean yet.
        os.posix_fadvise(fd, max(0, end - FLUSH), FLUSH, os.POSIX_FADV_DONTNEED)
