"""h3-mapper against `cp`: every direction on disk, mapping in memory against memcpy, torch+safetensors beside it.

    python benchmarks/mapper.py --out benchmarks/results/mapper_cpu.json
    python benchmarks/mapper.py --out evidence.json --only full-scale     # one 62 GiB conversion, nothing else

Each round runs the peer and us one after the other on the same warm source, in alternating order; a time is the whole
process, start to exit, with every output file fsynced. `ratio` is the median over rounds of ours / theirs: 1.05 means
5% slower than the peer. Peak RSS is the kernel's figure for our process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

from h3_mapper import H3Config, Layout, plan, tensors
from h3_mapper.safetensors_io import read_header
from h3_mapper.shards import DIFFUSERS_STEM, index_json, out_files

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from records import Writer  # noqa: E402

MAPPER = (sys.executable, "-m", "h3_mapper")
PEERS = (sys.executable, str(Path(__file__).with_name("mapper_peers.py")))
REAL = H3Config(num_layers=3, num_refiner_layers=1)
"""Tensors of the released sizes, 4.5 GiB of them."""
QUICK = H3Config(
    num_attention_heads=14,
    hidden_size=1344,
    ffn_dim=3584,
    num_layers=3,
    num_refiner_layers=1,
    text_dim=1280,
    time_embed_hidden_dim=1344,
    time_embed_dim=672,
)
"""A quarter of every width: 290 MiB, to try the benchmark itself."""


@dataclass(frozen=True)
class Timed:
    """One process: seconds from start to exit (and fsync), peak RSS in bytes."""

    seconds: float
    peak_rss: int


def run(command: Sequence[str | Path]) -> Timed:
    """Run a command to its end; raises CalledProcessError. The parent stays small, or its RSS would be charged."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    message = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=message.decode())
    return Timed(time.perf_counter() - began, usage.ru_maxrss * 1024)


def copied(source: Path, destination: Path) -> Timed:
    """`cp -r --reflink=never`, then an fsync of every file."""
    began = time.perf_counter()
    timed = run(["cp", "-r", "--reflink=never", source, destination])
    for path in destination.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    return Timed(time.perf_counter() - began, timed.peak_rss)


def converted(source: Path, destination: Path, to: str, digest: str = "xxh3") -> Timed:
    """`h3-mapper convert`, which fsyncs by itself."""
    return run([*MAPPER, "convert", source, destination, "--to", to, "--digest", digest])


def interleaved(
    ours: Callable[[Path], Timed], theirs: Callable[[Path], Timed], rounds: int, folder: Path
) -> dict[str, Any]:
    """Alternate the two, who goes first too; the first pair warms up and is not counted."""
    pairs = []
    for n in range(rounds + 1):
        timed: dict[str, Timed] = {}
        for name, call in sorted({"ours": ours, "theirs": theirs}.items(), reverse=bool(n % 2)):
            timed[name] = call(folder / "output")
            shutil.rmtree(folder / "output")
        pairs.append((timed["ours"], timed["theirs"]))
    counted = pairs[1:]
    return {
        "ours": statistics.median(ours.seconds for ours, _ in counted),
        "theirs": statistics.median(theirs.seconds for _, theirs in counted),
        "ratio": statistics.median(ours.seconds / theirs.seconds for ours, theirs in counted),
        "ratios": [round(ours.seconds / theirs.seconds, 4) for ours, theirs in counted],
        "peak_rss": max(ours.peak_rss for ours, _ in pairs),
        "theirs_peak_rss": max(theirs.peak_rss for _, theirs in pairs),
        "unit": "s",
        "rounds": rounds,
    }


def make(folder: Path, config: H3Config, sparse: bool = False) -> int:
    """A Diffusers checkpoint of 5 GB shards; returns its data bytes.

    Random bytes, or sparse: holes with 16 random bytes at the start of every block of rows that any layout moves,
    so that a block in a wrong place shows.
    """
    folder.mkdir()
    source = random.Random(0)
    files = out_files(tensors(config, Layout.DIFFUSERS), DIFFUSERS_STEM, 5 * 10**9, {})
    for file in files:
        with (folder / file.name).open("xb") as out:
            out.write(file.header)
            if sparse:
                out.truncate(file.size)
                continue
            for left in range(file.size - len(file.header), 0, -(1 << 20)):
                out.write(source.randbytes(min(left, 1 << 20)))
    if len(files) > 1:
        (folder / f"{DIFFUSERS_STEM}.safetensors.index.json").write_text(index_json(files))
    (folder / "config.json").write_text(json.dumps(config.to_json(native=False)))
    if sparse:
        mark(folder, config, source)
    return sum(spec.nbytes for spec in tensors(config, Layout.DIFFUSERS))


