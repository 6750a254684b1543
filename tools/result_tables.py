"""What README.md and docs/results.md say of the result files of benchmarks/results, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import records
from environment import ROOT
from figures import shares
from h3_kernels import contract

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


def headline() -> str:
    """README's one sentence on speed: the range over all directions, and over all linears and row counts."""
    copies = [r["ratio"] for r in records.load(RESULTS / "mapper_cpu.json") if _is_conversion(r)]
    products = [r["ratio"] for r in records.load(RESULTS / "gemm_h200.json") if _is_default_linear(r)]
    steps = [r["ratio"] for r in records.load(RESULTS / "step_h200.json") if _is_whole_step(r)]
    parts = []
    if copies:
        parts.append(f"converting takes {_range(copies)} of the time of `cp`")
    if products:
        parts.append(f"the contracts' linears {_range(products)} of stock `F.linear` on an H200")
    if steps:
        parts.append(f"whole forwards and training steps {_range(steps)} of the engines as shipped")
    return f"Cost: {', '.join(parts)} ([all numbers](docs/results.md)).\n" if parts else ""


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
    return f"{table(head, rows)}\n{_machine(found)}\n" if rows else ""


def linears(found: list[dict[str, Any]]) -> str:
    """Forward of the four linears with the provider that is chosen, at one rank and the default contracts."""
    shown = [r for r in found if _is_default_linear(r)]
    return _by_rows(found, shown, ("op", "contract"), ("h3-kernels, time / stock `F.linear`", "contract"))


def whole_steps(found: list[dict[str, Any]]) -> str:
    """Denoise forwards of both engines and the trainer's LoRA step, every node bound, against the engine as shipped."""
    shown = [r for r in found if _is_whole_step(r)]
    return _by_rows(found, shown, ("engine", "direction"), ("whole transformer, time / as shipped", ""))


def _is_whole_step(record: dict[str, Any]) -> bool:
    """A plain run of all blocks, not extrapolated; the engine's cache of timesteps it has seen is not asked."""
    plain = not {"case", "measured_blocks"} & record.keys() and record.get("adaln") != "cached"
    return plain and bool(record.get("ratio"))


def _by_rows(
    found: list[dict[str, Any]], shown: list[dict[str, Any]], keys: tuple[str, str], head: tuple[str, str]
) -> str:
    """Ratios with a line for each pair of conditions and a column for each number of rows."""
    sizes = sorted({r["rows"] for r in shown})
    cells = {(*map(r.get, keys), r["rows"]): f"{r['ratio']:.2f}" for r in shown}
    pairs = dict.fromkeys(tuple(map(r.get, keys)) for r in shown)
    rows = [
        (first, f"`{second}`", *(cells.get((first, second, size), "") for size in sizes))
        for first, second in pairs
    ]
    return f"{table((*head, *(f'{size} rows' for size in sizes)), rows)}\n{_machine(found)}\n" if rows else ""


def every_record() -> str:
    """docs/results.md: one section per result file, every record, wins and losses."""
    parts = []
    for path in sorted(RESULTS.glob("*.json")):
        found = records.load(path)
        made = (
            _machine(found),
            *(make(found) for make in (ratio_table, parity_table, divergence_table, refusals)),
        )
        parts.append("\n\n".join([f"## {path.stem}", *(text for text in made if text)]))
    return "\n".join(parts)


def ratio_table(found: list[dict[str, Any]]) -> str:
    """Every ratio of the records, by their conditions."""
    rated = [(record, peer, ratio) for record in found for peer, ratio in ratios(record).items()]
    keys = [key for key in KEYS if any(record.get(key) is not None for record, _, _ in rated)]
    rows = ((*(record.get(key, "") for key in keys), peer, f"{ratio:.3f}") for record, peer, ratio in rated)
    return table((*keys, "against", "ratio"), rows) if rated else ""


def parity() -> str:
    """docs/parity.md: every case of tools/parity.py."""
    found = records.load(RESULTS / "parity_cpu.json")
    return f"{parity_table(found)}\n{_machine(found)}\n" if found else ""


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


def _machine(found: list[dict[str, Any]]) -> str:
    seen: dict[str, Any] = next(
        (record["environment"] for record in found if isinstance(record.get("environment"), dict)), {}
    )
    gpu = seen.get("gpu") or {}
    what = gpu.get("name") or seen.get("cpu") or "the machine is in the records"
    software = seen.get("software") or {}
    named = ", ".join(f"{name} {software[name]}" for name in ("torch", "triton") if name in software)
    head = str(seen.get("head", "unknown"))
    where = "a commit that was not recorded" if head == "unknown" else f"commit `{head[:12]}`"
    return f"Measured on {what}{f', {named}' if named else ''}, at {where}."
