"""A plan in words and as JSON, with repeated blocks shown once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from h3_mapper.proof import prove
from h3_mapper.runs import runs
from h3_mapper.spec import Plan, Rows, Target


def explain(mapping: Plan) -> str:
    """Lines for people: the proof's counts, then each tensor, block 0 standing for its kind."""
    cover = prove(mapping)
    many = sum(target.group == "blocks.0" for target in mapping.targets)
    lines = [
        f"{mapping.source} -> {mapping.target}: {len(mapping.sources)} tensors become {len(mapping.targets)}, "
        f"{cover.nbytes:,} bytes in {cover.blocks} row blocks, each source byte used exactly once",
        f"(blocks.0 stands for {mapping.config.num_layers} blocks of {many} tensors, "
        f"token_refiner block 0 for {mapping.config.num_refiner_layers})",
    ]
    for target in mapping.targets:
        if re.search(r"blocks\.[1-9]", target.name) is None:
            lines.append(
                f"  {target.name:44} {target.dtype:4} {list(target.shape)!s:16} = {_sources(target)}"
            )
    for check in mapping.checks:
        lines.append(f"  ({check.name}: bits checked, then dropped or written anew)")
    return "\n".join(lines)


def _sources(target: Target) -> str:
    if target.data is not None:
        return "1 / theta**(2i/2n) in fp32"
    if len(target.rows) == 1 and target.rows[0].start == 0 and target.rows[0].stop == target.shape[0]:
        return target.rows[0].name
    return " + ".join(_block(rows) for rows in target.rows) if len(target.rows) <= 3 else _turns(target.rows)


def _block(rows: Rows) -> str:
    return f"{rows.name}[{rows.start}:{rows.stop}]"


def _turns(blocks: Sequence[Rows]) -> str:
    """Many blocks are always turns: say who takes them and how long one is."""
    kinds = runs(blocks)
    taking = " ".join(dict.fromkeys(f"{run.name}[{run.start}:+{run.length}]" for run in kinds))
    return f"{len(blocks)} blocks of {kinds[0].length} rows, in turns: {taking} ..."


def plan_json(mapping: Plan) -> dict[str, Any]:
    """The whole plan: every target with every block as [source name, start row, stop row]."""
    return {
        "from": mapping.source,
        "to": mapping.target,
        "bytes": prove(mapping).nbytes,
        "targets": [
            {
                "name": target.name,
                "shape": list(target.shape),
                "dtype": target.dtype,
                "group": target.group,
                "rows": [[rows.name, rows.start, rows.stop] for rows in target.rows],
                **({"hex": target.data.hex()} if target.data is not None else {}),
            }
            for target in mapping.targets
        ],
        "checks": [check.name for check in mapping.checks],
    }
