"""The public test tools fail where they must, and say where."""

import time

import pytest
import torch
from h3_kernels.providers import tree_gemm
from h3_kernels.testing import (
    NEGATIVE_FOLDS,
    assert_bitwise_equal,
    cancellation_inputs,
    count_differing,
    interleaved_bench,
    large_magnitude_inputs,
    order_probe,
    random_inputs,
    shard_columns,
    shard_parts,
    twin_gemm,
)
from h3_kernels.testing.orders import rounded_tree, swapped_units

F32, BF16 = torch.float32, torch.bfloat16


def test_the_assertion_reports_count_coordinate_values_and_bits():
    a = torch.zeros(2, 3)
    b = a.clone()
    b[1, 1], b[1, 2] = 1.0, -0.0
    with pytest.raises(
        AssertionError,
        match=r"fc1: 2 of 6 elements differ, first at \[1, 1\]: 0\.0 \(0x00000000\) and 1\.0 \(0x3f800000\)",
    ):
        assert_bitwise_equal(a, b, "fc1")
    assert count_differing(a, b) == 2


def test_bytes_decide_not_values():
    nan = torch.tensor([float("nan")])
    assert_bitwise_equal(nan, nan.clone())
    with pytest.raises(AssertionError, match=r"0\.0 \(0x0000\) and -0\.0 \(0x8000\)"):
        assert_bitwise_equal(torch.zeros(1, dtype=BF16), -torch.zeros(1, dtype=BF16))
    for other in (torch.zeros(2), torch.zeros(1, dtype=BF16)):
        with pytest.raises(AssertionError, match="shapes or dtypes differ"):
            assert_bitwise_equal(torch.zeros(1), other)
    assert_bitwise_equal(torch.arange(6.0).view(2, 3).t(), torch.arange(6.0).view(2, 3).t().contiguous())


@pytest.mark.parametrize("dtype", [torch.uint8, BF16, F32, torch.float64, torch.int64])
def test_every_width_is_compared(dtype):
    a = torch.arange(4).to(dtype)
    assert count_differing(a, a.flip(0)) == 4


@pytest.mark.parametrize("units", [4, 8])
@pytest.mark.parametrize("out_dtype", [F32, BF16])
def test_the_probe_names_every_order_from_the_result_alone(units, out_dtype):
    probe = order_probe(512, units=units)
    y = tree_gemm(probe.x, probe.weight, units=units, out_dtype=out_dtype)
    assert probe.identify(y) == "canonical tree"
    # Leaves are bf16 already; of four units, the strided tree is the one with units 1 and 2 swapped.
    same = {rounded_tree} | ({swapped_units} if units == 4 else set())
    for name, fold in NEGATIVE_FOLDS.items():
        if fold not in same:
            assert (
                probe.identify(twin_gemm(probe.x, probe.weight, fold, units=units, out_dtype=out_dtype))
                == name
            )
    assert probe.identify(torch.zeros_like(y)) == "unknown"


def test_inputs_are_what_they_say():
    x, weight = cancellation_inputs(4, 5, 256, dtype=F32)
    assert (x.shape, weight.shape) == ((4, 256), (5, 256))
    terms = x.double() @ weight.double().t()
    sizes = x.double().abs() @ weight.double().abs().t()
    assert (terms.abs() < sizes * 2.0**-12).all(), "what is left is small beside what was added"
    large, _ = large_magnitude_inputs(4, 5, 256, dtype=F32)
    assert large.abs().max() > 2.0**38
    assert_bitwise_equal(random_inputs(2, 2, 8, seed=3)[0], random_inputs(2, 2, 8, seed=3)[0])


def test_shards_tile_the_whole():
    t = torch.arange(48).view(2, 24)
    assert torch.equal(torch.cat([shard_columns(t, 4, r) for r in range(4)], dim=1), t)
    fused = torch.arange(12)
    assert shard_parts(fused, 2, 1, parts=3).tolist() == [2, 3, 6, 7, 10, 11]


def test_the_benchmark_interleaves_and_summarises():
    calls = []
    timings = interleaved_bench(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, device="cpu", rounds=4, warmup=1
    )
    assert calls == ["a", "b", *"abbaabba"]
    assert all(t.rounds == 4 and t.p10_us <= t.median_us <= t.p90_us for t in timings.values())


def test_ranks_meet_before_every_start_and_their_meeting_is_not_timed():
    """Twin: what the variant itself waits for is."""
    calls = []

    def meet():
        calls.append("meet")
        time.sleep(0.05)

    variants = {"a": lambda: calls.append("a"), "b": lambda: time.sleep(0.05)}
    timings = interleaved_bench(variants, device="cpu", rounds=3, warmup=1, meet=meet)
    assert calls == ["a", *["meet", "a", "meet"], *["meet", "meet", "a"], *["meet", "a", "meet"]]
    assert timings["a"].median_us < 50_000 <= timings["b"].median_us
