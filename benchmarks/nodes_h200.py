"""The non-GEMM nodes on a GPU: time against the stock engines and a device copy, and error against fp64.

    python benchmarks/nodes_h200.py [--out results/nodes_h200.json] [--rows 70 925 8349] [--rounds 30]

One record per node, direction and row count. `ours_us` and every peer are interleaved in one run (CUDA graphs, L2
flushed, medians). `copy_us` is a device copy that moves as many bytes as the node must at least; attention has TFLOP/s
instead, counting two products forward and five backward. Errors are ||y - fp64|| / ||fp64|| on the same inputs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nodes_peers
import torch
from h3_kernels import attention_providers
from h3_kernels.nodes import NodeOp
from h3_kernels.nodes.gated_residual import GATED_RESIDUAL, GATED_RESIDUAL_NORM
from h3_kernels.nodes.qk_norm_rope import QK_NORM_ROPE
from h3_kernels.nodes.rms_norm import RMS_NORM_MODULATE
from h3_kernels.nodes.swiglu import SWIGLU
from h3_kernels.testing import interleaved_bench
from h3_kernels.triton import attention_backward
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import records  # noqa: E402

HIDDEN, HEADS, DIM, FFN, TABLE_ROWS, EPS = 5376, 56, 128, 14336, 6, nodes_peers.EPS


@dataclass
class Problem:
    """A node with its inputs, the stock expressions for it, and the bytes it must move (reads and writes)."""

    op: NodeOp
    tensors: tuple[Tensor | None, ...]
    diffusers: Callable[..., Any]
    peer_tensors: tuple[Tensor, ...]
    forward_bytes: int
    backward_bytes: int
    settings: dict[str, Any] = field(default_factory=dict)

    def run(self) -> tuple[Tensor, ...]:
        """Outputs and what is kept."""
        return self.op._run(self.tensors, self.settings)

    def through_autograd(self, *tensors: Tensor) -> Any:
        """The node as a function of the stock expression's tensors."""
        return self.op(*tensors, *self.tensors[len(tensors) :], **self.settings)

    def backward(self, grads: tuple[Tensor, ...], kept: tuple[Tensor, ...]) -> Any:
        """Gradients of the activations; weights and tables are frozen, as under LoRA."""
        needs = tuple(
            t is not None and t.is_floating_point() and t.shape[0] == grads[0].shape[0] for t in self.tensors
        )
        run = self.op._implementation(grads[0].device, "backward")
        return run(*grads, *self.tensors, *kept, needs=needs, **self.settings)


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16)


def problems(rows: int) -> Iterator[tuple[str, Problem]]:
    x, branch, weight = random(rows, HIDDEN), random(rows, HIDDEN), random(HIDDEN, scale=0.2) + 1.0
    shift, scale, gate = random(TABLE_ROWS, 6 * HIDDEN, scale=0.3).chunk(6, dim=-1)[:3]
    index = torch.arange(rows, device="cuda") * TABLE_ROWS // rows
    act = rows * HIDDEN * 2
    t = (x, weight, shift, scale, index)
    yield "rms_norm_modulate", Problem(
        RMS_NORM_MODULATE, (*t, None), nodes_peers.norm_modulate, t,
        2 * act, 3 * act, {"eps": EPS},
    )  # fmt: skip
    t = (x, gate, branch, index)
    yield (
        "gated_residual",
        Problem(GATED_RESIDUAL, (*t, None), nodes_peers.gated_residual, t, 3 * act, 2 * act),
    )
    t = (x, gate, branch, weight, shift, scale, index)
    yield "gated_residual_norm", Problem(
        GATED_RESIDUAL_NORM, (*t, None), nodes_peers.gated_residual_norm, t,
        4 * act, 5 * act, {"eps": EPS},
    )  # fmt: skip
    qkv = random(rows, 3 * HEADS * DIM)
    q, k, _ = (part.unflatten(-1, (HEADS, DIM)) for part in qkv.chunk(3, dim=-1))
    angles = torch.rand(rows, 48, device="cuda") * 100
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).bfloat16()
    t = (q, k, random(DIM, scale=0.2) + 1.0, random(DIM, scale=0.2) + 1.0, table)
    act = 2 * rows * HEADS * DIM * 2
    yield "qk_norm_rope", Problem(
        QK_NORM_ROPE, (*t, None), nodes_peers.qk_norm_rope, t,
        2 * act, 3 * act, {"eps": EPS, "groups": 8},
    )  # fmt: skip
    t = random(rows, 2 * FFN).chunk(2, dim=-1)
    act = rows * FFN * 2
    yield "swiglu", Problem(SWIGLU, t, nodes_peers.swiglu, t, 3 * act, 5 * act)


def outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def error(found: Any, exact: Any) -> float:
    """Largest relative norm error over the outputs."""
    pairs = zip(outputs(found), outputs(exact), strict=False)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


def step(
    function: Callable[..., Any], tensors: tuple[Tensor, ...], rows: int, grads: tuple[Tensor, ...]
) -> Any:
    """Forward and backward through autograd, gradients of the activations only."""
    leaves = [t.detach().requires_grad_(t.is_floating_point() and t.shape[0] == rows) for t in tensors]
    return torch.autograd.grad(
        outputs(function(*leaves)), [t for t in leaves if t.requires_grad], grads, allow_unused=True
    )


def copy_of(size: int) -> Callable[[], object]:
    """A device copy that moves `size` bytes, half read, half written."""
    source = torch.empty(size // 2, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def time_cell(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    return {name: round(t.median_us, 2) for name, t in interleaved_bench(variants, rounds=rounds).items()}


def row_nodes(rows: int, rounds: int) -> Iterator[dict[str, Any]]:
    fused = nodes_peers.fused()
    for name, p in problems(rows):
        result = p.run()
        outs, kept = result[: p.op.outputs], result[p.op.outputs :]
        grads = tuple(random(*o.shape) for o in outs)
        wide = tuple(t.double() if t.is_floating_point() else t for t in p.peer_tensors)
        exact = p.diffusers(*wide)
        variants: dict[str, Callable[[], object]] = {
            "ours": p.run,
            "diffusers": lambda p=p: p.diffusers(*p.peer_tensors),
            "copy": copy_of(p.forward_bytes),
        }
        errors = {"ours": error(outs, exact), "diffusers": error(p.diffusers(*p.peer_tensors), exact)}
        if name in fused:
            variants["vllm_omni"] = lambda p=p, f=fused[name]: f(*p.peer_tensors)
            errors["vllm_omni"] = error(fused[name](*p.peer_tensors), exact)
        yield record(name, "forward", rows, time_cell(variants, rounds), errors)

        exact = gradients(step(p.diffusers, wide, rows, tuple(g.double() for g in grads)))
        errors = {
            "ours": error(gradients(p.backward(grads, kept)), exact),
            "diffusers": error(gradients(step(p.diffusers, p.peer_tensors, rows, grads)), exact),
        }
        alone = {"ours": lambda p=p, g=grads, k=kept: p.backward(g, k), "copy": copy_of(p.backward_bytes)}
        yield record(name, "backward", rows, time_cell(alone, rounds), errors)

        both = {
            "ours": lambda p=p, g=grads: step(p.through_autograd, p.peer_tensors, rows, g),
            "diffusers": lambda p=p, g=grads: step(p.diffusers, p.peer_tensors, rows, g),
            "copy": copy_of(p.forward_bytes + p.backward_bytes),
        }
        yield record(name, "forward and backward", rows, time_cell(both, rounds), {})


def gradients(found: Any) -> tuple[Tensor, ...]:
    """The gradients there are: a weight or table that is frozen has none."""
    return tuple(g for g in found if g is not None)


def record(
    node: str, direction: str, rows: int, times: dict[str, float], errors: dict[str, float], **more: Any
) -> dict[str, Any]:
    peers = {name: us for name, us in times.items() if name not in ("ours", "copy")}
    entry: dict[str, Any] = {"node": node, "direction": direction, "rows": rows, "ours_us": times["ours"]}
    entry |= {"peers_us": peers, "ratio": {name: round(times["ours"] / us, 3) for name, us in peers.items()}}
    if "copy" in times:
        entry |= {"copy_us": times["copy"], "copy_over_ours": round(times["copy"] / times["ours"], 3)}
    return entry | {"error_fp64": errors} | more


def attention(rows: int, rounds: int) -> Iterator[dict[str, Any]]:
    q, k, v, dout = (random(rows, HEADS, DIM) for _ in range(4))
    cu = torch.tensor([0, rows], dtype=torch.int32, device="cuda")
    scale = DIM**-0.5
    call = attention_providers.AttentionCall.of(q)
    proofs, forward = {}, {}
    for p in attention_providers.registered():
        reason = p.refuses(call)
        proof = attention_providers.probe(p, call, q.device) if reason is None else None
        proofs[p.name] = reason or f"{'legal' if proof.ok else 'refused'}: {proof.detail}"
        if reason is None:
            forward[p.name] = lambda p=p: p.forward(q, k, v, cu, rows, scale)
    dense = [x.transpose(0, 1)[None] for x in (q, k, v)]
    stock = torch.ops.aten._scaled_dot_product_cudnn_attention
    forward["stock cuDNN"] = lambda: stock(*dense, None, True, 0.0, False, False, scale=scale)
    chosen = attention_providers.choose(call, "auto", q.device)
    variants = {"ours": lambda: chosen.forward(q, k, v, cu, rows, scale), **forward}
    head = slice(0, 2)
    exact = _exact_attention(q[:, head], k[:, head], v[:, head], dout[:, head], scale)
    errors = {n: error(_heads(f()[0], rows)[:, head], exact[0]) for n, f in variants.items()}
    flops = 4 * rows * rows * HEADS * DIM
    times = time_cell(variants, rounds)
    tflops = {n: round(flops / t / 1e6, 1) for n, t in times.items()}
    yield record(
        "attention", "forward", rows, times, errors, provider=chosen.name, probes=proofs, tflops=tflops
    )

    out, lse = chosen.forward(q, k, v, cu, rows, scale)
    backward = {
        "ours": lambda: attention_backward.attention_backward(dout, q, k, v, out, lse, cu, rows, scale),
        **stock_backwards(q, k, v, dout, cu, rows, scale),
    }
    errors = {}
    for n, f in backward.items():
        grads = tuple(_heads(g, rows)[:, head] for g in f()[:3])
        errors[n] = error(grads, exact[1:])
    times = time_cell(backward, rounds)
    tflops = {n: round(2.5 * flops / t / 1e6, 1) for n, t in times.items()}
    yield record("attention", "backward", rows, times, errors, tflops=tflops)


def _heads(x: Tensor, rows: int) -> Tensor:
    """[T, heads, D] of a packed or a dense [1, heads, T, D] result."""
    return x[0].transpose(0, 1) if x.dim() == 4 else x


def _exact_attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float) -> tuple[Tensor, ...]:
    x = [t.double().transpose(0, 1).requires_grad_() for t in (q, k, v)]
    out = (x[0] @ x[1].transpose(1, 2) * scale).softmax(-1) @ x[2]
    grads = torch.autograd.grad(out, x, dout.double().transpose(0, 1))
    return tuple(t.detach().transpose(0, 1) for t in (out, *grads))


