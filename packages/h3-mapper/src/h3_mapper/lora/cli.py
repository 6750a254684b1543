"""`h3-mapper lora inspect | convert | merge`: arguments as data, handlers that return what to print."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from h3_mapper.lora.formats import FORMATS, Fc1Rows, QkvRows
from h3_mapper.outcome import BAD_INPUT, OK, Command, Outcome, argument, one_of
from h3_mapper.spec import Layout
from h3_mapper.stream import Progress

if TYPE_CHECKING:
    from h3_mapper.config import H3Config
    from h3_mapper.lora.read import Statement


def _alpha(text: str) -> float | str:
    try:
        return text if text == "rank" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor 'rank'") from None


_ADAPTER = argument("adapter", type=Path, metavar="LORA", help="adapter: .safetensors file or PEFT folder")
_DESTINATION = argument("destination", type=Path, metavar="DST")
_STATED = (
    argument(
        "--from",
        dest="stated",
        choices=list(FORMATS),
        metavar="F",
        help=f"the adapter's format, which states its row order: {', '.join(FORMATS)}",
    ),
    argument(
        "--qkv-rows", type=one_of(QkvRows), metavar="R", help="row order of a fused q/k/v: grouped or stacked"
    ),
    argument(
        "--fc1-rows",
        type=one_of(Fc1Rows),
        metavar="R",
        help="order of a fused fc1's halves: gate-first or value-first",
    ),
    argument("--alpha", type=_alpha, metavar="N", help="overrule the recorded alpha; 'rank' is scale 1"),
    argument("--component", metavar="C", help="transformer or transformer_ref, if names hold both"),
    argument("--adapter-name", metavar="NAME", help="PEFT adapter name, if the file holds several"),
)
_CONFIG = argument(
    "--config", type=Path, metavar="F", help="config.json of the model (default: the release's sizes)"
)


def _statement(args: argparse.Namespace) -> Statement:
    from h3_mapper.lora.read import Statement

    own = {
        "qkv": args.qkv_rows,
        "fc1": args.fc1_rows,
        "alpha": args.alpha,
        "component": args.component,
        "adapter": args.adapter_name,
    }
    return Statement.of(args.stated, **own) if args.stated else Statement(**own)


def _config(path: Path | None) -> H3Config | None:
    """The stated sizes; None for the release's, which are then assumed."""
    from h3_mapper.source import config_file

    return None if path is None else config_file(path)


def _inspect(args: argparse.Namespace, progress: Progress | None) -> Outcome:
    from h3_mapper.lora.describe import describe
    from h3_mapper.lora.errors import UnstatedError
    from h3_mapper.lora.files import open_adapter

    file, config, statement = open_adapter(args.adapter), _config(args.config), _statement(args)
    problem = None
    try:
        adapter = file.read(config, statement)
    except UnstatedError as error:  # modules and ranks do not depend on what nobody stated
        problem = str(error)
        adapter = file.read(config, statement.assumed())
    found = describe(file, adapter, config, problem)
    return Outcome(found.text(), found.to_json(), BAD_INPUT if problem else OK)


def _convert(args: argparse.Namespace, progress: Progress | None) -> Outcome:
    from h3_mapper.lora.files import open_adapter, save_adapter
    from h3_mapper.lora.write import write

    config, file = _config(args.config), open_adapter(args.adapter)
    adapter = file.read(config, _statement(args))
    written = write(adapter, args.to, config, round_scales=args.round_scales)
    paths = save_adapter(written, args.destination, file.path)
    lines = [
        f"{args.destination}: {args.to}, {len(written.tensors)} tensors",
        *(f"  note  {n}" for n in adapter.notes),
    ]
    data = {"files": [str(path) for path in paths], "format": args.to, "notes": list(adapter.notes)}
    return Outcome("\n".join(lines), data | {"tensors": len(written.tensors)})


def _merge(args: argparse.Namespace, progress: Progress | None) -> Outcome:
    from h3_mapper.lora.files import open_adapter
    from h3_mapper.lora.merge import find_base, merge
    from h3_mapper.lora.read import component_of

    file = open_adapter(args.adapter)
    base = find_base(args.base, args.component or component_of(file.tensors, file.metadata), args.base_from)
    adapter = file.read(base.config, _statement(args))
    done = merge(
        base,
        adapter,
        args.destination,
        strength=args.strength,
        max_shard_size=args.max_shard_size,
        progress=progress,
    )
    text = f"{done.destination}: {done.layout}, {done.changed} of {done.tensors} tensors changed, {done.nbytes:,} bytes"
    data = {
        "destination": str(done.destination),
        "layout": done.layout,
        "tensors": done.tensors,
        "changed": done.changed,
        "bytes": done.nbytes,
        "notes": list(adapter.notes),
    }
    return Outcome("\n".join([text, *(f"  note  {note}" for note in adapter.notes)]), data)


LORA_COMMANDS = (
    Command(
        "inspect",
        "say what an adapter holds and how it would be read",
        _inspect,
        (_ADAPTER, *_STATED, _CONFIG),
    ),
    Command(
        "convert",
        "write an adapter in another format",
        _convert,
        (
            _ADAPTER,
            _DESTINATION,
            argument("--to", choices=list(FORMATS), required=True, metavar="F", help="format to write"),
            *_STATED,
            _CONFIG,
            argument(
                "--round-scales",
                action="store_true",
                help="allow B to be rounded where one scale must serve all",
            ),
        ),
    ),
    Command(
        "merge",
        "write base + adapter as the new folder DST, in the base's layout",
        _merge,
        (
            argument("base", type=Path, metavar="BASE", help="bf16 transformer: folder, file or index"),
            _ADAPTER,
            _DESTINATION,
            argument("--base-from", type=one_of(Layout), metavar="L", help="layout of a native base"),
            *_STATED,
            argument("--strength", type=float, default=1.0, metavar="S", help="factor on the whole adapter"),
            argument("--max-shard-size", default="5GB", metavar="SIZE", help="5GB (default), 500MB ..."),
        ),
    ),
)
