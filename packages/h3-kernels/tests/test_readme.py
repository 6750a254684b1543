"""Every code block of the README and of docs/providers.md runs, in order, in one namespace a page."""

import re
from pathlib import Path

import pytest
from h3_kernels import providers

PACKAGE = Path(__file__).parents[1]
PAGES = {PACKAGE / "README.md": 3, PACKAGE.parents[1] / "docs/providers.md": 2}


@pytest.fixture(autouse=True)
def restored_registry():
    before = dict(providers._registry)
    yield
    providers._registry.clear()
    providers._registry.update(before)
    providers._chosen.cache_clear()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_run(page):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert len(blocks) == PAGES[page]
    exec(compile("\n".join(blocks), str(page), "exec"), {})
