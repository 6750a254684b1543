"""Blocks copied by memmove are the blocks asked for: every byte of them, no other byte, however they are cut."""

import numpy as np
import pytest
import torch
from h3_mapper import host_copy
from h3_mapper.backends import backend
from h3_mapper.host_copy import Blocks, copy_blocks
from h3_mapper.runs import Run
from hypothesis import given
from hypothesis import strategies as st


@st.composite
def layouts(draw):
    """(bytes a block, blocks, gap between blocks in the target, gap in the source)."""
    return draw(st.integers(1, 40)), draw(st.integers(1, 7)), draw(st.integers(0, 9)), draw(st.integers(0, 9))


@given(layout=layouts(), threads=st.integers(1, 5))
def test_the_blocks_move_and_nothing_else_does(layout, threads):
    nbytes, count, out_gap, gap = layout
    source = np.arange(count * (nbytes + gap), dtype=np.uint32).astype(np.uint8)
    out = np.full(count * (nbytes + out_gap), 255, np.uint8)
    expected = out.copy()
    for i in range(count):
        at, start = i * (nbytes + out_gap), i * (nbytes + gap)
        expected[at : at + nbytes] = source[start : start + nbytes]
    blocks = Blocks(out.ctypes.data, nbytes + out_gap, source.ctypes.data, nbytes + gap, nbytes, count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copy, "PARALLEL", 16)
        copy_blocks(blocks, threads)
    assert (out == expected).all()


@given(layout=layouts(), cut=st.integers(0, 280))
def test_two_halves_are_the_whole(layout, cut):
    nbytes, count, out_gap, gap = layout
    blocks = Blocks(0, nbytes + out_gap, 0, nbytes + gap, nbytes, count)
    total = nbytes * count
    cut = min(cut, total)

    def moved(*pairs):
        return {(o + i, s + i) for pair in pairs for o, s, n in blocks.pieces(*pair) for i in range(n)}

    assert moved((0, cut), (cut, total)) == moved((0, total))
    assert len(moved((0, total))) == total


@pytest.mark.parametrize("rows", [3, 4096], ids=["small", "memmove"])
def test_autograd_notices_that_a_saved_tensor_was_overwritten(rows):
    out = torch.ones(rows, 64, requires_grad=True)
    leaf = out * 1.0
    y = (leaf * leaf).sum()
    backend(leaf).copy(leaf, torch.zeros(rows, 64), Run("x", rows, 1, 0, rows, 0, rows))
    assert not leaf.any()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
