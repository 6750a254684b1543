"""Run a function in several processes that form a gloo group.

Processes are forked from a server that has imported torch and Diffusers once, so eight of them start in about
a second.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 120


class RankError(RuntimeError):
    """A rank raised, or gave no answer; the message is its traceback."""


def run_ranks(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """`function(*args)` in `world` processes of one default group; results by rank.

    `function` is a module-level function: the processes import its file by path. Arguments and results must
    be picklable; tensors travel by value. Raises RankError.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["h3_adapter_diffusers.testing.packings"])
    with tempfile.TemporaryDirectory() as folder:
        pipes: list[Connection] = []
        processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            job = (
                function.__code__.co_filename,
                function.__name__,
                args,
                rank,
                world,
                f"file://{folder}/store",
            )
            process = context.Process(target=_rank, args=(theirs, *job), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        replies = [_reply(pipe) for pipe in pipes]
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    for rank, (error, _) in enumerate(replies):
        if error:
            raise RankError(f"rank {rank} of {world} (exit code {processes[rank].exitcode}):\n{error}")
    return [result for _, result in replies]


def _reply(pipe: Connection) -> tuple[str | None, Any]:
    try:
        reply: tuple[str | None, Any] = (
            pipe.recv() if pipe.poll(TIMEOUT_S) else (f"no answer in {TIMEOUT_S} s", None)
        )
    except EOFError:
        return "died without an answer", None
    return reply


def _rank(pipe: Connection, filename: str, name: str, args: Any, rank: int, world: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        spec = importlib.util.spec_from_file_location("h3_rank_cases", filename)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        pipe.send((None, getattr(module, name)(*args)))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:  # noqa: BLE001 - whatever a case raises belongs to the test that asked for it
        pipe.send((traceback.format_exc(), None))
