"""The subcommands as data: names, arguments, handlers."""

from __future__ import annotations

from pathlib import Path

from h3_mapper import handlers
from h3_mapper.digest import Digest
from h3_mapper.outcome import Command, argument, one_of
from h3_mapper.spec import Layout

_FROM = argument(
    "--from",
    dest="stated",
    type=one_of(Layout),
    metavar="L",
    help="layout of the source: diffusers, release or module (needed for native files that do not state it)",
)
_TO = argument(
    "--to",
    type=one_of(Layout),
    required=True,
    metavar="L",
    help="layout to write: diffusers, release or module",
)
_THREADS = argument("--threads", type=int, metavar="N", help="worker threads (default: min(4, cores))")
_DIGEST = argument(
    "--digest",
    type=one_of(Digest),
    default=Digest.XXH3,
    metavar="D",
    help="per-atom digests: xxh3 (default), blake3 (cryptographic) or none",
)


_PATH = argument(
    "path", type=Path, metavar="PATH", help="folder, .safetensors file, index, or root of transformer*/"
)

COMMANDS = (
    Command("inspect", "say what PATH holds", handlers.run_inspect, (_PATH, _FROM)),
    Command(
        "plan",
        "show how each tensor is built",
        handlers.run_plan,
        (
            argument("--from", dest="stated", type=one_of(Layout), required=True, metavar="L"),
            _TO,
            argument(
                "--config", type=Path, metavar="F", help="config.json (default: the released model's sizes)"
            ),
        ),
    ),
    Command(
        "convert",
        "write SRC in another layout as the new folder DST",
        handlers.run_convert,
        (
            argument(
                "source",
                type=Path,
                metavar="SRC",
                help="folder, .safetensors file, index, or root of transformer*/",
            ),
            argument("destination", type=Path, metavar="DST", help="a new folder; complete or absent"),
            _TO,
            _FROM,
            argument(
                "--max-shard-size", default="5GB", metavar="SIZE", help="5GB (default), 500MB, 4GiB ..."
            ),
            argument(
                "--variant",
                action="store_true",
                help="accept a pruned or quantised source; scales move with rows",
            ),
            argument("--tp", type=int, metavar="N", help="write one folder for each tensor-parallel rank"),
            _DIGEST,
            _THREADS,
        ),
    ),
    Command(
        "verify",
        "compare two checkpoints in any layouts, or one with a manifest; exit code 1 if they differ",
        handlers.run_verify,
        (
            argument("a", type=Path, metavar="A"),
            argument("b", type=Path, metavar="B"),
            _FROM,
            argument("--from-a", type=one_of(Layout), metavar="L", help="layout of A alone"),
            argument("--from-b", type=one_of(Layout), metavar="L", help="layout of B alone"),
            _DIGEST,
            _THREADS,
        ),
    ),
    Command(
        "manifest",
        "print the digest of every atom of PATH",
        handlers.run_manifest,
        (_PATH, _FROM, _DIGEST, _THREADS),
    ),
    Command(
        "demo",
        "convert a small checkpoint through every layout, prove it, and catch a planted fault",
        handlers.run_demo,
        (
            argument(
                "--keep", type=Path, metavar="DIR", help="leave the demo's checkpoints in this new folder"
            ),
        ),
    ),
)
