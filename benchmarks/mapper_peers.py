"""What h3-mapper is measured against, in processes of their own: torch+safetensors streaming, and memcpy.

mapper_peers.py stream SRC DST LAYOUT        read shards lazily, torch.cat rows, save_file each output shard
mapper_peers.py memory CONFIG_JSON ROUNDS    one JSON list of records on stdout
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from h3_mapper import H3Config, Layout, convert_state_dict, plan, tensors
from h3_mapper.shards import NATIVE_STEM, index_json, out_files
from safetensors import safe_open
from safetensors.torch import save_file

TORCH = {"F32": torch.float32, "BF16": torch.bfloat16}


def stream(source: Path, destination: Path, layout: Layout) -> None:
    """The usual script, done well: lazy slices in, one output shard in memory at a time, fsync."""
    config = H3Config.from_mapping(json.loads((source / "config.json").read_text()))
    opened = [safe_open(path, framework="pt") for path in sorted(source.glob("*.safetensors"))]
    where = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - not a mapping
    targets = {target.name: target for target in plan(config, Layout.DIFFUSERS, layout).targets}
    files = out_files(list(targets.values()), NATIVE_STEM, 5 * 10**9, {})
    destination.mkdir()
    for file in files:
        held = {}
        for entry in file.entries:
            target = targets[entry.name]
            if target.data is not None:
                held[entry.name] = torch.frombuffer(bytearray(target.data), dtype=torch.float32)
                continue
            parts = [where[rows.name].get_slice(rows.name)[rows.start : rows.stop] for rows in target.rows]
            held[entry.name] = torch.cat(parts) if len(parts) > 1 else parts[0]
        save_file(held, destination / file.name, metadata={"format": "pt"})
        fd = os.open(destination / file.name, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    if len(files) > 1:
        (destination / f"{NATIVE_STEM}.safetensors.index.json").write_text(index_json(files))


def memory(config: H3Config, rounds: int) -> list[dict[str, Any]]:
    """convert_state_dict into given tensors against memcpy, and into new ones against clone().

    One block's tensors: memory stays small and every moved shape is there.
    """
    torch.set_num_threads(1)
    one = H3Config.from_mapping(config.to_json(native=False) | {"num_layers": 1, "num_refiner_layers": 1})
    pairs = ((Layout.DIFFUSERS, Layout.RELEASE), (Layout.RELEASE, Layout.DIFFUSERS))
    return [record for source, target in pairs for record in memory_pair(one, source, target, rounds)]


def memory_pair(config: H3Config, source: Layout, target: Layout, rounds: int) -> list[dict[str, Any]]:
    mapping = plan(config, source, target)
    state = filled(config, Layout.DIFFUSERS)
    if source is not Layout.DIFFUSERS:
        state = convert_state_dict(state, plan(config, Layout.DIFFUSERS, source))
    out = {name: tensor.clone() for name, tensor in convert_state_dict(state, mapping).items()}
    spare = {name: tensor.clone() for name, tensor in state.items()}
    moved = {rows.name for t in mapping.targets if len(t.rows) > 1 or is_part(t, state) for rows in t.rows}
    into = alternate(
        lambda: convert_state_dict(state, mapping, out=out), lambda: memcpy(state, spare), rounds
    )
    anew = alternate(
        lambda: convert_state_dict(state, mapping), lambda: [state[name].clone() for name in moved], rounds
    )
    subject = f"in memory {source} -> {target}"
    return [
        {"subject": f"{subject}, into given tensors", "peer": "memcpy", "bytes": nbytes(state, state)} | into,
        {"subject": f"{subject}, new tensors", "peer": "clone of what moves", "bytes": nbytes(state, moved)}
        | anew,
    ]


def nbytes(state: dict[str, torch.Tensor], names: Iterable[str]) -> int:
    return sum(state[name].nbytes for name in names)


def is_part(target: Any, state: dict[str, torch.Tensor]) -> bool:
    """Whether the target is one window of a larger tensor, which is copied (a view would keep it alive)."""
    return bool(target.rows) and tuple(state[target.rows[0].name].shape) != target.shape


def filled(config: H3Config, layout: Layout) -> dict[str, torch.Tensor]:
    return {s.name: torch.zeros(s.shape, dtype=TORCH[s.dtype]).add_(1) for s in tensors(config, layout)}


def memcpy(state: dict[str, torch.Tensor], spare: dict[str, torch.Tensor]) -> None:
    """libc's memcpy, tensor by tensor, into memory that is already mapped."""
    for name, tensor in state.items():
        ctypes.memmove(spare[name].data_ptr(), tensor.data_ptr(), tensor.nbytes)


def alternate(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> dict[str, Any]:
    """Medians of alternating calls; the first pair is not counted."""
    pairs = []
    for _ in range(rounds + 1):
        seconds = []
        for call in (ours, theirs):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
        pairs.append(seconds)
    counted = pairs[1:]
    return {
        "ours": statistics.median(a for a, _ in counted),
        "theirs": statistics.median(b for _, b in counted),
        "ratio": statistics.median(a / b for a, b in counted),
        "ratios": [round(a / b, 4) for a, b in counted],
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "unit": "s",
        "rounds": rounds,
    }


def main() -> None:
    match sys.argv[1:]:
        case ["stream", source, destination, layout]:
            stream(Path(source), Path(destination), Layout(layout))
        case ["memory", sizes, rounds]:
            print(json.dumps(memory(H3Config.from_mapping(json.loads(sizes)), int(rounds))))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
