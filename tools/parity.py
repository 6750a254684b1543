"""The same tiny weights through both real engines, with and without the h3 adapters: how many bytes differ?

Trainer: Diffusers' MiniMaxH3Transformer3DModel in this process. Rollout: vLLM-Omni's MiniMaxH3DiTModel in
worker processes, at tensor-parallel degree 1 to 8. h3-mapper carries the weights. Every case runs twice, as
shipped and bound to the contracts, and compares the float32 velocities of all rows. Exit status 1 if a bound
case differs.

    python tools/parity.py [--json FILE] [--only TEXT]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what the engines import is theirs
    import torch
    from h3_adapter_diffusers.install import install_h3_training
    from h3_adapter_diffusers.testing.native import native_adapters
    from h3_adapter_diffusers.testing.tiny import build, velocities
    from h3_mapper.apply import diffusers_to_native
    from peft import LoraConfig
    from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from parity_rollout import RANK, REQUESTS, rollout
from records import write

SCOPE = "model"
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]


@dataclass(frozen=True)
class Case:
    """One comparison: which rows, at which degree, with how much padding, with or without LoRA."""

    requests: str
    tp: int = 1
    padding: int = 0
    lora: bool = False

    def __str__(self) -> str:
        return f"{self.requests:<9} tp={self.tp} padding={self.padding:<2} {'LoRA' if self.lora else ''}".rstrip()


CASES = (
    *(Case(requests) for requests in ("t2va", "fl2va", "ref2va")),
    *(Case("fl2va", tp) for tp in (2, 4, 8)),
    *(Case("fl2va", tp, padding=13) for tp in (1, 4)),
    *(Case("fl2va", tp, lora=True) for tp in (1, 2, 4, 8)),
    *(Case("3 packed", tp, padding=padding) for tp, padding in ((1, 0), (1, 5), (2, 0))),
    Case("ref2va", 8, padding=29, lora=True),
    Case("3 packed", 8, padding=7, lora=True),
)


@dataclass(frozen=True)
class Result:
    """Differing bytes of a case, of `bytes` compared; None if the engine refuses the case as shipped."""

    case: Case
    bytes: int
    bound: int
    shipped: int | None
    note: str = ""


def trainer(case: Case, *, bound: bool) -> list[Tensor]:
    """Velocities of every request, video and audio, from Diffusers."""
    model = build()
    if case.lora:
        add_lora(model)
    if bound:
        install_h3_training(model, scope=SCOPE)
    outputs = [velocities(model, request) for request in REQUESTS[case.requests]]
    return [torch.cat(rows) for rows in zip(*outputs, strict=True)]


def add_lora(model: Any) -> None:
    """A random bf16 adapter on every linear the rollout engine can serve one for."""
    torch.manual_seed(7)
    model.add_adapter(
        LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, init_lora_weights=False)
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.bfloat16()


def write_weights(path: str) -> None:
    """The trainer's weights and adapter in the rollout's names and rows."""
    model = build()
    state = diffusers_to_native(model.state_dict(), layout="release", config=dict(model.config))
    add_lora(model)
    torch.save((state, list(native_adapters(model))), path)


def differing(ours: list[Tensor], theirs: list[Any]) -> int:
    """Bytes that differ."""
    pairs = zip(ours, (torch.from_numpy(rows) for rows in theirs), strict=True)
    return sum(
        int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum()) for a, b in pairs
    )


def run(pool: Any, case: Case, path: str) -> Result:
    """Both engines, bound and as shipped."""
    counts: dict[bool, int | str] = {}
    for bound in (True, False):
        ours = trainer(case, bound=bound)
        ranks = pool.run(
            rollout, path, case.requests, case.padding, case.lora, SCOPE if bound else None, tp=case.tp
        )
        refused = next((rank for rank in ranks if isinstance(rank, str)), None)
        counts[bound] = refused or max(differing(ours, rank) for rank in ranks)
    total = sum(rows.numel() * rows.element_size() for rows in ours)
    shipped, bound_bytes = counts[False], counts[True]
    if isinstance(bound_bytes, str):
        return Result(case, total, total, None, f"refused when bound: {bound_bytes}")
    if isinstance(shipped, str):
        return Result(
            case, total, bound_bytes, None, "the engine as shipped refuses this packing on this backend"
        )
    return Result(case, total, bound_bytes, shipped)


def table(results: Sequence[Result]) -> str:
    """The results as text."""
    lines = [f"{'case':<34} {'bytes':>6}  {'differ, with adapters':>21}  {'without':>9}"]
    for r in results:
        shipped = "refused" if r.shipped is None else str(r.shipped)
        lines.append(f"{r.case!s:<34} {r.bytes:>6}  {r.bound:>21}  {shipped:>9}  {r.note}".rstrip())
    return "\n".join(lines)


def main() -> int:
    """Run the cases and print the table."""
    from h3_adapter_vllm.testing.pool import TensorParallelPool

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write them here, as a result file")
    parser.add_argument("--only", default="", help="cases whose line contains this text")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["PYTHONWARNINGS"] = "ignore"  # of the workers: what vLLM and torch say there hides the table
    with TensorParallelPool() as pool, tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "weights.pt")
        write_weights(path)
        results = [run(pool, case, path) for case in CASES if arguments.only in str(case)]
    print(table(results))
    if arguments.json:
        write(arguments.json, map(asdict, results))
    return int(any(r.bound for r in results))


if __name__ == "__main__":
    sys.exit(main())
