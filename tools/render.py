"""Write the generated parts of README.md and docs/ from results, evidence and tables; ``--check`` refuses stale pages.

A generated part stands between ``<!-- begin generated: NAME -->`` and ``<!-- end generated -->``; NAME is a function
here. Numbers in the documents come from here and are never typed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import records
from environment import ROOT
from h3_kernels import contract
from hardware import HARDWARE

import evidence

RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/results.md", "docs/hardware.md", "docs/evidence.md")
BLOCK = re.compile(r"(<!-- begin generated: (\w+) -->\n).*?(<!-- end generated -->)", re.DOTALL)

# The conditions of a record, in the order they are read; whatever else a record holds is a measurement.
KEYS = (
    "subject",
    "op",
    "node",
    "engine",
    "scope",
    "case",
    "direction",
    "dtype",
    "contract",
    "provider",
    "tp",
    "rows",
    "blocks",
    "peer",
)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def ratios(record: dict[str, Any]) -> dict[str, float]:
    """A record's ratios by peer: ours / theirs in the same run."""
    value = record.get("ratio")
    if isinstance(value, dict):
        return {peer: float(ratio) for peer, ratio in value.items()}
    return {str(record.get("peer") or "stock"): float(value)} if value is not None else {}


def measured() -> str:
    """README's summary: the headline of each subject that was measured."""
    parts = [
        conversion(records.load(RESULTS / "mapper_cpu.json")),
        linears(records.load(RESULTS / "gemm_h200.json")),
    ]
    return "\n".join(part for part in parts if part) + "\nEvery record: [docs/results.md](docs/results.md).\n"


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
        if r.get("peer") == "cp --reflink=never"
    ]
    head = ("h3-mapper, files fsynced, digests on", "time / `cp`", "speed", "peak memory")
    return f"{table(head, rows)}\n{_machine(found)}\n" if rows else ""


def linears(found: list[dict[str, Any]]) -> str:
    """Forward of the four linears with the provider that is chosen, at one rank and the default contracts."""
    shown = [
        r
        for r in found
        if r.get("auto") and r.get("ratio") and r["tp"] == 1 and r["direction"] == "forward"
        if r["contract"] in {contract.PROJECTION, contract.parallel_id(contract.UNITS)}
    ]
    sizes = sorted({r["rows"] for r in shown})
    cells = {(r["op"], r["contract"], r["rows"]): f"{r['ratio']:.2f}" for r in shown}
    rows = [
        (op, f"`{name}`", *(cells.get((op, name, size), "") for size in sizes))
        for op, name in dict.fromkeys((r["op"], r["contract"]) for r in shown)
    ]
    head = ("h3-kernels, time / stock `F.linear`", "contract", *(f"{size} rows" for size in sizes))
    return f"{table(head, rows)}\n{_machine(found)}\n" if rows else ""


def every_record() -> str:
    """docs/results.md: one table per result file, every record, wins and losses."""
    parts = []
    for path in sorted(RESULTS.glob("*.json")):
        found = records.load(path)
        keys = [key for key in KEYS if any(record.get(key) is not None for record in found)]
        rows = [
            (*(record.get(key, "") for key in keys), peer, f"{ratio:.3f}")
            for record in found
            for peer, ratio in ratios(record).items()
        ]
        parts.append(f"## {path.stem}\n\n{_machine(found)}\n\n{table((*keys, 'against', 'ratio'), rows)}")
    return "\n".join(parts)


def _machine(found: list[dict[str, Any]]) -> str:
    seen: dict[str, Any] = next(
        (record["environment"] for record in found if isinstance(record.get("environment"), dict)), {}
    )
    gpu = seen.get("gpu") or {}
    what = gpu.get("name") or seen.get("cpu") or "the machine is in the records"
    software = seen.get("software") or {}
    named = ", ".join(f"{name} {software[name]}" for name in ("torch", "triton") if name in software)
    return f"Measured on {what}{f', {named}' if named else ''}, at head `{str(seen.get('head', 'unknown'))[:12]}`."


def hardware_table() -> str:
    """docs/hardware.md: the table of tools/hardware.py."""
    head = ("session", "compute capability", "torch", "triton", "CUDA", "contracts", "providers")
    return table(
        head,
        (
            (
                f"`gpu-{row.key}`",
                ".".join(map(str, row.capability)),
                *(f">= {low}.{high}" for low, high in (row.min_torch, row.min_triton, row.min_cuda)),
                ", ".join(f"`{contract}`" for contract in row.contracts),
                ", ".join(f"`{provider}`" for provider in row.providers),
            )
            for row in HARDWARE
        ),
    )


def evidence_index() -> str:
    """docs/evidence.md: every folder, newest first, and what each rests on."""
    found = sorted(evidence.folders(), key=lambda folder: str(folder.report["made"]), reverse=True)
    rows = []
    for folder in found:
        benchmarks = sorted({record["benchmark"] for record in folder.report["records"]})
        gpu = folder.environment["gpu"] or {}
        tests = f"{folder.tests['passed']} passed, {folder.tests['failed']} failed, {folder.tests['skipped']} skipped"
        made_on = gpu.get("name") or folder.environment["cpu"]
        rows.append(
            (
                folder.report["made"],
                f"`{folder.path.parent.name[:12]}`",
                made_on,
                tests,
                ", ".join(benchmarks),
            )
        )
    return table(("made", "head", "device", "tests", "benchmarks"), rows)


def claims() -> str:
    """docs/evidence.md: the claims the documents make and what must not change under them."""
    listed = json.loads((ROOT / "evidence" / "claims.json").read_text())
    head = ("claim", "hardware", "benchmark", "rests on the source of")
    return table(
        head, ((c["claim"], c["hardware"], c["benchmark"], ", ".join(c["packages"])) for c in listed)
    )


BLOCKS: dict[str, Callable[[], str]] = {
    "measured": measured,
    "every_record": every_record,
    "hardware_table": hardware_table,
    "evidence_index": evidence_index,
    "claims": claims,
}


def rendered(text: str) -> str:
    """The page with every generated part written anew."""
    return BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]()}{match[3]}", text)


def main() -> int:
    """Write the pages, or with ``--check`` name the stale ones and return 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if a page is stale"
    )
    check = parser.parse_args().check
    stale = []
    for page in (ROOT / name for name in PAGES):
        text = page.read_text()
        fresh = rendered(text)
        if fresh != text:
            stale.append(page.relative_to(ROOT))
            if not check:
                page.write_text(fresh)
    if check and stale:
        print(f"render: stale, run `python tools/render.py`: {', '.join(map(str, stale))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
