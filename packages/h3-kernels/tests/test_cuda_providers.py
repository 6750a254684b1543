"""The CUDA providers' decisions without a GPU: what each refuses, who is asked first, and that settings return."""

import dataclasses
import threading
import time

import pytest
import torch
from h3_kernels import cuda_providers, tuning
from h3_kernels.cuda_providers import (
    BmmTreeProvider,
    CublasLtProvider,
    FmaProvider,
    FusedSm90Provider,
    TritonProvider,
)
from h3_kernels.providers import GemmCall, Unproven
from h3_kernels.reference import fold_tree, unit_partials

BF16, F32 = torch.bfloat16, torch.float32
CALL = GemmCall(925, 5376, 7168, 8, BF16, BF16, "k", "k", False, "cuda", (9, 0))
CHAIN = dataclasses.replace(CALL, units=1)
FP32 = dataclasses.replace(CHAIN, a_dtype=F32, out_dtype=F32)


@pytest.mark.parametrize(
    ("provider", "call", "reason"),
    [
        (TritonProvider(), dataclasses.replace(CALL, device_type="cpu"), "runs on CUDA"),
        (CublasLtProvider(), CALL, "one chain"),
        (CublasLtProvider(), dataclasses.replace(CHAIN, out_dtype=F32), "bf16 to bf16"),
        (CublasLtProvider(), dataclasses.replace(CHAIN, a_dtype=F32), "bf16 to bf16"),
        (BmmTreeProvider(), CHAIN, "one chain"),
        (BmmTreeProvider(), dataclasses.replace(CALL, a_dtype=F32), "bf16"),
        (FmaProvider(), CHAIN, "fp32 to fp32"),
        (FmaProvider(), dataclasses.replace(FP32, units=8), "one chain"),
        (FmaProvider(), dataclasses.replace(FP32, b_layout="n"), "along k and n"),
        (FmaProvider(), dataclasses.replace(FP32, device_type="cpu"), "runs on CUDA"),
        (FmaProvider(), dataclasses.replace(FP32, capability=(8, 0)), "capability 8.0"),
        (FusedSm90Provider(), dataclasses.replace(CALL, capability=(10, 0)), "9.0"),
        (FusedSm90Provider(), dataclasses.replace(CALL, a_dtype=F32), "bf16"),
    ],
)
def test_refusals_say_why(provider, call, reason):
    assert reason in provider.refuses(call)


@pytest.mark.parametrize(
    ("units", "m", "n", "k", "order"),
    [
        (1, 925, 21504, 5376, ["fma", "cublaslt", "fused-sm90", "triton"]),
        (1, 70, 28672, 5376, ["fused-sm90", "cublaslt", "triton"]),
        (8, 925, 5376, 7168, ["fused-sm90", "bmm-tree", "triton"]),
    ],
)
def test_the_faster_measured_provider_is_asked_first(units, m, n, k, order):
    names = ("triton", "bmm-tree", "cublaslt", "fma", "fused-sm90")
    ranked = sorted(names, key=lambda name: -tuning.rank(name, m, n, k, units))
    assert [name for name in ranked if name in order] == order
    assert ranked[: len(order)] == order


@pytest.mark.parametrize(
    ("m", "n", "tile"),
    [(5845, 5376, 64), (5845, 96, 32), (834, 64, 16), (648, 5376, 64), (49, 96, 16)],
)
def test_fp32_blocks_narrow_until_every_multiprocessor_has_three(m, n, tile):
    assert tuning.fma_tile(m, n) == tile


