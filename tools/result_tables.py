"""What docs/results.md says of the result files of benchmarks/results, as Markdown tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import records
from environment import ROOT
from figures import shares

RESULTS = ROOT / "benchmarks" / "results"

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
    "form",
    "tp",
    "rows",
    "blocks",
    "adaln",
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


def every_record() -> str:
    """docs/results.md: one section per result file, every record, wins and losses."""
    parts = []
    for path in sorted(RESULTS.glob("*.json")):
        found = records.load(path)
        made = (
            machine(found),
            *(make(found) for make in (ratio_table, gates_table, parity_table, divergence_table, refusals)),
        )
        parts.append("\n\n".join([f"## {path.stem}", *(text for text in made if text)]))
    return "\n".join(parts)


def ratio_table(found: list[dict[str, Any]]) -> str:
    """Every ratio of the records, by their conditions."""
    rated = [(record, peer, ratio) for record in found for peer, ratio in ratios(record).items()]
    keys = [key for key in KEYS if any(record.get(key) is not None for record, _, _ in rated)]
    rows = ((*(record.get(key, "") for key in keys), peer, f"{ratio:.3f}") for record, peer, ratio in rated)
    return table((*keys, "against", "ratio"), rows) if rated else ""


def gates_table(found: list[dict[str, Any]]) -> str:
    """Every comparison of bits; a twin is a planted fault, of which some values must differ."""
    rows = [
        (
            r["case"],
            r["rows"],
            r["blocks"],
            r["values"],
            r["differing"],
            r["expected"],
            "yes" if r["passed"] else "NO",
        )
        for r in found
        if "passed" in r and "expected" in r
    ]
    return (
        table(("bits of", "rows", "blocks", "values", "differ", "expected", "passed"), rows) if rows else ""
    )


def gates() -> str:
    """docs/parity.md: the comparisons of bits on a GPU at full width."""
    found = records.load(RESULTS / "gates_h200.json")
    return f"{gates_table(found)}\n{machine(found)}\n" if found else ""


def stock_nodes() -> str:
    """docs/parity.md: how each engine's own arithmetic of a node differs from the node's, on the same inputs."""
    found = records.load(RESULTS / "divergence_h200.json")
    return f"{stock_nodes_table(found)}\n{machine(found)}\n" if found else ""


def stock_nodes_table(found: list[dict[str, Any]]) -> str:
    """Share of values that differ and relative norm of the difference, a line for each node and a pair for each
    engine; nodes in which neither differs are left out."""
    cells = {(r["engine"], r["node"]): (r["share"], r["relative"]) for r in found if "node" in r}
    engines, nodes = ({r[key]: None for r in found if "node" in r} for key in ("engine", "node"))
    rows = [
        (f"`{node}`", *(_amount(x) for engine in engines for x in cells.get((engine, node), (0.0, 0.0))))
        for node in nodes
        if any(cells.get((engine, node), (0.0,))[0] for engine in engines)
    ]
    head = ("node", *(f"{engine}: {what}" for engine in engines for what in ("values differ", "by")))
    return table(head, rows)


def _amount(value: float) -> str:
    return f"{value:.1e}" if 0 < value < 1e-3 else f"{value:.4f}".rstrip("0").rstrip(".")


def time_by_kernel() -> str:
    """docs/measured-facts-nodes.md: GPU milliseconds by kind of kernel, as shipped and ours."""
    found = [r for r in records.load(RESULTS / "step_h200.json") if r.get("case") == "kernels"]
    kinds = ("gemm", "attention", "rest")
    pairs: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for r in found:
        pairs.setdefault((r["engine"], r["direction"], r["rows"]), {})[r["variant"]] = r
    rows = [
        (*key, *(f"{r['stock']['busy_ms'][k]:.0f} / {r['ours']['busy_ms'][k]:.0f}" for k in kinds),
         f"{r['stock']['kernels']} / {r['ours']['kernels']}")
        for key, r in pairs.items()
    ]  # fmt: skip
    head = ("engine", "direction", "rows", *(f"{k}, ms" for k in kinds), "kernels")
    return f"{table(head, rows)}\n{machine(found)} As shipped / ours.\n" if rows else ""


def parity() -> str:
    """docs/parity.md: every case of tools/parity.py."""
    found = records.load(RESULTS / "parity_cpu.json")
    return f"{parity_table(found)}\n{machine(found)}\n" if found else ""


def parity_table(found: list[dict[str, Any]]) -> str:
    """Bytes in which the engines differ, bound and as shipped."""
    rows = [
        (
            *(r["case"][key] for key in ("requests", "tp", "padding")),
            "yes" if r["case"]["lora"] else "",
            r["bytes"],
            r["bound"],
            "refused" if r["shipped"] is None else r["shipped"],
        )
        for r in found
        if "bound" in r and "shipped" in r
    ]
    head = ("requests", "tp", "padding", "LoRA", "bytes compared", "differ, with the adapters", "as shipped")
    return table(head, rows) if rows else ""


def divergence_table(found: list[dict[str, Any]]) -> str:
    """Where the traces of the records part from the strict one."""
    rows = []
    for record in shares(found):
        differing = [name for name, share in zip(record["outputs"], record["share"], strict=True) if share]
        first = f"`{differing[0]}`" if differing else "none"
        rows.append((record["case"], first, len(differing), len(record["outputs"])))
    head = ("compared with a strict run", "first output that differs", "outputs that differ", "of")
    return table(head, rows) if rows else ""


def refusals(found: list[dict[str, Any]]) -> str:
    """How many records say why there is no number."""
    count = sum(1 for record in found if "refused" in record or (record.get("auto") and not ratios(record)))
    return f"{count} more hold no ratio, and say why.\n" if count else ""


def machine(found: list[dict[str, Any]]) -> str:
    """Where and at which commit records were measured, and how many of them at an earlier one: one sentence."""
    all_seen = [record["environment"] for record in found if isinstance(record.get("environment"), dict)]
    seen: dict[str, Any] = all_seen[0] if all_seen else {}
    gpu = seen.get("gpu") or {}
    what = gpu.get("name") or seen.get("cpu") or "the machine is in the records"
    software = seen.get("software") or {}
    named = ", ".join(f"{name} {software[name]}" for name in ("torch", "triton") if name in software)
    head = str(seen.get("head", "unknown"))
    where = "a commit that was not recorded" if head == "unknown" else f"commit `{head[:12]}`"
    older = Counter(
        str(other.get("head", "unknown"))[:12] for other in all_seen if other.get("head") != seen.get("head")
    )
    others = "".join(f"; {count} of {len(found)} records at `{name}`" for name, count in older.items())
    return f"Measured on {what}{f', {named}' if named else ''}, at {where}{others}."
