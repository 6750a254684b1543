"""Run the code blocks of one Markdown page in order, in this folder: `python tools/run_page.py PAGE [GIVEN]`.

`python` blocks share one namespace, `sh` blocks run by `sh -e`, as a reader would who types everything in. GIVEN is
Python run before the first block: what the page says its reader has already. Tracebacks name the page's own lines.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FENCE = re.compile(r"^```(?P<kind>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
RUN = ("python", "sh")


def blocks(text: str) -> list[tuple[str, int, str]]:
    """(kind, line of the first line of code, code) of every fenced block."""
    return [(m["kind"], text[: m.start("code")].count("\n") + 1, m["code"]) for m in FENCE.finditer(text)]


def main(page: Path, given: str = "") -> int:
    """Run the page; the exit status of the first block that fails, or 0."""
    namespace: dict[str, object] = {"__name__": "__page__"}
    exec(given, namespace)
    for kind, line, code in blocks(page.read_text()):
        if kind == "python":
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)
        elif kind == "sh":
            status = subprocess.run(["sh", "-e", "-c", code], check=False).returncode
            if status:
                sys.stderr.write(f"{page}:{line}: the block exits with {status}\n")
                return status
    return 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    raise SystemExit(main(Path(sys.argv[1]), *sys.argv[2:]))
