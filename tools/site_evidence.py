"""mkdocs hook: while the site is built, say which claims of docs/evidence.md are older than the source; show figures.

Whether a claim is current changes with every commit to a package, so it is not written into the page: it is computed
here from the tree that is built. Each evidence folder's own figure is shown as it was filed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from mkdocs.structure.files import File

import evidence

PAGE = "evidence.md"
CLAIMS, FOLDERS = "## Claims\n", "## Every folder\n"


def on_files(files: Any, config: Any) -> Any:
    """Add every evidence folder's figure to the site."""
    for folder in evidence.folders():
        figure = str(folder.path / "figure.png")
        files.append(File.generated(config, f"figures/{_name(folder)}", abs_src_path=figure))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the claims' standing and the figures under their headings."""
    if page.file.src_uri != PAGE:
        return markdown
    found = evidence.folders()
    markdown = markdown.replace(CLAIMS, f"{CLAIMS}\n{standings(found)}\n")
    return markdown.replace(FOLDERS, f"{FOLDERS}\n{figures(found)}\n")


def standings(found: list[evidence.Folder]) -> str:
    """One line a claim that is not current, or that all are."""
    stands = [(claim["claim"], evidence.standing(found, claim)) for claim in evidence.claims()]
    old = [f"- {claim}: {stand}" for claim, stand in stands if not stand.current]
    if not old:
        return (
            "At the commit this site was built from, every claim rests on evidence made with today's source."
        )
    return "\n".join(
        ["At the commit this site was built from, these claims do not rest on today's source:", "", *old]
    )


def figures(found: list[evidence.Folder]) -> str:
    """One image a folder, newest first."""
    newest_first = sorted(found, key=evidence.age, reverse=True)
    return "\n\n".join(
        f"![{folder.name[:12]} {folder.path.name}](figures/{_name(folder)})" for folder in newest_first
    )


def _name(folder: evidence.Folder) -> str:
    return f"evidence-{folder.path.parent.name[:12]}-{folder.path.name}.png"
