"""The attention kernels in Triton's interpreter on the CPU: right within rounding, and blind to other documents.

Run by test_triton_nodes_interpreter.py as triton_nodes_interpreted.py is.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from bf16_interpreter import bf16_arithmetic, random
from torch import Tensor

__all__ = ["bf16_arithmetic"]  # an autouse fixture
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in rows computed but not stored

DOCUMENTS = (37, 1, 64, 70)


def attention_inputs(
    documents: tuple[int, ...] = DOCUMENTS, heads: int = 2, dims: int = 32
) -> tuple[Tensor, ...]:
    rows = sum(documents)
    q, k, v, dout = (random(rows, heads, dims, seed=s) for s in range(4))
    return q, k, v, dout, torch.tensor(list(itertools.accumulate(documents, initial=0)), dtype=torch.int32)


def run_attention(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, cu: Tensor, longest: int
) -> tuple[Tensor, ...]:
    """The portable forward and the backward."""
    from h3_kernels.triton.attention import attention_forward
    from h3_kernels.triton.attention_backward import attention_backward

    scale = q.shape[2] ** -0.5
    out, lse = attention_forward(q, k, v, cu, longest, scale)
    return out, lse.T, *attention_backward(dout, q, k, v, out, lse, cu, longest, scale)


def test_attention_agrees_with_fp64() -> None:
    q, k, v, dout, cu = attention_inputs()
    out, lse, dq, dk, dv = run_attention(q, k, v, dout, cu, max(DOCUMENTS))
    for a, b in itertools.pairwise(cu.tolist()):
        x = [t[a:b].double().transpose(0, 1).requires_grad_() for t in (q, k, v)]
        scores = x[0] @ x[1].transpose(1, 2) * q.shape[2] ** -0.5
        exact = scores.softmax(-1) @ x[2]
        grads = torch.autograd.grad(exact, x, dout[a:b].double().transpose(0, 1))
        for found, right in zip((out, dq, dk, dv), (exact, *grads), strict=True):
            error = (found[a:b].double().transpose(0, 1) - right).norm()
            assert error <= 8e-3 * right.norm().clamp(min=0.1)
        assert (lse[a:b].T - scores.logsumexp(-1)).abs().max() < 1e-4


def test_attention_ignores_heads_documents_and_padding() -> None:
    """Theorem: a (row, head)'s five results depend on its document and head alone, even beside NaN."""
    q, k, v, dout, cu = attention_inputs()
    whole = run_attention(q, k, v, dout, cu, max(DOCUMENTS))
    one_head = run_attention(*(t[:, 1:].contiguous() for t in (q, k, v, dout)), cu, max(DOCUMENTS))
    assert all(torch.equal(a[:, 1:], b) for a, b in zip(whole, one_head, strict=True))
    for a, b in itertools.pairwise(cu.tolist()):
        alone = run_attention(
            *(t[a:b] for t in (q, k, v, dout)), torch.tensor([0, b - a], dtype=torch.int32), b - a
        )
        assert all(torch.equal(x[a:b], y) for x, y in zip(whole, alone, strict=True))
    nan = torch.full_like(q[:40], float("nan"))
    padded = run_attention(
        *(torch.cat([nan[:3], t, nan]) for t in (q, k, v, dout)),
        torch.tensor([0, *(cu + 3).tolist(), 3 + int(cu[-1]) + 40], dtype=torch.int32),
        max(DOCUMENTS),
    )
    rows = slice(3, 3 + int(cu[-1]))
    assert all(torch.equal(a, b[rows]) for a, b in zip(whole, padded, strict=True))
    joined = run_attention(q, k, v, dout, torch.tensor([0, int(cu[-1])], dtype=torch.int32), int(cu[-1]))
    assert not torch.equal(whole[0], joined[0]), "documents that are one document must attend to each other"


def test_attention_reads_any_strides() -> None:
    """Heads before rows, a row stride no vector fits, a base no vector fits: the bits of contiguous tensors."""
    q, k, v, dout, cu = attention_inputs((40,))
    whole = run_attention(q, k, v, dout, cu, 40)
    wide = torch.zeros(40, 2 * 32 + 3, dtype=torch.bfloat16)
    shifted = wide[:, 1 : 1 + 64].unflatten(1, (2, 32))
    shifted.copy_(k)
    rows_last = q.transpose(0, 1).contiguous().transpose(0, 1)
    for found, right in zip(run_attention(rows_last, shifted, v, dout, cu, 40), whole, strict=True):
        assert torch.equal(found, right)


def test_attention_backward_computes_only_what_is_needed() -> None:
    from h3_kernels.triton.attention import attention_forward
    from h3_kernels.triton.attention_backward import attention_backward

    q, k, v, dout, cu = attention_inputs((33,))
    out, lse = attention_forward(q, k, v, cu, 33, 0.2)
    whole = attention_backward(dout, q, k, v, out, lse, cu, 33, 0.2)
    for needs in ((True, False, False), (False, True, True), (False, False, True)):
        some = attention_backward(dout, q, k, v, out, lse, cu, 33, 0.2, needs)
        assert [g is not None for g in some] == list(needs)
        for found, right in zip(some, whole, strict=True):
            assert found is None or (found - right).abs().max() < 2e-2


def test_dq_from_stored_and_from_recomputed_scores_agree() -> None:
    """With room for every head, for one, and for none. (Bitwise on a GPU; numpy's products round as they like.)"""
    from h3_kernels.triton.attention import attention_forward
    from h3_kernels.triton.attention_backward import attention_backward

    q, k, v, dout, cu = attention_inputs((70, 33))
    out, lse = attention_forward(q, k, v, cu, 70, 0.2)
    head = (103 + 2 * 64) * 128 * 2
    results = [
        attention_backward(dout, q, k, v, out, lse, cu, 70, 0.2, workspace=size)
        for size in (2 * head, head, head - 1)
    ]
    for found, one, right in zip(*results, strict=True):
        assert torch.equal(found, one)
        assert (found - right).abs().max() < 2e-2


def test_heads_fill_whole_waves() -> None:
    from h3_kernels.triton.attention_backward import heads_at_a_time

    assert heads_at_a_time(56, 141 << 20, 131, 264, 640 << 20) == 4  # 8349 rows: 524 of 528 places
    assert heads_at_a_time(56, 2 << 20, 15, 264, 640 << 20) == 56
    assert heads_at_a_time(7, 141 << 20, 131, 264, 640 << 20) in range(1, 5)
    assert heads_at_a_time(56, 641 << 20, 600, 264, 640 << 20) == 0
