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
    head = str(bound.get("environment", {}).get("head", "unknown"))[:12]
    return f"On an H200, {model}, {differ}; as shipped {shipped['differing']:,} do (measured at `{head}`).\n"


def cost() -> str:
    """The range of each kind of ratio."""
    steps = _whole_steps(records.load(RESULTS / "step_h200.json"))
    eager, from_graphs, both = (
        [r for r in steps if r.get("case") in cases]
        for cases in ((None,), OURS_FROM_GRAPHS, BOTH_FROM_GRAPHS)
    )
    longest = max((r["rows"] for r in eager), default=0)
    whole, shipped = "whole forwards and training steps", "the engines as shipped"
    found = {
        ("converting a checkpoint", "`cp`"): [
            r for r in records.load(RESULTS / "mapper_cpu.json") if _is_conversion(r)
        ],
        (f"{whole}, {longest} rows", shipped): [r for r in eager if r["rows"] == longest],
        (f"{whole}, fewer rows, launched node by node", shipped): [r for r in eager if r["rows"] < longest],
        (f"{whole}, fewer rows, from CUDA graphs", shipped): from_graphs,
        (f"{whole}, fewer rows, from CUDA graphs", "the engines captured too"): both,
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
    shown = [r | {"run": RUNS[r["direction"], r.get("case")]} for r in _whole_steps(found)]
    return _by_rows(found, shown, ("engine", "run"), ("whole transformer, time / the engine's", "run"))


RUNS = {
    ("forward", None): "forward",
    ("forward", "replayed"): "forward from CUDA graphs / as shipped",
    ("forward", "graph"): "forward, both from CUDA graphs",
    ("step", None): "LoRA training step",
    ("step", "captured"): "LoRA training step from CUDA graphs / as shipped",
    ("step", "both captured"): "LoRA training step, both from CUDA graphs",
}
OURS_FROM_GRAPHS, BOTH_FROM_GRAPHS = ("replayed", "captured"), ("graph", "both captured")
STOCK_CAPTURED = ("stock_captured_ms", "stock_captured_without_rng_states_ms")


def _whole_steps(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of all blocks, not extrapolated, that do not ask the engine's cache of timesteps; a captured step a second
    time where the engine's own could be captured, against that."""
    runs = []
    for r in found:
        plain = "measured_blocks" not in r and r.get("adaln") != "cached"
        if plain and r.get("ratio") and (r["direction"], r.get("case")) in RUNS:
            runs.append(r)
            runs += [
                r | {"case": "both captured", "ratio": r["ours_ms"] / r[peer]}
                for peer in STOCK_CAPTURED
                if peer in r
            ]
    return runs


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
