"""One autograd function for every node: written order on CPU, ``h3_kernels.triton`` on CUDA, never a mixture.

A node is a pair of functions with one calling convention, on both devices:

``forward(*tensors, **settings)`` returns the node's outputs, followed by whatever its backward wants kept;
``backward(*grads, *tensors, *kept, needs=..., **settings)`` returns one gradient for each of ``tensors``
(None where ``needs`` is False). On CUDA the two are ``launch_<node>`` and ``launch_<node>_backward`` of
``h3_kernels.triton.<module>``, imported when the first CUDA tensor arrives.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from h3_kernels.errors import InputError, ProviderError

_TOO_WIDE = (torch.float64, torch.complex64, torch.complex128)

Outputs = Tensor | tuple[Tensor, ...]


def check(condition: bool, node: str, message: str, *given: Any) -> None:
    """Raise InputError with ``message`` unless ``condition`` holds; ``given`` fills its braces, a tensor by its shape.

    Filled in only then: a forward of 50 blocks makes 1500 checks that hold.
    """
    if not condition:
        shown = (list(value.shape) if isinstance(value, Tensor) else value for value in given)
        raise InputError(f"{node}: {message.format(*shown)}")


@functools.cache
def _launcher(module: str, entry: str) -> Callable[..., Any]:
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(f"h3_kernels.triton.{module}"), entry)
    except (ImportError, AttributeError) as error:
        raise ProviderError(
            f"{module}: no CUDA implementation ({error}); install triton, or move the tensors to the CPU"
        ) from error
    return found


@dataclass(frozen=True)
class NodeOp:
    """A node: its name, the CUDA module that implements it, and its written order for the CPU.

    ``outputs`` counts the tensors ``forward`` returns to the caller; the rest are kept for ``backward``.
    """

    name: str
    module: str
    forward: Callable[..., Outputs]
    backward: Callable[..., tuple[Tensor | None, ...]]
    outputs: int = 1

    def _implementation(self, device: torch.device, direction: str) -> Callable[..., Any]:
        if device.type == "cpu":
            return self.forward if direction == "forward" else self.backward
        check(device.type == "cuda", self.name, "runs on CPU and CUDA tensors, got one on {}", device)
        return _launcher(self.module, f"launch_{self.name}" + ("" if direction == "forward" else "_backward"))

    def _run(self, tensors: tuple[Tensor | None, ...], settings: dict[str, Any]) -> tuple[Tensor, ...]:
        device = _device_of(self.name, tensors)
        result = self._implementation(device, "forward")(*tensors, **settings)
        return result if isinstance(result, tuple) else (result,)

    def __call__(self, *tensors: Tensor | None, **settings: Any) -> Any:
        """Run the node; returns one tensor, or a tuple when the node has several outputs.

        Never inside a compiled graph: inductor drops a node's rounding to bf16 where the next node reads the value.
        """
        if torch.compiler.is_compiling():
            return _eagerly(self, tensors, settings)
        return self._call(tensors, settings)

    def _call(self, tensors: tuple[Tensor | None, ...], settings: dict[str, Any]) -> Any:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            return _Apply.apply(self, settings, *tensors)  # type: ignore[no-untyped-call]
        kept = self._run(tensors, settings)
        return kept[0] if self.outputs == 1 else kept[: self.outputs]


# torch.compiler.disable, but loading the compiler only when called: it would double the time this package takes.
@_disable_dynamo
def _eagerly(op: NodeOp, tensors: tuple[Tensor | None, ...], settings: dict[str, Any]) -> Any:
    return op._call(tensors, settings)


def _device_of(node: str, tensors: tuple[Tensor | None, ...]) -> torch.device:
    """The device of all tensors. Raises InputError if they are on several, or one is too wide for fp32."""
    device = None
    for t in tensors:
        if t is None:
            continue
        if device is None:
            device = t.device
        check(t.device == device, node, "all tensors must be on one device, got {} and {}", device, t.device)
        wide = t.dtype in _TOO_WIDE
        check(not wide, node, "computes in fp32, got a float64 or complex tensor; round it first")
    check(device is not None, node, "needs a tensor")
    assert device is not None
    return device


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: NodeOp, settings: dict[str, Any], *tensors: Tensor | None) -> Outputs:
        result = op._run(tensors, settings)
        ctx.op, ctx.settings = op, settings
        ctx.save_for_backward(*tensors, *result[op.outputs :])
        return result[0] if op.outputs == 1 else result[: op.outputs]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        needs = tuple(ctx.needs_input_grad[2:])
        run = ctx.op._implementation(grads[0].device, "backward")
        return (None, None, *run(*grads, *saved, needs=needs, **ctx.settings))