def mark(folder: Path, config: H3Config, source: random.Random) -> None:
    places = {}
    for path in folder.glob("*.safetensors"):
        header = read_header(path)
        places |= {name: (path, header.data_start + entry.begin) for name, entry in header.entries.items()}
    for target in plan(config, Layout.DIFFUSERS, Layout.RELEASE).targets:
        for rows in target.rows:
            path, begin = places[rows.name]
            with path.open("r+b") as out:
                out.seek(begin + rows.start * target.row_bytes)
                out.write(source.randbytes(min(16, target.row_bytes)))


def disk_records(folder: Path, config: H3Config, rounds: int) -> Iterator[dict[str, Any]]:
    """All six directions against cp, digests on; one source layout on disk at a time."""
    make(folder / "diffusers", config)
    for layout in (Layout.RELEASE, Layout.MODULE):
        converted(folder / "diffusers", folder / layout, layout)
    for source, target in permutations(Layout, 2):
        origin = folder / source
        nbytes = size(origin)
        measured = interleaved(
            lambda out, o=origin, t=target: converted(o, out, t),
            lambda out, o=origin: copied(o, out),
            rounds,
            folder,
        )
        subject = f"convert {source} -> {target}"
        yield {"subject": subject, "peer": "cp --reflink=never", "bytes": nbytes} | measured
    origin = folder / "diffusers"
    for peer, call in {
        "torch+safetensors streaming": lambda out: run([*PEERS, "stream", origin, out, "release"]),
        "h3-mapper, blake3 digests": lambda out: converted(origin, out, "release", "blake3"),
        "h3-mapper, no digests": lambda out: converted(origin, out, "release", "none"),
    }.items():
        measured = interleaved(lambda out: converted(origin, out, "release"), call, rounds, folder)
        yield {"subject": "convert diffusers -> release", "peer": peer, "bytes": size(origin)} | measured


def size(folder: Path) -> int:
    """Bytes of the folder's shards."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def memory_records(_folder: Path, config: H3Config, rounds: int) -> Iterator[dict[str, Any]]:
    """Mapping tensors in memory against memcpy of the same bytes, in a process of its own."""
    sizes = json.dumps(config.to_json(native=False))
    done = subprocess.run([*PEERS, "memory", sizes, str(rounds)], check=True, capture_output=True, text=True)
    yield from json.loads(done.stdout)


def full_scale(folder: Path, _config: H3Config, _rounds: int) -> Iterator[dict[str, Any]]:
    """The whole 33B model from a marked sparse source: convert, then verify. Holes are kept, so 20 GB of disk do."""
    free, needed = shutil.disk_usage(folder).free, 20 * 10**9
    if free < needed:
        raise SystemExit(
            f"--full-scale needs {needed / 1e9:.0f} GB and {folder} has {free / 1e9:.0f} GB free"
        )
    nbytes = make(folder / "diffusers", H3Config(), sparse=True)
    done = converted(folder / "diffusers", folder / "release", "release")
    checked = run([*MAPPER, "verify", folder / "diffusers", folder / "release"])
    names = ("convert diffusers -> release, 33B, sparse", "verify diffusers = release, 33B, sparse")
    for subject, timed in zip(names, (done, checked), strict=True):
        yield (
            {"subject": subject, "peer": None, "ours": timed.seconds, "theirs": None, "ratio": None}
            | {"unit": "s", "bytes": nbytes, "peak_rss": timed.peak_rss}
            | {"bytes_on_disk": on_disk(folder / "release")}
        )


def on_disk(folder: Path) -> int:
    """Bytes of disk the files take, holes not counted."""
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


PARTS = {"disk": disk_records, "memory": memory_records, "full-scale": full_scale}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the records")
    parser.add_argument(
        "--folder", type=Path, help="where to work (default: the temporary folder); needs 24 GiB"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="narrow tensors, 290 MiB: tries the benchmark, measures little"
    )
    parser.add_argument(
        "--layers", type=int, default=REAL.num_layers, help="blocks of released size (default 3)"
    )
    parser.add_argument(
        "--only", choices=PARTS, nargs="+", default=["disk", "memory"], help="parts (default: disk memory)"
    )
    args = parser.parse_args()
    config = QUICK if args.quick else replace(REAL, num_layers=args.layers)
    writer = Writer(args.out)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="h3-mapper-bench-") as name:
        for part in args.only:
            for record in PARTS[part](Path(name), config, args.rounds):
                writer.add(record)


if __name__ == "__main__":
    main()
