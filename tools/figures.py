"""Figures made from result records: speed, errors against fp64, and where runs part.

matplotlib is imported by the functions that draw. `FIGURES` lists every kind of figure with what it shows of a list of
records; records that have nothing of a kind give no figure of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]

BETTER, WORSE = "#2a7f62", "#b3543c"

BINS = 25
"""Of an error histogram; odd, so that equal errors fall into the middle of one."""

CONDITIONS = (
    "benchmark",
    "engine",
    "subject",
    "op",
    "node",
    "contract",
    "direction",
    "dtype",
    "provider",
    "form",
    "scope",
    "case",
    "adaln",
)
"""What of a record names a bar."""


def label(record: Record) -> str:
    """A record as one axis label: what was measured, at what size."""
    rows = f"{record['rows']} rows" if "rows" in record else None
    tp = f"tp{record['tp']}" if record.get("tp", 1) != 1 else None
    return " ".join(str(part) for part in (*map(record.get, CONDITIONS), rows, tp) if part)


def bars(records: list[Record]) -> list[tuple[str, float]]:
    """Every ratio of the records, with a label; a record may compare with several peers."""
    found = []
    for record in records:
        ratio = record.get("ratio")
        if isinstance(ratio, dict):
            found += [(f"{label(record)} / {peer}", float(value)) for peer, value in ratio.items()]
        elif isinstance(ratio, (int, float)):
            found.append((label(record), float(ratio)))
    return found


def draw_speed(axes: Any, rated: list[tuple[str, float]]) -> None:
    """Ours / theirs as horizontal bars from 1.0, the peer, on a logarithmic axis: to the left is faster."""
    ratios = [ratio for _, ratio in rated]
    places = range(len(rated))
    axes.barh(places, [r - 1 for r in ratios], left=1, color=[BETTER if r <= 1 else WORSE for r in ratios])
    axes.set_yticks(places, [name for name, _ in rated], fontsize=6)
    _axis_of_ratios(axes)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel("time / the named peer's in the same run (left of 1 is faster)")


def error_ratios(records: list[Record]) -> dict[str, list[float]]:
    """Peer -> our error against fp64 / the peer's, of every record that holds both; below 1 we are closer."""
    found: dict[str, list[float]] = {}
    for record in records:
        errors = record.get("error_fp64") or {}
        if "error" in record and "stock_error" in record:
            errors = {"ours": record["error"], "stock": record["stock_error"]}
        for peer, value in errors.items():
            if peer != "ours" and errors.get("ours") and value:
                found.setdefault(peer, []).append(float(errors["ours"]) / float(value))
    return found


def draw_errors(axes: Any, found: dict[str, list[float]]) -> None:
    """How our errors against fp64 compare with each peer's, as histograms; left of 1.0 we are closer."""
    reach = max([abs(math.log2(ratio)) for ratios in found.values() for ratio in ratios] + [1.0])
    edges = [2 ** (reach * (2 * i - BINS) / BINS) for i in range(BINS + 1)]
    axes.hist(list(found.values()), bins=edges, stacked=True, label=[f"against {peer}" for peer in found])
    _axis_of_ratios(axes)
    axes.set_xlabel("our error against fp64 / the peer's on the same inputs (left of 1 is closer)")
    axes.set_ylabel("records")
    axes.legend()


def shares(records: list[Record]) -> list[Record]:
    """The records that compare two traces: `outputs` in the order computed, and the `share` of rows that differ."""
    return [record for record in records if record.get("outputs") and "share" in record]


def draw_divergence(axes: Any, compared: list[Record]) -> None:
    """The share of rows that differ, output by output; a mark where two runs part. Later lines are thinner."""
    for i, record in enumerate(compared):
        first = next((i for i, share in enumerate(record["share"]) if share), None)
        where = "equal" if first is None else f"parts at {record['outputs'][first]}"
        style = {"drawstyle": "steps-mid", "linewidth": 1.2 * (len(compared) - i)}
        (line,) = axes.plot(record["share"], label=f"{record['case']}: {where}", **style)
        if first is not None:
            axes.plot(first, record["share"][first], "o", markersize=9, color=line.get_color())
    blocks = _first_of_each_block(compared[0]["outputs"])
    axes.set_xticks(list(blocks.values()), list(blocks), rotation=20, ha="right", fontsize=7)
    axes.set(xlabel="output, in the order computed", ylabel="share of rows that differ", ylim=(-0.03, 1.03))
    axes.figure.legend(fontsize=8, loc="outside lower center")


