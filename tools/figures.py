"""Figures made from result records. matplotlib is imported by the functions that draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BETTER, WORSE = "#2a7f62", "#b3543c"


def label(record: dict[str, Any]) -> str:
    """A record as one axis label: what was measured, at what size."""
    parts = [
        record.get(key)
        for key in ("benchmark", "subject", "op", "node", "contract", "direction", "provider", "case")
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
    axes.invert_yaxis()
    axes.set_xlabel("time / the named peer's in the same run (lower is faster)")
    axes.set_title(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
