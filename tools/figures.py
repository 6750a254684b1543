"""Figures made from result records. matplotlib is imported by the functions that draw."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

BETTER, WORSE = "#2a7f62", "#b3543c"

BINS = 25
"""Of an error histogram; odd, so that equal errors fall into the middle of one."""


def label(record: dict[str, Any]) -> str:
    """A record as one axis label: what was measured, at what size."""
    parts = [
        record.get(key)
        for key in (
            "benchmark",
            "subject",
            "op",
            "node",
            "contract",
            "direction",
            "dtype",
            "provider",
            "case",
        )
    ]
    rows = f"{record['rows']} rows" if "rows" in record else None
    tp = f"tp{record['tp']}" if record.get("tp", 1) != 1 else None
    return " ".join(str(part) for part in (*parts, rows, tp) if part)


def bars(records: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """Every ratio of the records, with a label; a record may compare with several peers."""
    found = []
    for record in records:
        ratio = record.get("ratio")
        if isinstance(ratio, dict):
            found += [(f"{label(record)} / {peer}", float(value)) for peer, value in ratio.items()]
        elif isinstance(ratio, (int, float)):
            found.append((label(record), float(ratio)))
    return found


def speed_figure(records: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw ours / theirs of every record that has a ratio as a horizontal bar; 1.0 is the peer, shorter is faster."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rated = bars(records)
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.18 * max(len(rated), 1)), layout="constrained")
    axes.barh(
        range(len(rated)),
        [ratio for _, ratio in rated],
        color=[BETTER if r <= 1 else WORSE for _, r in rated],
    )
    axes.set_yticks(range(len(rated)), [name for name, _ in rated], fontsize=6)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel("time / the named peer's in the same run (lower is faster)")
    axes.set_title(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def error_ratios(records: list[dict[str, Any]]) -> dict[str, list[float]]:
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


def error_figure(records: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw how our errors against fp64 compare with each peer's, as histograms; left of 1.0 we are closer."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    found = error_ratios(records)
    reach = max([abs(math.log2(ratio)) for ratios in found.values() for ratio in ratios] + [1.0])
    edges = [2 ** (reach * (2 * i - BINS) / BINS) for i in range(BINS + 1)]
    figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
    axes.hist(list(found.values()), bins=edges, stacked=True, label=[f"against {peer}" for peer in found])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("our error against fp64 / the peer's on the same inputs (left of 1 is closer)")
    axes.set_ylabel("records")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