def _first_of_each_block(outputs: list[str]) -> dict[str, int]:
    """`token_refiner.blocks.1`, `blocks.0`, ... and `final_layer`: the index of each one's first output."""
    found: dict[str, int] = {}
    for i, output in enumerate(outputs):
        name = re.match(r"(.*\.)?blocks\.\d+|final_layer", output)
        if name:
            found.setdefault(name[0], i)
    return found


KERNEL_COLORS = {"gemm": "#3f6f9f", "attention": "#c08a3e", "rest": "#8a8a8a"}


def kernel_times(records: list[Record]) -> list[tuple[str, dict[str, float]]]:
    """GPU time by kind of kernel of each profiled run, as a share of the same run as shipped; with a label."""
    profiled = [r for r in records if r.get("case") == "kernels" and r["busy_ms"]]
    whole = {_run(r): sum(r["busy_ms"].values()) for r in profiled if r["variant"] == "stock"}
    return [
        (
            f"{r['engine']} {r['direction']}, {r['rows']} rows, {_VARIANTS[r['variant']]}",
            {kind: spent / whole[_run(r)] for kind, spent in r["busy_ms"].items()},
        )
        for r in profiled
        if _run(r) in whole
    ]


_VARIANTS = {"stock": "as shipped", "ours": "bound"}


def _run(record: Record) -> tuple[Any, ...]:
    return record["engine"], record["direction"], record["rows"]


def draw_kernel_times(axes: Any, runs: list[tuple[str, dict[str, float]]]) -> None:
    """One bar a run, in pieces by kind of kernel."""
    start = [0.0] * len(runs)
    for kind, color in KERNEL_COLORS.items():
        widths = [parts.get(kind, 0.0) for _, parts in runs]
        axes.barh(range(len(runs)), widths, left=start, color=color, label=kind)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    axes.set_yticks(range(len(runs)), [name for name, _ in runs], fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("GPU time / that of the same run as shipped")
    axes.legend(fontsize=7, loc="lower right")


def node_times(records: list[Record]) -> list[tuple[str, float]]:
    """Share of a forward's time of each node, over all blocks, largest first; of the most rows measured."""
    timed = [r for r in records if r.get("case") == "node"]
    most = max((r["rows"] for r in timed), default=0)
    spent = {r["node"]: r["ours_ms"] for r in timed if r["rows"] == most}
    total = sum(spent.values())
    ordered = sorted(spent.items(), key=lambda item: -item[1])
    return [(f"{node}: {ms:.1f} ms", ms / total) for node, ms in ordered]


def draw_node_times(axes: Any, nodes: list[tuple[str, float]]) -> None:
    """One bar a node."""
    axes.barh(range(len(nodes)), [share for _, share in nodes], color=BETTER)
    axes.set_yticks(range(len(nodes)), [name for name, _ in nodes], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("share of a bound forward, all blocks together")


def _axis_of_ratios(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axvline(1.0, color="black", linewidth=0.8)


@dataclass(frozen=True)
class Figure:
    """One kind of figure: what it shows of records (empty: nothing), how that is drawn, and how tall, in inches."""

    kind: str
    values: Callable[[list[Record]], Any]
    draw: Callable[[Any, Any], None]
    height: Callable[[Any], float]


SPEED = Figure("speed", bars, draw_speed, lambda rated: 1.5 + 0.18 * len(rated))

FIGURES = (
    SPEED,
    Figure("errors", error_ratios, draw_errors, lambda found: 3.0),
    Figure("kernels", kernel_times, draw_kernel_times, lambda runs: 1.5 + 0.25 * len(runs)),
    Figure("nodes", node_times, draw_node_times, lambda nodes: 1.5 + 0.2 * len(nodes)),
    Figure("divergence", shares, draw_divergence, lambda compared: 4.0 + 0.2 * len(compared)),
)


def save(figure: Figure, records: list[Record], path: Path, title: str) -> None:
    """Draw one kind of figure of `records` as a PNG."""
    from matplotlib.figure import Figure as Canvas

    values = figure.values(records)
    canvas = Canvas(figsize=(9, figure.height(values)), layout="constrained")
    axes = canvas.subplots()
    figure.draw(axes, values)
    axes.set_title(title)
    canvas.savefig(path, dpi=120)


def speed_figure(records: list[Record], path: Path, title: str) -> None:
    """An evidence folder's figure: every ratio; empty axes where a run measured none."""
    save(SPEED, records, path, title)
