"""Worker processes that run one function at any tensor-parallel degree.

vLLM takes about ten seconds and 600 MB to import, so it is imported once, in a fork server, and the workers are forked
from there: eight of them start in about a second and share those pages. Every degree of the contract runs in the same
workers, as a new set of process groups.
"""

from __future__ import annotations

import importlib.util
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

WORLD = 8
TIMEOUT_S = 240


class WorkerError(RuntimeError):
    """A worker raised; the message is its traceback."""


class TensorParallelPool:
    """``WORLD`` processes; :meth:`run` calls a function in ``tp`` of them under a tp group of that degree."""

    def __init__(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["h3_adapter_vllm.testing.engine"])
        rendezvous = f"file://{tempfile.mkdtemp()}/rendezvous"
        self._pipes: list[Connection] = []
        self._late: list[int] = []
        self._processes = []
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, rendezvous), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, tp: int, sequence: int = 1) -> list[Any]:
        """``function(*args)`` in ``tp * sequence`` workers, each inside :func:`engine`; its results by rank.

        Args:
            function: A module-level function; the workers import its file by path.
            args: Picklable arguments; tensors travel by value.
            tp: Tensor-parallel degree.
            sequence: Ulysses degree; ``tp * sequence`` divides 8.

        Raises:
            WorkerError: A worker raised, or one did not answer within ``TIMEOUT_S`` seconds; after that the pool is of
                no use, because a late answer would be taken for that of another run.
        """
        if self._late:
            raise WorkerError(f"rank {self._late[0]} left an earlier run unanswered: make another pool")
        job = (function.__code__.co_filename, function.__name__, args, tp, sequence)
        for pipe in self._pipes:
            pipe.send(job)
        deadline = time.monotonic() + TIMEOUT_S
        replies = [self._receive(rank, deadline) for rank in range(WORLD)]
        for rank, (error, _) in enumerate(replies):
            if error:
                raise WorkerError(f"rank {rank} of tp={tp}:\n{error}")
        return [result for _, result in replies[: tp * sequence]]

    def _receive(self, rank: int, deadline: float) -> tuple[str | None, Any]:
        if not self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
            self._late.append(rank)
            return f"no answer within {TIMEOUT_S} s", None
        reply: tuple[str | None, Any] = self._pipes[rank].recv()
        return reply

    def close(self) -> None:
        """End the workers."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: Connection, rank: int, rendezvous: str) -> None:
    os.environ["VLLM_DIST_IDENT"] = f"h3-{os.getppid()}"  # names vLLM's shared-memory segments
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank))
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((None, _call(*job, rank=rank, rendezvous=rendezvous)))
        except Exception:  # noqa: BLE001 - whatever a case raises belongs to the test that asked for it
            pipe.send((traceback.format_exc(), None))


def _call(
    filename: str, name: str, args: tuple[Any, ...], tp: int, sequence: int, *, rank: int, rendezvous: str
) -> Any:
    from h3_adapter_vllm.testing.engine import engine

    spec = importlib.util.spec_from_file_location("h3_worker_cases", filename)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import torch.distributed as dist

    with engine(tp=tp, sequence=sequence, rank=rank, world=WORLD, init_method=rendezvous):
        # A rank with nothing to do would leave, and close its connections while others still make theirs.
        dist.barrier()
        return getattr(module, name)(*args) if rank < tp * sequence else None
