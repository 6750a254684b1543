"""The documents run: each `python` and `sh` block of each page, in order, in an empty folder, by exactly one test."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from run_page import RUN, blocks

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SOURCES = os.pathsep.join(str(package / "src") for package in sorted((ROOT / "packages").iterdir()))

BOTH_MODELS = """
from contextlib import ExitStack
from h3_adapter_diffusers.testing.tiny import build
from h3_adapter_vllm.testing import engine
groups = ExitStack()
groups.enter_context(engine.engine())
engine_transformer, diffusers_transformer = engine.build(), build()
"""

HERE = {
    "README.md": BOTH_MODELS,
    "docs/quickstart-convert.md": "",
    "docs/quickstart-rl.md": "",
    "docs/quickstart-kernels.md": "",
    "docs/add-a-contract.md": "",
    "docs/add-a-layout.md": "",
}
"""Pages run by this file -> what their reader has before the first block."""

ELSEWHERE = {
    "docs/lora.md": "packages/h3-mapper/tests/test_lora_docs.py",
    "docs/weight-sync.md": "packages/h3-mapper/tests/test_lora_docs.py",
    "docs/nodes.md": "packages/h3-kernels/tests/test_graph_docs.py",
    "docs/providers.md": "packages/h3-kernels/tests/test_readme.py",
    **{
        f"packages/{name}/README.md": f"packages/{name}/tests/{test}"
        for name, test in (
            ("h3-mapper", "test_docs.py"),
            ("h3-kernels", "test_readme.py"),
            ("h3-adapter-vllm", "test_readme.py"),
            ("h3-adapter-diffusers", "test_readme.py"),
        )
    },
}
"""Pages run by the test of the package they speak of, which prepares the files they start from."""

PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((ROOT / "packages").glob("*/README.md")))


def run(page: Path, folder: Path, given: str = "") -> subprocess.CompletedProcess[str]:
    """The page in a process of its own, with `h3-mapper` and `python` on its path."""
    bin_folder = folder / ".bin"
    bin_folder.mkdir()
    for name, words in {"h3-mapper": "-m h3_mapper ", "python": ""}.items():
        (bin_folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
        (bin_folder / name).chmod(0o755)
    env = os.environ | {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": SOURCES}
    command = [sys.executable, str(ROOT / "tools" / "run_page.py"), str(page), given]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def runnable(page: Path) -> bool:
    return any(kind in RUN for kind, _, _ in blocks(page.read_text()))


@pytest.mark.engine
@pytest.mark.parametrize("name", HERE)
def test_every_block_of_the_page_runs(name: str, tmp_path: Path) -> None:
    done = run(ROOT / name, tmp_path, HERE[name])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_a_block_that_fails_is_named_by_its_line(tmp_path: Path) -> None:
    """Negative twin, for both kinds of block."""
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```sh\ntrue\nfalse\ntrue\n```\n")
    done = run(page, tmp_path)
    assert done.returncode == 1
    assert f"{page}:4" in done.stderr
    (tmp_path / "second").mkdir()
    page.write_text("# A page\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    done = run(page, tmp_path / "second")
    assert done.returncode == 1
    assert f'"{page}", line 8' in done.stderr


def test_every_page_with_code_is_run_by_exactly_one_test() -> None:
    with_code = {str(page.relative_to(ROOT)) for page in PAGES if runnable(page)}
    assert with_code == HERE.keys() | ELSEWHERE.keys()
    assert not HERE.keys() & ELSEWHERE.keys()
    for name, test in ELSEWHERE.items():
        assert Path(name).name in (ROOT / test).read_text(), f"{test} does not run {name}"


def test_a_block_of_the_site_runs_or_says_it_is_text() -> None:
    """So that no example escapes by a fence without a language."""
    loose = [
        f"{page.name}:{line}"
        for page in sorted(DOCS.glob("*.md"))
        for kind, line, _ in blocks(page.read_text())
        if kind not in (*RUN, "text")
    ]
    assert not loose


def build_site(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """As the `docs` session builds it. Not --quiet: that hides the warnings from --strict, and everything passes."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_the_site_builds_without_a_warning_and_shows_its_figures(tmp_path: Path) -> None:
    done = build_site(ROOT / "mkdocs.yml", tmp_path)
    assert done.returncode == 0, done.stderr
    for name, made_from in (
        ("results", "benchmarks/results/*.json"),
        ("evidence", "evidence/*/*/figure.png"),
    ):
        shown = images(tmp_path / name / "index.html")
        assert len(shown) >= len(list(ROOT.glob(made_from)))
        assert all(figure.read_bytes().startswith(b"\x89PNG") for figure in shown)
    assert "At the commit this site was built from" in (tmp_path / "evidence" / "index.html").read_text()


def images(page: Path) -> list[Path]:
    """The files of a page's images."""
    sources = re.findall(r'<img alt="[^"]*" src="([^"]*)"', page.read_text())
    return [page.parent / source for source in sources]


def test_a_dead_link_stops_the_site(tmp_path: Path) -> None:
    """Negative twin, with the site's own rules for links."""
    rules = re.search(r"^validation:\n(?: .*\n)+", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert rules is not None
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A page\n\n[dead](index.md#nowhere)\n")
    (tmp_path / "mkdocs.yml").write_text(f"site_name: twin\n{rules[0]}")
    done = build_site(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert "nowhere" in done.stderr


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r": ([\w-]+\.md)$", nav, re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


OUTSIDE_THE_SITE = (
    *(page for page in PAGES if page.parent != DOCS),
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
)


def dead_links(page: Path) -> list[str]:
    """Relative links of a page that lead to no file; mkdocs checks those of the site."""
    links = re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", page.read_text())
    return [f"{page.name}: {link}" for link in links if not (page.parent / link).exists()]


def test_links_of_pages_outside_the_site_lead_somewhere(tmp_path: Path) -> None:
    assert not [dead for page in OUTSIDE_THE_SITE for dead in dead_links(page)]
    (tmp_path / "page.md").write_text(
        "[here](page.md#top) [there](https://example.org) [gone](docs/gone.md)\n"
    )
    assert dead_links(tmp_path / "page.md") == ["page.md: docs/gone.md"]


def test_files_the_documents_name_exist() -> None:
    """Paths in code spans, from the repository's root or a package's."""
    path = re.compile(r"`((?:docs|packages|tests|tools|benchmarks|examples|evidence|requirements)/[\w./-]+)`")
    dead = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in sorted({*PAGES, *OUTSIDE_THE_SITE})
        for name in path.findall(page.read_text())
        if not any((root / name).exists() for root in (ROOT, *(ROOT / "packages").iterdir()))
    ]
    assert not dead