def test_split_k_is_off_inside_and_as_before_outside_even_after_an_error(monkeypatch):
    chosen = ["cublas"]  # a CPU build of torch refuses to prefer cuBLASLt

    def preferred(library=None):
        if library is not None:
            chosen.append(library)
        return chosen[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    reduction = torch._C._get_cublas_allow_bf16_reduced_precision_reduction
    before = reduction()
    inside = []

    def product():
        with cuda_providers.no_split_k():
            inside.append((chosen[-1], reduction()))
            raise KeyError

    with pytest.raises(KeyError):
        product()
    assert inside == [("cublaslt", (False, False))]
    assert (chosen[-1], reduction()) == ("cublas", before)


def test_units_are_views_of_the_operand_in_either_layout():
    a, b = torch.randn(5, 64), torch.randn(64, 7).t()
    views = [cuda_providers._by_unit(t, 8) for t in (a, b)]
    assert views[0].data_ptr() == a.data_ptr()
    roots = fold_tree(torch.bmm(views[0], views[1].transpose(1, 2)))
    torch.testing.assert_close(roots, fold_tree(unit_partials(a, b, 8)))


def test_a_probe_inside_a_capture_is_refused_not_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(Unproven, match="capture"):
        CublasLtProvider().probe(CHAIN, torch.device("cuda"))


def test_a_probe_asks_for_memory_before_it_takes_any(monkeypatch):
    """925 x 5376 bf16 results twice, operands of K = 7168, and 8 fp32 partials: 268 MB."""
    needed = 2 * (925 + 5376) * 7168 + 2 * 2 * 925 * 5376 + 4 * 8 * 925 * 5376
    assert cuda_providers._probe_bytes(CALL) == needed
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda_providers, "_free_bytes", lambda device: needed - 1)
    with pytest.raises(Unproven, match=f"takes {needed} bytes of memory, {needed - 1} are free"):
        BmmTreeProvider().probe(CALL, torch.device("cuda"))


def test_a_probe_that_runs_out_of_memory_proves_nothing(monkeypatch):
    def no_memory(*operands, **settings):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda_providers, "_free_bytes", lambda device: 1 << 40)
    call = GemmCall(9, 6, 64, 8, BF16, BF16, "k", "n", False, "cpu", None)
    with pytest.raises(Unproven, match="not enough free memory"):
        cuda_providers._probe(no_memory, call, torch.device("cpu"))


def test_a_probe_finds_one_differing_value(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda_providers, "_free_bytes", lambda device: 1 << 40)

    def product(a, b, *, units, out_dtype, bias):
        return fold_tree(unit_partials(a, b, units)).to(out_dtype)

    def wrong(a, b, **settings):
        y = product(a, b, **settings)
        y[3, 2] += 1
        return y

    monkeypatch.setattr(cuda_providers, "plain", product)
    call = GemmCall(9, 6, 64, 8, BF16, BF16, "k", "n", False, "cpu", None)
    good = cuda_providers._probe(product, call, torch.device("cpu"))
    assert (good.ok, good.compared) == (True, 2 * 9 * 6)
    bad = cuda_providers._probe(wrong, call, torch.device("cpu"))
    assert (bad.ok, bad.detail) == (False, "1 of 54 values differ on random inputs")


def test_split_k_stays_off_while_any_thread_is_inside(monkeypatch):
    """Two threads that saved and restored the process's settings at once would leave split-K on under one of them."""
    monkeypatch.setattr(
        torch.backends.cuda, "preferred_blas_library", lambda library=None: library or "cublas"
    )
    seen = []

    def enter():
        for _ in range(50):
            with cuda_providers.no_split_k():
                time.sleep(0)
                seen.append(torch._C._get_cublas_allow_bf16_reduced_precision_reduction())

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {(False, False)}
    assert len(seen) == 200


@pytest.mark.parametrize("across", [False, True])
def test_operands_with_gaps_are_packed_in_their_own_order(across):
    """cuBLAS picks its kernel by the leading dimension too; the probe proves packed operands only."""
    wide = torch.arange(6 * 16.0).reshape(6, 16)
    t = wide[:, :8].t() if across else wide[:, :8]
    packed = cuda_providers.packed(t)
    assert torch.equal(packed, t)
    assert (packed.t() if across else packed).is_contiguous()
    assert cuda_providers.packed(packed) is packed
