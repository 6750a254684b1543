"""Generated parts of the documents are current: no number in them was typed."""

import subprocess
import sys
from pathlib import Path

import render

ROOT = Path(__file__).parent.parent


def test_every_generated_page_is_current() -> None:
    command = [sys.executable, "tools/render.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_typed_number_is_replaced() -> None:
    """Negative twin: a number typed into a generated part does not survive."""
    page = (ROOT / "README.md").read_text()
    tampered = page.replace(
        "<!-- end generated -->", "| typed | 1 | 0.01 | 0.01 | 0.01 |\n<!-- end generated -->", 1
    )
    assert tampered != page
    assert render.rendered(tampered) == render.rendered(page)
