"""mkdocs hook: draw the figures of docs/results.md from benchmarks/results while the site is built.

Nothing drawn is committed, so no figure can be older than the numbers beside it. On a result file's section come
its ratios and, where records hold errors against fp64, a histogram of ours over the peers'.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import figures
import records
from environment import ROOT
from mkdocs.structure.files import File

PAGE = "results.md"
RESULTS = ROOT / "benchmarks" / "results"
_drawn = tempfile.TemporaryDirectory(prefix="h3-figures-")


def names(stem: str) -> list[str]:
    """The figures of one result file: its speed, and its errors if it holds any."""
    found = records.load(RESULTS / f"{stem}.json")
    kinds = [("speed", figures.bars(found)), ("error", figures.error_ratios(found))]
    return [f"{stem}-{kind}.png" for kind, values in kinds if values]


def on_files(files: Any, config: Any) -> Any:
    """Draw every figure and add it to the site."""
    for path in sorted(RESULTS.glob("*.json")):
        found = records.load(path)
        for name in names(path.stem):
            draw = figures.speed_figure if name.endswith("-speed.png") else figures.error_figure
            target = Path(_drawn.name) / name
            draw(found, target, path.stem)
            files.append(File.generated(config, f"figures/{name}", abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the figures under the headings of the result files."""
    if page.file.src_uri != PAGE:
        return markdown
    return re.sub(r"^## (\w+)$", _with_figures, markdown, flags=re.MULTILINE)


def _with_figures(heading: re.Match[str]) -> str:
    images = [f"![{name.removesuffix('.png')}](figures/{name})" for name in names(heading[1])]
    return "\n\n".join([heading[0], *images])