def stock_backwards(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, cu: Tensor, rows: int, scale: float
) -> dict[str, Callable[[], Any]]:
    """torch's own backwards: FlashAttention 2 with and without its deterministic dq, and cuDNN."""
    out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu, cu, rows, rows, 0.0, False, False, scale=scale
    )

    def flash() -> Any:
        return torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, cu, cu, rows, rows, 0.0, False, seed, offset, scale=scale
        )

    def deterministic() -> Any:
        torch.use_deterministic_algorithms(True)
        try:
            return flash()
        finally:
            torch.use_deterministic_algorithms(False)

    dense = [x.transpose(0, 1)[None] for x in (q, k, v, dout)]
    c = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *dense[:3], None, True, 0.0, False, False, scale=scale
    )

    def cudnn() -> Any:
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dense[3],
            *dense[:3],
            c[0],
            c[1],
            c[6],
            c[7],
            None,
            c[2],
            c[3],
            c[4],
            c[5],
            0.0,
            False,
            scale=scale,
        )

    return {"stock flash": flash, "stock flash deterministic": deterministic, "stock cuDNN": cudnn}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/nodes_h200.json")
    parser.add_argument("--rows", type=int, nargs="+", default=[70, 925, 8349])
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.utils.deterministic.fill_uninitialized_memory = False
    cells = []
    for rows in arguments.rows:
        for cell in (*row_nodes(rows, arguments.rounds), *attention(rows, arguments.rounds)):
            cells.append(cell)
            print(
                json.dumps({k: v for k, v in cell.items() if k != "error_fp64"}), file=sys.stderr, flush=True
            )
            records.write(arguments.out, cells)


if __name__ == "__main__":
    main()
