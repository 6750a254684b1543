"""Every block of docs/nodes.md runs, in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[3] / "docs" / "nodes.md"


def test_every_block_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    assert len(blocks) == 4
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(DOCUMENT), "exec"), namespace)
    assert "step 0: blocks.1.attn.qk_norm_rope [q]" in capsys.readouterr().out
