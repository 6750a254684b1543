"""`h3-mapper`: parse, run, print. Exit codes: 0 fine, 1 verify found a difference, 2 bad input."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn, TextIO

from h3_mapper.commands import COMMANDS
from h3_mapper.errors import MapperError
from h3_mapper.outcome import BAD_INPUT, Command
from h3_mapper.readback import PLACEHOLDER_NUMPY


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Without `argv`, this process is the command's own."""
    if argv is None:
        PLACEHOLDER_NUMPY.set(True)
    words = sys.argv[1:] if argv is None else argv
    args = _parser(with_lora="lora" in words[:1]).parse_args(words)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminated)  # so that a stopped job removes its temporary folder too
    bar = _Bar(sys.stderr)
    try:
        outcome = args.run(args, bar.update)
    except (MapperError, OSError) as error:
        bar.close()
        return _failed(args.json, error)
    except KeyboardInterrupt:
        bar.close()
        print("h3-mapper: interrupted; nothing was written", file=sys.stderr)
        return 130
    bar.close()
    try:
        print(json.dumps(outcome.data, indent=1) if args.json else outcome.text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # `| head` has what it wanted
            return _failed(False, error)
    return int(outcome.code)


def _failed(as_json: bool, error: Exception) -> int:
    message = str(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        message = f"{error.filename}: {error.strerror}"
    message = message.replace("\n", "\\n").replace("\r", "\\r")  # a path may hold them; a message is one line
    if as_json:
        print(json.dumps({"error": type(error).__name__, "message": message}, indent=1))
    print(f"h3-mapper: {message}", file=sys.stderr)
    return BAD_INPUT


def _parser(with_lora: bool) -> argparse.ArgumentParser:
    """with_lora: also load the adapter commands, which convert and verify need not wait for."""
    from h3_mapper import __version__

    parser = _Parser(
        prog="h3-mapper",
        description="Move MiniMax-H3 transformers between the diffusers, release and module layouts, bit for bit.",
    )
    parser.add_argument("--version", action="version", version=f"h3-mapper {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        _add(commands, command)
    lora = commands.add_parser("lora", help="inspect, convert or merge an adapter")
    if with_lora:
        from h3_mapper.lora.cli import LORA_COMMANDS

        members = lora.add_subparsers(required=True, metavar="COMMAND")
        for command in LORA_COMMANDS:
            _add(members, command)
    return parser


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other error here; the usage is a --help away."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def _add(commands: argparse._SubParsersAction[_Parser], command: Command) -> None:
    sub = commands.add_parser(command.name, help=command.help, description=command.help)
    for flags, keywords in command.arguments:
        sub.add_argument(*flags, **keywords)
    sub.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    sub.set_defaults(run=command.run)


def _terminated(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class _Bar:
    """A progress bar on a terminal, a plain line every few seconds elsewhere."""

    WIDTH, REDRAW, LINE_EVERY = 30, 0.1, 10.0

    def __init__(self, stream: TextIO):
        self.stream, self.tty = stream, stream.isatty()
        self.began = time.monotonic()
        self.shown = self.began if not self.tty else 0.0
        self.open = False

    def update(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.shown < (self.REDRAW if self.tty else self.LINE_EVERY) and (
            done < total or not self.tty
        ):
            return
        self.shown = now
        share = done / total if total else 1.0
        rate = done / max(now - self.began, 1e-9) / 2**30
        text = f"{share:4.0%} {done / 2**30:.2f} of {total / 2**30:.2f} GiB, {rate:.2f} GiB/s"
        if self.tty:
            full = int(share * self.WIDTH)
            print(f"\r[{'#' * full}{'.' * (self.WIDTH - full)}] {text}", end="", file=self.stream, flush=True)
            self.open = True
        else:
            print(f"h3-mapper: {text}", file=self.stream, flush=True)

    def close(self) -> None:
        if self.open:
            print(file=self.stream)
            self.open = False


if __name__ == "__main__":
    sys.exit(main())
