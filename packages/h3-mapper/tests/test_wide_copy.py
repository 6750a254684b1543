"""Rows copied through wider elements are the same bytes, whatever they hold and wherever they lie."""

import numpy as np
import pytest
import torch
from h3_mapper.backends import WIDE, backend
from h3_mapper.runs import Run
from hypothesis import given
from hypothesis import strategies as st

ITEMS = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}


def raw(rows, nbytes, seed, offset):
    """[rows, nbytes] random bytes, `offset` bytes into their storage: NaNs of every payload are among them."""
    flat = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, rows * nbytes + offset, np.uint8))
    return flat[offset:].view(rows, nbytes)


@st.composite
def copies(draw):
    item = draw(st.sampled_from(sorted(ITEMS)))
    length, count, width = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 24))
    gaps = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    columns = draw(st.integers(0, width - 1)), width
    offsets = [item * draw(st.integers(0, 8)) for _ in range(2)]
    return item, length, count, width, gaps, columns, offsets


def expected(out, source, run):
    out = out.copy()
    for block in range(run.count):
        row, start = run.row + block * run.row_step, run.start + block * run.step
        out[row : row + run.length] = source[start : start + run.length]
    return out


@given(copies())
def test_any_rows_columns_and_alignment_give_the_same_bytes(drawn):
    item, length, count, width, (gap, row_gap), (low, high), offsets = drawn
    step, row_step = length + gap, length + row_gap
    run = Run("x", length, count, 0, step, 0, row_step)
    source = raw(count * step, width * item, 1, offsets[0])
    out = raw(count * row_step, (high - low) * item, 2, offsets[1]).clone()
    wanted = expected(out.numpy(), source[:, low * item : high * item].numpy(), run)
    library = backend(out)
    library.copy(out.view(ITEMS[item]), source.view(ITEMS[item])[:, low:high], run)
    assert np.array_equal(out.numpy(), wanted)


@pytest.mark.parametrize(
    ("width", "offset", "chosen"),
    [
        (8, 0, "complex128"),
        (8, 8, "complex128"),
        (8, 4, "int64"),
        (4, 0, "int64"),
        (6, 0, "int32"),
        (7, 0, "bfloat16"),
    ],
)
def test_the_widest_element_that_rows_and_addresses_allow_is_chosen(width, offset, chosen):
    flat = torch.empty(64 + offset, dtype=torch.bfloat16)
    rows = flat[offset : offset + 8 * width].view(8, width)
    wide, _ = backend(rows)._widest(rows, rows)
    assert str(wide.dtype) == f"torch.{chosen}"
    assert wide.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()


def test_rounding_and_vectors_are_never_copied_as_other_elements():
    bf16, fp32 = torch.empty(4, 8, dtype=torch.bfloat16), torch.empty(4, 8)
    library = backend(bf16)
    assert library._widest(bf16, fp32) == (bf16, fp32) or library._widest(bf16, fp32)[0] is bf16
    vector = torch.empty(16, dtype=torch.bfloat16)
    assert library._widest(vector, vector)[0] is vector
    assert [nbytes for _, nbytes in WIDE] == sorted((nbytes for _, nbytes in WIDE), reverse=True)


def test_a_complex_element_keeps_signalling_nans_and_signed_zeros():
    """complex128 is only moved: no bit of a NaN is quieted, no zero changes sign."""
    patterns = torch.tensor(
        [0x7F80_0001, 0x7FA0_0000, -0x0080_0000 + 1, -(2**31), 0, 0x7FF0_0001, 1, -1], dtype=torch.int32
    )
    source = patterns.repeat(12, 1).view(torch.bfloat16)
    out = torch.zeros(24, 16, dtype=torch.bfloat16)
    backend(out).copy(out, source, Run("x", 2, 6, 0, 2, 0, 4))
    moved = out.view(6, 4, 16)[:, :2].reshape(12, 16)
    assert torch.equal(moved.contiguous().view(torch.int32), source.view(torch.int32))
