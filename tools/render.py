"""Write the generated parts of README.md and docs/ from results, evidence and tables; ``--check`` refuses stale pages.

A generated part stands between ``<!-- begin generated: NAME -->`` and ``<!-- end generated -->``; `BLOCKS` lists what
writes each. Numbers in the documents come from there and are never typed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

from environment import ROOT
from evidence_tables import claims, evidence_folders, evidence_index, hardware_table
from readme_tables import headline, measured
from result_tables import every_record, gates, parity, stock_nodes, time_by_kernel

PAGES = (
    "README.md",
    "docs/index.md",
    "docs/results.md",
    "docs/hardware.md",
    "docs/evidence.md",
    "docs/parity.md",
    "docs/measured-facts-nodes.md",
)
BLOCK = re.compile(r"(<!-- begin generated: (\w+) -->\n).*?(<!-- end generated -->)", re.DOTALL)

BLOCKS: dict[str, Callable[[], str]] = {
    "headline": headline,
    "measured": measured,
    "every_record": every_record,
    "parity": parity,
    "gates": gates,
    "stock_nodes": stock_nodes,
    "time_by_kernel": time_by_kernel,
    "hardware_table": hardware_table,
    "evidence_index": evidence_index,
    "evidence_folders": evidence_folders,
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
