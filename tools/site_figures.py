"""mkdocs hook: draw the figures of docs/results.md from benchmarks/results while the site is built.

Nothing drawn is committed, so no figure can be older than the numbers beside it. Under a result file's heading comes
every kind of figure its records hold something of.
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


def kinds(found: list[figures.Record]) -> list[figures.Figure]:
    """The figures that records have something to show in."""
    return [figure for figure in figures.FIGURES if figure.values(found)]


def on_files(files: Any, config: Any) -> Any:
    """Draw every figure and add it to the site."""
    for path in sorted(RESULTS.glob("*.json")):
        found = records.load(path)
        for figure in kinds(found):
            name = f"{path.stem}-{figure.kind}.png"
            target = Path(_drawn.name) / name
            figures.save(figure, found, target, path.stem)
            files.append(File.generated(config, f"figures/{name}", abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the figures under the headings of the result files."""
    if page.file.src_uri != PAGE:
        return markdown
    return re.sub(r"^## (\w+)$", _with_figures, markdown, flags=re.MULTILINE)


def _with_figures(heading: re.Match[str]) -> str:
    found = records.load(RESULTS / f"{heading[1]}.json")
    names = [f"{heading[1]}-{figure.kind}" for figure in kinds(found)]
    return "\n\n".join([heading[0], *(f"![{name}](figures/{name}.png)" for name in names)])
