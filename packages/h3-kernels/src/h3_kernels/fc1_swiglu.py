"""fc1 and SwiGLU as one launch, where no gradient is needed: gate and value never reach memory.

The order is that of the two nodes: one fp32 chain over K a column, rounded to bf16; on the rounded values the steps of
``nodes.swiglu`` and its one rounding. A launch is proved on the device, once per shape, against the plain chain and the
node run apart. Where it is not served (`refuses`), or not proved, the caller runs the two nodes.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from h3_kernels import tuning
from h3_kernels.binding import Probe
from h3_kernels.cuda_providers import plain, prove
from h3_kernels.dispatch import op_adds_nothing
from h3_kernels.nodes.swiglu import swiglu
from h3_kernels.providers import ALIGNMENT, GemmCall, Unproven, capability

NAME = "triton-fc1-swiglu"


def served(x: Tensor, weight: Tensor, *, gate_first: bool) -> bool:
    """Whether `fc1_swiglu` computes this product: plain CUDA tensors, sizes worth it, and its bits proved for them.

    False, too, while they cannot be proved: during a graph capture, and where memory is short.
    """
    if not op_adds_nothing(x, weight) or not _readable(x, weight):
        return False
    call = _call(x, weight)
    if refuses(call) is not None:
        return False
    try:
        return proof(call, gate_first, x.device).ok
    except Unproven:
        return False


def fc1_swiglu(x: Tensor, weight: Tensor, *, gate_first: bool) -> Tensor:
    """silu(gate) * value [T, F] of x [T, K] and weight [2 F, K], all bf16, for what `served` accepts; no gradient.

    ``gate_first``: the first F rows of the weight are the gate's, else the value's.
    """
    from h3_kernels.triton.fc1_swiglu import launch

    return launch(x, weight, gate_first=gate_first)


def refuses(call: GemmCall) -> str | None:
    """Why the kernel does not serve fc1's product ``call``, or None if it does."""
    if call.capability != (9, 0):
        return f"is written for compute capability 9.0, the device has {call.capability}"
    if call.a_dtype != torch.bfloat16:
        return f"multiplies bf16, the operands are {call.a_dtype}"
    if call.n % 2 or call.n // 2 % tuning.FC1_SWIGLU.n:
        return f"takes halves of a multiple of {tuning.FC1_SWIGLU.n} columns, the weight has {call.n} rows"
    if call.m <= tuning.FC1_SWIGLU_ROWS:
        return f"is slower than the two nodes up to {tuning.FC1_SWIGLU_ROWS} rows, the call has {call.m}"
    return None


@functools.lru_cache(maxsize=1024)
def proof(call: GemmCall, gate_first: bool, device: torch.device) -> Probe:
    """Compare with the plain chain and the SwiGLU node on ``device``.

    Raises Unproven if that cannot be done now; nothing is remembered then.
    """

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return fc1_swiglu(x, weight, gate_first=gate_first)

    def apart(x: Tensor, weight: Tensor) -> Tensor:
        both = plain(x, weight, units=1, out_dtype=torch.bfloat16, bias=None)
        first, second = both.chunk(2, dim=1)
        return swiglu(first, second) if gate_first else swiglu(second, first)

    with torch.no_grad():
        return prove(run, apart, call, device, what="the plain chain and SwiGLU apart")


def _call(x: Tensor, weight: Tensor) -> GemmCall:
    return GemmCall(
        m=x.shape[0],
        n=weight.shape[0],
        k=weight.shape[1],
        units=1,
        a_dtype=x.dtype,
        out_dtype=weight.dtype,
        a_layout="k",
        b_layout="k",
        has_bias=False,
        device_type=x.device.type,
        capability=capability(x.device),
    )


def _readable(*operands: Tensor) -> bool:
    """The copy engine reads rows without gaps that begin on 16 bytes."""
    return all(
        t.is_cuda
        and t.dim() == 2
        and t.is_contiguous()
        and t.data_ptr() % ALIGNMENT == 0
        and t.shape[1] * t.element_size() % ALIGNMENT == 0
        for t in operands
    )
