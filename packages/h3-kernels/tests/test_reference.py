"""Theorem: the CPU order is the written one, compiled or not, and every other order is told apart.

The oracle here is numpy float32 scalar arithmetic, one operation at a time: it shares nothing with the code under test.
"""

import os
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch
from h3_kernels import cpu_chain, reference
from h3_kernels.contract import TREE, UNIT_COUNTS, unit_bounds
from h3_kernels.testing import (
    NEGATIVE_FOLDS,
    assert_bitwise_equal,
    cancellation_inputs,
    count_differing,
    large_magnitude_inputs,
    random_inputs,
    split_k_gemm,
    twin_gemm,
)
from hypothesis import given, settings
from hypothesis import strategies as st

INPUTS = {"random": random_inputs, "cancellation": cancellation_inputs, "large": large_magnitude_inputs}
F32, BF16 = torch.float32, torch.bfloat16


def scalar_chain(a, b, start, stop):
    acc = np.float32(0)
    for k in range(start, stop):
        acc = np.float32(acc + np.float32(a[k] * b[k]))
    return acc


def scalar_tree(a, b, units):
    partials = [scalar_chain(a, b, start, stop) for start, stop in unit_bounds(len(a), units)]

    def add(node):
        return partials[node] if isinstance(node, int) else np.float32(add(node[0]) + add(node[1]))

    return add(TREE) if units == 8 else add({1: 0, 2: (0, 1), 4: ((0, 1), (2, 3))}[units])


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("units", UNIT_COUNTS)
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
def test_equals_scalar_arithmetic(make, dtype, units, compiled):
    x, weight = make(3, 5, 64, dtype=dtype)
    y = reference.tree_gemm(x, weight, units=units, out_dtype=F32, compiled=compiled)
    rows, columns = x.float().numpy(), weight.float().numpy()
    expected = torch.tensor(np.array([[scalar_tree(r, c, units) for c in columns] for r in rows]))
    assert_bitwise_equal(y, expected)


def test_the_compiled_chain_is_built_here():
    """A compiler is present wherever the tests run; without it the next theorem would be empty."""
    assert cpu_chain.load() is not None


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 9),
    n=st.integers(1, 70),
    width=st.integers(1, 40),
    units=st.sampled_from(UNIT_COUNTS),
    dtype=st.sampled_from([BF16, F32]),
    transposed=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
def test_compiled_and_torch_paths_have_the_same_bits(m, n, width, units, dtype, transposed, seed):
    a, b = cancellation_inputs(m, n, width * units, dtype=dtype, seed=seed)
    a, b = (t.t().contiguous().t() if flip else t for t, flip in zip((a, b), transposed, strict=True))
    paths = [reference.tree_gemm(a, b, units=units, out_dtype=F32, compiled=c) for c in (True, False)]
    assert_bitwise_equal(*paths)


WITHOUT_THREADS = """
import threading, torch
from h3_kernels import reference
try:
    threading.Thread(target=int).start()
except RuntimeError:
    a, b = torch.ones(8, 1024), torch.ones(512, 1024)
    torch.set_num_threads(4)
    y = reference.tree_gemm(a, b, units=8, out_dtype=torch.float32)
    print("no thread starts, all sums right:", bool((y == 1024).all()))
"""


