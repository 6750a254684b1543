"""Weight sync and its proof, trainer to rollout, on tensors of the released sizes: time beside a copy of the bytes.

    python benchmarks/sync.py --out benchmarks/results/sync_cpu.json
    python benchmarks/sync.py --out benchmarks/results/sync_h200.json     # on CUDA, where there is one: all 50 blocks

The model streams through buffers, one for each shape, so 62 GiB of shapes need 3 GiB. Each round runs ours and the peer
in alternating order; a time is a whole step, Python included, from an idle device to an idle device. `ratio` is the
median of ours / theirs over rounds; for copies, `bandwidth_share` is its inverse. `peak_extra` is the most memory the
device allocator held above the buffers, beside `block_bytes`, one block of the model.

Subjects: `push` and `load_into` as the documentation describes them; mapping alone (`push` on tensors without data, and
`push_shards`, which makes views only); `LiveDigest`, beside one sum over the same bytes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from h3_mapper import H3Config, Layout, plan, tensors
from h3_mapper.sync import WeightSync
from h3_mapper.sync_proof import LiveDigest
from h3_mapper.tp import shard

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from records import Writer  # noqa: E402

KINDS = {"BF16": torch.bfloat16, "F32": torch.float32}
Named = list[tuple[str, torch.Tensor]]


class Bench:
    """Buffers on one device, one for each shape and dtype on each side."""

    def __init__(self, config: H3Config, device: str, rounds: int):
        self.config, self.device, self.rounds = config, torch.device(device), rounds
        self.pool: dict[tuple[str, tuple[int, ...], str], torch.Tensor] = {}
        self.source = [
            (f"transformer.{s.name}", self.buffer("trainer", s.shape, s.dtype))
            for s in tensors(config, Layout.DIFFUSERS)
        ]
        self.block = sum(s.nbytes for s in tensors(config, Layout.DIFFUSERS) if s.group == "blocks.0")

    def buffer(self, side: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        key = (side, shape, dtype)
        if key not in self.pool:
            made = torch.empty(shape, dtype=KINDS[dtype], device=self.device)
            self.pool[key] = made if made.is_meta else made.normal_()
        return self.pool[key]

    def engine(self, tp: int, rank: int) -> dict[str, torch.Tensor]:
        """Live parameters of one rank; parameters of one shape share memory, which costs a copy nothing."""
        sharded = shard(plan(self.config, Layout.DIFFUSERS, Layout.MODULE), tp, rank)
        return {f"transformer.{t.name}": self.buffer("engine", t.shape, t.dtype) for t in sharded.targets}

    def idle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, call: Callable[[], object]) -> tuple[float, int]:
        """(seconds, device bytes held above the start at the worst moment)."""
        self.idle()
        before = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        began = time.perf_counter()
        call()
        self.idle()
        seconds = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else before
        return seconds, peak - before

    def compare(
        self, subject: str, ours: Callable[[], object], peer: str, theirs: Callable[[], object], nbytes: int
    ) -> dict[str, Any]:
        pairs = []
        for n in range(self.rounds + 1):
            calls = [("ours", ours), ("theirs", theirs)]
            timed = {name: self.timed(call) for name, call in (calls if n % 2 else calls[::-1])}
            pairs.append((timed["ours"], timed["theirs"]))
        counted = pairs[1:]
        ratio = statistics.median(a[0] / b[0] for a, b in counted)
        record = {
            "subject": subject,
            "peer": peer,
            "ours": statistics.median(a[0] for a, _ in counted),
            "theirs": statistics.median(b[0] for _, b in counted),
            "ratio": ratio,
            "bandwidth_share": 1 / ratio,
            "ratios": [round(a[0] / b[0], 4) for a, b in counted],
            "bytes": nbytes,
            "peak_extra": max(a[1] for a, _ in counted),
            "block_bytes": self.block,
            "device": str(self.device),
            "layers": self.config.num_layers,
            "unit": "s",
            "rounds": self.rounds,
        }
        return record


def pushed(bench: Bench, source: Named, target: Layout) -> None:
    sync = WeightSync(bench.config, target)
    for _ in sync.push(source):
        pass
    sync.finish()


def copied(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for out, tensor in pairs:
        out.copy_(tensor)


def loaded(bench: Bench, engine: dict[str, torch.Tensor], tp: int, rank: int) -> None:
    sync = WeightSync(bench.config, Layout.MODULE, tp=tp, rank=rank)
    sync.load_into(bench.source, engine)
    sync.finish()


def cut(bench: Bench) -> None:
    sync = WeightSync(bench.config)
    for _ in sync.push_shards(bench.source):
        pass
    sync.finish()


def digested(bench: Bench, layout: Layout, named: Named) -> None:
    digest = LiveDigest(bench.config, layout)
    for name, tensor in named:
        digest.add(name.removeprefix("transformer."), tensor)
    digest.partials()


def summed(source: Named) -> None:
    """One pass over the bytes: the sum of their 8-byte words (of the values, where a vector is not whole words)."""
    for _, tensor in source:
        words = tensor.view(torch.int64) if tensor.shape[-1] * tensor.element_size() % 8 == 0 else tensor
        words.sum()


def records(bench: Bench) -> Iterator[dict[str, Any]]:
    total = sum(tensor.nbytes for _, tensor in bench.source)
    moved = [
        (n, t)
        for n, t in bench.source
        if any(part in n for part in (".to_q.", ".to_k.", ".to_v.", ".ff.net.0."))
    ]
    fused = sum(tensor.nbytes for _, tensor in moved)
    specs = {f"transformer.{spec.name}": spec for spec in tensors(bench.config, Layout.DIFFUSERS)}

    def copies(source: Named) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(bench.buffer("copy", specs[n].shape, specs[n].dtype), t) for n, t in source]

    for target in (Layout.RELEASE, Layout.MODULE):
        yield bench.compare(
            f"push to {target}: qkv and fc1 moved, the rest handed on",
            partial(pushed, bench, bench.source, target),
            "copy of the bytes moved",
            partial(copied, copies(moved)),
            fused,
        )
    yield bench.compare(
        "load_into, tp 1",
        partial(loaded, bench, bench.engine(1, 0), 1, 0),
        "copy",
        partial(copied, copies(bench.source)),
        total,
    )
    engine = bench.engine(8, 3)
    names = {kind: name for name, kind in KINDS.items()}
    shards = [(bench.buffer("copy", tuple(t.shape), names[t.dtype]), t) for t in engine.values()]
    yield bench.compare(
        "load_into, rank 3 of tp 8",
        partial(loaded, bench, engine, 8, 3),
        "copy of the shard",
        partial(copied, shards),
        sum(t.nbytes for t in engine.values()),
    )
    everything = partial(copied, copies(bench.source))
    yield bench.compare(
        "push_shards: views only", partial(cut, bench), "copy of all bytes", everything, total
    )
    empty = Bench(bench.config, "meta", bench.rounds)
    yield bench.compare(
        "push to release, mapping alone (no data)", partial(pushed, empty, empty.source, Layout.RELEASE),
        "copy of all bytes", everything, total,
    )  # fmt: skip
    yield bench.compare(
        "LiveDigest of the trainer",
        partial(digested, bench, Layout.DIFFUSERS, bench.source),
        "sum of the same bytes",
        partial(summed, bench.source),
        total,
    )
    native = [
        (f"transformer.{s.name}", bench.buffer("engine", s.shape, s.dtype))
        for s in tensors(bench.config, Layout.RELEASE)
    ]
    yield bench.compare(
        "LiveDigest of native tensors, rows grouped by head",
        partial(digested, bench, Layout.RELEASE, native),
        "sum of the same bytes",
        partial(summed, native),
        total,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the records")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, help="blocks (default: 50 on CUDA, 4 on a CPU)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    layers = args.layers or (4 if args.device == "cpu" else 50)
    bench = Bench(replace(H3Config(), num_layers=layers, num_refiner_layers=1), args.device, args.rounds)
    writer = Writer(args.out)
    with torch.no_grad():
        for record in records(bench):
            writer.add(record)


if __name__ == "__main__":
    main()
