"""What README.md says of the result files of benchmarks/results: two sentences and the tables of its subjects."""

from __future__ import annotations

from typing import Any

import records
from h3_kernels import contract
from result_tables import RESULTS, machine, table


def headline() -> str:
    """README's first numbers: whether the engines agree, and what that and a conversion cost."""
    return "\n".join(part for part in (bits(records.load(RESULTS / "gates_h200.json")), cost()) if part)


def bits(found: list[dict[str, Any]]) -> str:
    """How far the engines' velocities agree at the largest size measured, bound and as shipped."""
    bound, shipped = (
        max((r for r in found if r["case"] == case), key=lambda r: int(r["rows"]), default=None)
        for case in ("velocities of both engines", "twin: as shipped")
    )
    if bound is None or shipped is None:
        return ""
    model = f"{bound['blocks']} blocks of full width, random weights and {bound['rows']} rows"
    differ = f"**{bound['differing']:,} of {bound['values']:,} velocities differ** between the two engines"
    return f"On an H200, {model}, {differ}; as shipped {shipped['differing']:,} do.\n"


def cost() -> str:
    """The range of each kind of ratio."""
    steps = [r for r in records.load(RESULTS / "step_h200.json") if _is_whole_step(r)]
    eager = [r for r in steps if "case" not in r]
    longest = max((r["rows"] for r in eager), default=0)
    whole = "whole forwards and training steps"
    found = {
        ("converting a checkpoint", "`cp`"): [
            r for r in records.load(RESULTS / "mapper_cpu.json") if _is_conversion(r)
        ],
        (f"{whole}, {longest} rows", "the engines as shipped"): [r for r in eager if r["rows"] == longest],
        (f"{whole}, fewer rows, launched node by node", "the same"): [
            r for r in eager if r["rows"] < longest
        ],
        ("forwards of fewer rows, from CUDA graphs", "the same"): [r for r in steps if "case" in r],
        ("single linears of the contracts", "`F.linear`"): [
            r for r in records.load(RESULTS / "gemm_h200.json") if _is_default_linear(r)
        ],
    }
    rows = [(*what, _range([r["ratio"] for r in rated])) for what, rated in found.items() if rated]
    return table(("", "against", "time / the peer's"), rows) if rows else ""


def _range(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def measured() -> str:
    """README's summary: the headline of each subject that was measured."""
    parts = [
        conversion(records.load(RESULTS / "mapper_cpu.json")),
        linears(records.load(RESULTS / "gemm_h200.json")),
        whole_steps(records.load(RESULTS / "step_h200.json")),
    ]
    return "\n".join(part for part in parts if part) + "\nEvery record: [docs/results.md](docs/results.md).\n"


def _is_conversion(record: dict[str, Any]) -> bool:
    return record.get("peer") == "cp --reflink=never"


def _is_default_linear(record: dict[str, Any]) -> bool:
    """A forward with the provider that is chosen, at one rank and under the default contracts."""
    chosen = (
        record.get("auto") and record.get("ratio") and record["tp"] == 1 and record["direction"] == "forward"
    )
    return bool(chosen) and record["contract"] in {contract.PROJECTION, contract.parallel_id(contract.UNITS)}


def conversion(found: list[dict[str, Any]]) -> str:
    """One line per direction of converting a checkpoint, against `cp` of the same bytes."""
    rows = [
        (
            r["subject"],
            f"{r['ratio']:.2f}",
            f"{r['bytes'] / r['ours'] / 1e9:.1f} GB/s",
            f"{r['peak_rss'] / 2**20:.0f} MiB",
        )
        for r in found
        if _is_conversion(r)
    ]
    head = ("h3-mapper, files fsynced, digests on", "time / `cp`", "speed", "peak memory")
    return f"{table(head, rows)}\n{machine(found)}\n" if rows else ""


def linears(found: list[dict[str, Any]]) -> str:
    """Forward of the four linears with the provider that is chosen, at one rank and the default contracts."""
    shown = [r | {"contract": f"`{r['contract']}`"} for r in found if _is_default_linear(r)]
    return _by_rows(found, shown, ("op", "contract"), ("h3-kernels, time / stock `F.linear`", "contract"))


def whole_steps(found: list[dict[str, Any]]) -> str:
    """Denoise forwards of both engines and the trainer's LoRA step, every node bound, against the engine as shipped."""
    runs = {
        ("forward", None): "forward",
        ("forward", "graph"): "forward, CUDA graph",
        ("step", None): "LoRA training step",
    }
    shown = [r | {"run": runs[r["direction"], r.get("case")]} for r in found if _is_whole_step(r)]
    return _by_rows(found, shown, ("engine", "run"), ("whole transformer, time / as shipped", "run"))


def _is_whole_step(record: dict[str, Any]) -> bool:
    """A run of all blocks, eager or captured, not extrapolated, that does not ask the engine's cache of timesteps."""
    plain = "measured_blocks" not in record and record.get("adaln") != "cached"
    return plain and record.get("case") in (None, "graph") and bool(record.get("ratio"))


def _by_rows(
    found: list[dict[str, Any]], shown: list[dict[str, Any]], keys: tuple[str, str], head: tuple[str, str]
) -> str:
    """Ratios with a line for each pair of conditions and a column for each number of rows."""
    sizes = sorted({r["rows"] for r in shown})
    cells = {(*map(r.get, keys), r["rows"]): f"{r['ratio']:.2f}" for r in shown}
    pairs = dict.fromkeys(tuple(map(r.get, keys)) for r in shown)
    rows = [
        (first, second, *(cells.get((first, second, size), "") for size in sizes)) for first, second in pairs
    ]
    return f"{table((*head, *(f'{size} rows' for size in sizes)), rows)}\n{machine(found)}\n" if rows else ""
