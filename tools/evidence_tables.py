"""What docs/hardware.md and docs/evidence.md say of the table of hardware and the evidence folders, as Markdown."""

from __future__ import annotations

from functools import partial
from typing import Any

from hardware import HARDWARE
from result_tables import table

import evidence


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
    """docs/evidence.md: the newest evidence of each contract on each hardware, or that there is none."""
    found = evidence.folders()
    rows = []
    for row in HARDWARE:
        for name in row.contracts:
            run = evidence.newest(found, row.key, partial(_measures, name))
            rows.append(
                (f"`{name}`", f"`gpu-{row.key}`", *(_described(run) if run else ("none yet", "", "", "")))
            )
    return table(("contract", "hardware", "head", "made", "on", "tests"), rows)


def _measures(name: str, record: dict[str, Any]) -> bool:
    return str(record.get("contract", "")).startswith(name) and "refused" not in record


def _described(folder: evidence.Folder) -> tuple[str, str, str, str]:
    """Head, date, device, outcomes of the tests."""
    gpu = folder.environment["gpu"] or {}
    kinds = ("passed", "failed", "skipped")
    counts = (
        ", ".join(f"{folder.tests[kind]} {kind}" for kind in kinds) if folder.tests["cases"] else "not run"
    )
    return (
        f"`{folder.path.parent.name[:12]}`",
        folder.report["made"],
        gpu.get("name") or folder.environment["cpu"],
        counts,
    )


def evidence_folders() -> str:
    """docs/evidence.md: every folder, newest first."""
    found = sorted(evidence.folders(), key=evidence.age, reverse=True)
    rows = (
        (*_described(folder), ", ".join(sorted({record["benchmark"] for record in folder.report["records"]})))
        for folder in found
    )
    return table(("head", "made", "on", "tests", "benchmarks"), rows)


def claims() -> str:
    """docs/evidence.md: the claims the documents make, their newest evidence, and what must not change under them."""
    found = evidence.folders()
    rows = []
    for claim in evidence.claims():
        run = evidence.standing(found, claim).evidence
        rows.append(
            (
                claim["claim"],
                ", ".join(_page_link(page) for page in claim["pages"]),
                claim["hardware"],
                f"`{run.path.parent.name[:12]}`" if run else "none yet",
                ", ".join(claim["packages"]),
            )
        )
    return table(("claim", "made in", "hardware", "newest evidence", "rests on the source of"), rows)


def _page_link(page: str) -> str:
    name = page.removeprefix("docs/")
    return f"[{name}]({name})" if page.startswith("docs/") else name