def test_a_process_that_may_start_no_thread_still_gets_its_product():
    """Stacks larger than memory stand for any limit on threads; the chain's columns are then computed by the caller."""

    def limit():
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 46, resource.getrlimit(resource.RLIMIT_STACK)[1]))

    child = subprocess.run(
        [sys.executable, "-c", WITHOUT_THREADS],
        capture_output=True, text=True, check=False, preexec_fn=limit, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert child.stdout == "no thread starts, all sums right: True\n", child.stderr[-2000:]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_no_bit(threads):
    a, b = cancellation_inputs(70, 256, 512)
    before = torch.get_num_threads()
    one = reference.tree_gemm(a, b, units=8, out_dtype=F32)
    torch.set_num_threads(threads)
    try:
        assert_bitwise_equal(reference.tree_gemm(a, b, units=8, out_dtype=F32), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("fold", NEGATIVE_FOLDS)
@pytest.mark.parametrize("k", [512, 7168])
def test_twin_every_wrong_tree_is_caught(fold, k):
    a, b = cancellation_inputs(16, 32, k)
    right = reference.tree_gemm(a, b, units=8, out_dtype=BF16)
    wrong = twin_gemm(a, b, NEGATIVE_FOLDS[fold], units=8, out_dtype=BF16)
    assert count_differing(right, wrong) > right.numel() // 4


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_twin_a_split_chain_is_caught(splits):
    a, b = cancellation_inputs(16, 32, 5376)
    right = reference.tree_gemm(a, b, units=1, out_dtype=BF16)
    assert count_differing(right, split_k_gemm(a, b, splits=splits, out_dtype=BF16)) > right.numel() // 2


@pytest.mark.parametrize("k_tiles", [28, 56, 112])
def test_units_are_not_a_power_of_two_of_tiles(k_tiles):
    """Trees over 128-wide K tiles agree with a sequential first level only at powers of two; H3 has 7 times one."""
    a, b = cancellation_inputs(4, 4, 128 * k_tiles)
    y = reference.tree_gemm(a, b, units=8, out_dtype=F32)
    partials = torch.stack([reference.tree_gemm(a[:, s:e], b[:, s:e], units=1, out_dtype=F32) for s, e in
                            unit_bounds(128 * k_tiles)])  # fmt: skip
    assert_bitwise_equal(y, ((partials[0] + partials[1]) + (partials[2] + partials[3]))
                         + ((partials[4] + partials[5]) + (partials[6] + partials[7])))  # fmt: skip


def test_bias_is_added_in_fp32_before_the_one_rounding():
    """1 + 2^-8 is not a bf16 number: rounded first it loses the 2^-8 that the bias of -1 would leave."""
    a = torch.ones(1, 1, dtype=BF16)
    b = torch.tensor([[1.0]], dtype=BF16)
    tiny = torch.full((1, 1), 2.0**-8, dtype=BF16)
    y = reference.tree_gemm(
        torch.cat([a, tiny], 1), torch.cat([b, a], 1), units=1, out_dtype=BF16, bias=-b[0]
    )
    assert y.item() == 2.0**-8


def test_rounding_is_to_nearest_even():
    """1 + 2^-8 lies between bf16 neighbours 1 and 1 + 2^-7: even is 1; 1 + 3 * 2^-8 goes up to 1 + 2^-6."""
    root = torch.tensor([[1 + 2.0**-8, 1 + 3 * 2.0**-8]])
    assert reference.finish(root, None, BF16).tolist() == [[1.0, 1 + 2.0**-6]]


@pytest.mark.parametrize("units", UNIT_COUNTS)
@pytest.mark.parametrize("k", [896, 5376])
def test_error_to_fp64_is_not_above_that_of_torch(units, k):
    """bf16 output, where the one rounding dominates: root mean square error within 0.1% of torch's own."""
    a, b = random_inputs(64, 64, k, seed=k)
    truth = reference.truth(a, b)

    def error(y):
        return float((y.double() - truth).square().mean().sqrt())

    ours = error(reference.tree_gemm(a, b, units=units, out_dtype=BF16))
    assert ours <= 1.001 * error(torch.nn.functional.linear(a, b))


def test_eight_units_are_more_accurate_than_one_chain_before_rounding():
    a, b = random_inputs(64, 64, 7168)
    truth = reference.truth(a, b)
    chain, tree = (
        float((reference.tree_gemm(a, b, units=u, out_dtype=F32).double() - truth).abs().mean())
        for u in (1, 8)
    )
    assert tree < chain


def test_without_a_compiler_torch_serves(monkeypatch):
    monkeypatch.setenv(cpu_chain.SWITCH, "torch")
    cpu_chain.load.cache_clear()
    try:
        assert cpu_chain.load() is None
        a, b = cancellation_inputs(3, 3, 64)
        got = reference.tree_gemm(a, b, units=8, out_dtype=F32)
        assert_bitwise_equal(got, reference.tree_gemm(a, b, units=8, out_dtype=F32, compiled=False))
    finally:
        cpu_chain.load.cache_clear()


def test_a_failing_compiler_is_reported_and_torch_serves(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv(cpu_chain.CACHE, str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    cpu_chain.load.cache_clear()
    try:
        assert cpu_chain.load() is None
        assert "could not be built" in caplog.text
    finally:
        cpu_chain.load.cache_clear()
