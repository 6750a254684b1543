"""Every code block of the README runs, in order, in one namespace."""

import re
from pathlib import Path

import pytest
from h3_adapter_diffusers.bindings import Scope

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.engine
def test_the_examples_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    exec(compile("\n".join(blocks), str(README), "exec"), {})
    printed = capsys.readouterr().out
    assert "contract='h3-parallel-v1-u8'" in printed
    assert "step 0: blocks.1.norm2 [h]" in printed


def test_a_scope_that_does_not_exist_names_those_that_do():
    with pytest.raises(ValueError, match="'all' is not a scope; expected linears, projections, model"):
        Scope("all")
