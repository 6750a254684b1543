"""What each subcommand does: call the library, put the result in words and in JSON. Printing is cli.py's.

Imports are inside the handlers, so that one command does not wait for another's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from h3_mapper.config import H3Config
from h3_mapper.digest import Digest
from h3_mapper.errors import ConfigError
from h3_mapper.outcome import BAD_INPUT, DIFFERENT, OK, Outcome
from h3_mapper.stream import Progress


def _threads(args: argparse.Namespace) -> int:
    from h3_mapper.convert import DEFAULT_THREADS

    if args.threads is not None and not 1 <= args.threads <= 64:
        raise ConfigError(f"--threads {args.threads}: expected 1 to 64")
    return args.threads or DEFAULT_THREADS


def run_inspect(args: argparse.Namespace, progress: Progress | None) -> Outcome:
    """`inspect`: one paragraph for each component; exit code 2 if one is not sound."""
    from h3_mapper.inspect import UNSTATED, inspect
    from h3_mapper.judge import describe, judge
    from h3_mapper.source import open_source

    if args.path.suffix == ".gguf":
        return _inspect_gguf(args.path)
    found = inspect(args.path, args.stated)
    judged = {name: judge(part, name, args.stated) for name, part in open_source(args.path).items()}
    refusals = {item.name: None if judged[item.name].sound else item.problem for item in found}
    described = {name: describe(each, refusals[name]) for name, each in judged.items()}
    lines, layouts = [], {}
    for item in found:
        variant_only = bool(item.problem) and judged[item.name].sound
        layouts[item.name] = str(judged[item.name].layout or UNSTATED) if variant_only else item.layout
        lines += [
            f"{item.given}",
            f"  layout    {layouts[item.name]}",
            f"  tensors   {item.tensors} in {len(item.files)} files, {item.nbytes:,} bytes, {_counts(item.dtypes)}",
        ]
        if item.config:
            dims = (
                "num_layers",
                "num_refiner_layers",
                "hidden_size",
                "num_attention_heads",
                "attention_head_dim",
            )
            lines.append(
                "  config    " + ", ".join(f"{key} {item.config[key]}" for key in (*dims, "ffn_dim"))
            )
        lines += described[item.name][0]
        if variant_only:
            lines.append("  convert   with --variant")
    sound = all(not item.problem or judged[item.name].sound for item in found)
    components = [item.to_json() | described[item.name][1] | {"layout": layouts[item.name]} for item in found]
    return Outcome("\n".join(lines), {"components": components}, OK if sound else BAD_INPUT)


def _inspect_gguf(path: Path) -> Outcome:
    from h3_mapper.gguf import describe_gguf, read_gguf

    lines, data = describe_gguf(path, read_gguf(path))
    return Outcome("\n".join(lines), {"components": [data]}, BAD_INPUT)


def _counts(dtypes: dict[str, int]) -> str:
    return ", ".join(f"{count} {dtype}" for dtype, count in sorted(dtypes.items()))


def run_plan(args: argparse.Namespace, progress: Progress | None) -> Outcome:
    """`plan`: the explanation, or with --json every block."""
    from h3_mapper.explain import explain, plan_json
    from h3_mapper.plan import plan
    from h3_mapper.source import config_file

    config = H3Config() if args.config is None else config_file(args.config)
    mapping = plan(config, args.stated, args.to)
    return Outcome(explain(mapping), plan_json(mapping))


def run_convert(args: argparse.Namespace, progress: Progress | None) -> Outcome:
    """`convert`, with its --tp and --variant forms."""
    from h3_mapper.convert import convert

    if args.tp is not None and not args.variant:
        return _convert_shards(args, progress)
    if args.variant:
        return _convert_variant(args, progress)
    done = convert(
        args.source,
        args.destination,
        args.to,
        stated=args.stated,
        max_shard_size=args.max_shard_size,
        digest=args.digest,
        threads=_threads(args),
        progress=progress,
    )
    lines = [
        f"{done.destination / each.name}: {each.source_layout} -> {done.layout}, {each.tensors} tensors, "
        f"{each.nbytes:,} bytes in {len(each.files)} files"
        for each in done.components
    ]
    components = [
        {
            "name": each.name,
            "from": each.source_layout,
            "files": each.files,
            "tensors": each.tensors,
            "bytes": each.nbytes,
        }
        for each in done.components
    ]
    data = {
        "destination": str(done.destination),
        "layout": done.layout,
        "bytes": done.nbytes,
        "components": components,
    }
    return Outcome("\n".join(lines), data)


def _convert_shards(args: argparse.Namespace, progress: Progress | None) -> Outcome:
    from h3_mapper.tp_files import convert_shards

    done = convert_shards(
        args.source,
        args.destination,
        args.tp,
        to=args.to,
        stated=args.stated,
        max_shard_size=args.max_shard_size,
        digest=args.digest,
        threads=_threads(args),
        progress=progress,
    )
    text = f"{done.destination}: {args.to}, {len(done.folders)} ranks, {done.nbytes:,} bytes"
    data = {"destination": str(done.destination), "layout": args.to, "bytes": done.nbytes}
    return Outcome(text, data | {"folders": [str(folder) for folder in done.folders]})


def _convert_variant(args: argparse.Namespace, progress: Progress | None) -> Outcome:
    from h3_mapper.variant_files import convert_variant

    found, nbytes = convert_variant(
        args.source,
        args.destination,
        args.to,
        stated=args.stated,
        tp=args.tp,
        max_shard_size=args.max_shard_size,
        threads=_threads(args),
        progress=progress,
    )
    text = f"{args.destination}: {found.variant.name}, {found.layout} -> {args.to}, {nbytes:,} bytes"
    data = {"destination": str(args.destination), "variant": found.variant.name, "from": found.layout}
    return Outcome(text, data | {"layout": args.to, "bytes": nbytes})


def run_verify(args: argparse.Namespace, progress: Progress | None) -> Outcome:
    """`verify`: exit code 1 and the first 20 differences if there are any."""
    from h3_mapper.verify import verify

    sides = (args.from_a or args.stated, args.from_b or args.stated)
    result = verify(
        args.a, args.b, stated=sides, digest=args.digest, threads=_threads(args), progress=progress
    )
    where = f"{args.a} ({result.layouts[0]}) and {args.b} ({result.layouts[1]})"
    lines = [
        f"  {d.component + ': ' if d.component else ''}{d.atom}: {d.reason}" for d in result.differences[:20]
    ]
    if result.equal:
        text = f"equal: {where} hold the same {result.atoms} atoms ({result.algorithm})"
    else:
        more = len(result.differences) - len(lines)
        lines += [f"  and {more} more"] if more else []
        head = f"DIFFERENT: {where}: {len(result.differences)} of {result.atoms} atoms differ"
        text = "\n".join([head, *lines, *([f"  {result.hint}"] if result.hint else [])])
    data = {
        "equal": result.equal,
        "atoms": result.atoms,
        "algorithm": result.algorithm,
        "layouts": result.layouts,
        "hint": result.hint,
        "differences": [
            {"component": d.component, "atom": d.atom, "reason": d.reason} for d in result.differences
        ],
    }
    return Outcome(text, data, OK if result.equal else DIFFERENT)


def run_manifest(args: argparse.Namespace, progress: Progress | None) -> Outcome:
    """`manifest`: the JSON itself, either way."""
    from h3_mapper.identify import identified_all
    from h3_mapper.manifest import compute

    if args.digest is Digest.NONE:
        raise ConfigError("--digest none: a manifest is its digests; choose xxh3 or blake3")
    made = {
        name: compute(found, args.digest, _threads(args), progress).to_json()
        for name, found in identified_all(args.path, args.stated).items()
    }
    data = made.get("", {"components": made})
    return Outcome(json.dumps(data, indent=1), data)


def run_demo(args: argparse.Namespace, progress: Progress | None) -> Outcome:
    """`demo`."""
    from h3_mapper.demo import demo

    return demo(args.keep)
