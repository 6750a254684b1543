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


def speed_figure(records: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw ours / theirs of every record that has a ratio as a horizontal bar; 1.0 is the peer, shorter is faster."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rated = [record for record in records if isinstance(record.get("ratio"), (int, float))]
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.18 * max(len(rated), 1)), layout="constrained")
    ratios = [float(record["ratio"]) for record in rated]
    axes.barh(range(len(rated)), ratios, color=[BETTER if ratio <= 1 else WORSE for ratio in ratios])
    axes.set_yticks(range(len(rated)), [label(record) for record in rated], fontsize=6)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("time / the named peer's in the same run (lower is faster)")
    axes.set_title(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
