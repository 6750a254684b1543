"""``python -m h3_kernels.trace compare A B``: print, and if asked draw, where two traces part."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from h3_kernels.errors import H3KernelsError
from h3_kernels.trace.compare import Divergence, divergences, velocity_drift
from h3_kernels.trace.record import Trace
from h3_kernels.trace.store import load


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: equal; 1: they differ; 2: they cannot be compared or opened."""
    arguments = _parser().parse_args(argv)
    try:
        a, b = load(arguments.a), load(arguments.b)
        found = list(divergences(a, b))
    except (H3KernelsError, OSError, ValueError) as error:
        print(f"h3_kernels.trace: {error}")
        return 2
    print(
        f"A {a.label}, B {b.label}: {len(a.steps)} and {len(b.steps)} steps, {_compared(a, b)} outputs compared"
    )
    print(f"first difference: {found[0]}" if found else "equal: every row of every output both recorded")
    for line in _table(found, arguments.limit):
        print(line)
    for number, streams in enumerate(velocity_drift(a, b)):
        if any(streams.values()):
            print(
                f"step {number}: largest velocity difference "
                + ", ".join(f"{k} {v:.3e}" for k, v in streams.items())
            )
    if arguments.plot:
        _plot(a, found, arguments.plot)
        print(f"drawn to {arguments.plot}")
    return 1 if found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m h3_kernels.trace", description=__doc__)
    commands = parser.add_subparsers(required=True)
    compare = commands.add_parser("compare", help="compare two traces written by h3_kernels.trace.save")
    compare.add_argument("a", metavar="A", help="path of a trace, with or without its suffix")
    compare.add_argument("b", metavar="B")
    compare.add_argument("--limit", type=int, default=20, help="differences to list (default 20)")
    compare.add_argument(
        "--plot", metavar="FILE", help="draw the share of differing rows by node (needs matplotlib)"
    )
    return parser


def _compared(a: Trace, b: Trace) -> int:
    return sum(len(x.outputs.keys() & y.outputs.keys()) for x, y in zip(a.steps, b.steps, strict=False))


def _table(found: list[Divergence], limit: int) -> list[str]:
    if not found:
        return []
    shown = [("step", "node", "slot", "first row", "differ", "A", "B")]
    for d in found[:limit]:
        step, row = ("-" if x is None else str(x) for x in (d.step, d.row))
        shown.append((step, d.node, d.slot, row, f"{d.differing}/{d.rows}", *d.operators))
    widths = [max(len(line[i]) for line in shown) for i in range(len(shown[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in shown
    ]
    return lines if len(found) <= limit else [*lines, f"... and {len(found) - limit} more"]


def _plot(a: Trace, found: list[Divergence], path: str) -> None:
    try:
        from matplotlib.figure import Figure  # optional
    except ImportError as error:
        raise SystemExit(
            "--plot needs matplotlib: pip install 'h3-kernels[plot]', or leave --plot out"
        ) from error
    names = [key for step in a.steps[:1] for key in step.outputs]
    figure = Figure(figsize=(12, 4), layout="constrained")
    axes = figure.subplots()
    for step in sorted({d.step for d in found if d.step is not None}):
        share = {(d.node, d.slot): d.differing / max(1, d.rows) for d in found if d.step == step}
        axes.plot([share.get(name, 0.0) for name in names], label=f"step {step}", drawstyle="steps-mid")
    axes.set(xlabel="output, in the order computed", ylabel="share of rows that differ", ylim=(-0.02, 1.02))
    if found:
        axes.legend()
    figure.savefig(path)
