"""Where output goes: refusals before the first byte, a staging folder beside the destination, one rename."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from h3_mapper.errors import (
    NoSpaceError,
    OutputError,
    OutputExistsError,
    OutputInsideSourceError,
    OutputThroughLinkError,
)

SLACK = 16 * 1024 * 1024
"""Bytes of file-system overhead allowed for beside the files themselves."""


def check_destination(destination: Path, source: Path, nbytes: int) -> None:
    """Refuse a destination that exists, is the source or inside it, goes through a link, or does not fit."""
    if destination.is_symlink():
        raise OutputThroughLinkError(
            f"{destination}: is a symbolic link to {os.readlink(destination)}; name a new folder"
        )
    if destination.exists():
        if destination.resolve() == source.resolve():
            raise OutputInsideSourceError(f"{destination}: is the source itself; name a new folder")
        raise OutputExistsError(
            f"{destination}: exists already; h3-mapper never overwrites. Name a new folder"
        )
    parent = destination.parent
    if not parent.is_dir():
        raise OutputError(f"{parent}: no such folder to put {destination.name} in")
    real = parent.resolve()
    if any(part.startswith(("models--", "datasets--", "spaces--")) for part in real.parts):
        raise OutputThroughLinkError(f"{destination}: lies in a hub cache ({real}); write outside it")
    folder = source if source.is_dir() else source.parent
    if source.is_dir() and real.is_relative_to(folder.resolve()):
        raise OutputInsideSourceError(
            f"{destination}: lies inside the source {source}; name a folder outside it"
        )
    free = shutil.disk_usage(real).free
    if nbytes + SLACK > free:
        raise NoSpaceError(f"{destination}: needs {nbytes + SLACK:,} bytes and {real} has {free:,} free")


def hidden(destination: Path) -> str:
    """How temporary names beside `destination` begin: so short that they fit wherever its own name does."""
    return f".{destination.name[:32]}."


@contextmanager
def staging(destination: Path) -> Iterator[Path]:
    """A temporary folder beside `destination`, renamed onto it at the end; removed on any exception.

    The rename is atomic and comes after everything in the folder is on disk, so `destination` is either
    absent or complete. OSError becomes OutputError (NoSpaceError if the disk filled up).
    """
    folder = Path(tempfile.mkdtemp(prefix=hidden(destination), suffix=".partial", dir=destination.parent))
    try:
        folder.chmod(0o777 & ~_umask())
        yield folder
        for path in [*folder.rglob("*"), folder]:
            if path.is_dir():
                sync_folder(path)
        if destination.is_symlink() or destination.exists():
            raise OutputExistsError(f"{destination}: was created by someone else during the run")
        folder.rename(destination)
        sync_folder(destination.parent)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        kind = NoSpaceError if error.errno in _FULL else OutputError
        raise kind(f"{destination}: {error.strerror or error}; nothing was written") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


_FULL = {28, 122}
"""ENOSPC and EDQUOT on Linux."""


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def write_text(path: Path, text: str) -> None:
    """Write a small file and fsync it."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Fsync a folder, so the names in it are durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
