"""Ops of the ``h3_kernels`` namespace, and calls that reach their code without the dispatcher.

An op is opaque to the compiler and the same code in eager mode. Where nothing traces or transforms a call, that code
runs directly: the same bits, in half of the host time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from h3_kernels.reference import traced

NAMESPACE = "h3_kernels"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]

_PLAIN = (Tensor, nn.Parameter)


def op_adds_nothing(*operands: Any) -> bool:
    """Whether a call may pass the dispatcher by, which saves half of its host time and changes no bit.

    Not for subclasses (a DTensor has no memory of its own), lazily negated tensors or zeros without memory, and not
    while torch is compiled, traced or transformed (functorch).
    """
    if torch.compiler.is_compiling() or traced() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(
        type(t) in _PLAIN and not t.is_neg() and not t._is_zerotensor()
        for t in operands
        if isinstance(t, Tensor)
    )


class Op:
    """An op of the namespace, or what it does where ``op_adds_nothing``."""

    def __init__(
        self,
        name: str,
        kernel: Callable[..., Tensor],
        gradient: tuple[Callable[..., Any], Callable[..., None]] | None,
    ) -> None:
        self._op = getattr(torch.ops.h3_kernels, name)
        self._kernel = kernel
        self._function = None if gradient is None else _function(kernel, *gradient)

    def __call__(self, *arguments: Any) -> Tensor:
        """The op of ``arguments``, all of its schema's in order."""
        if op_adds_nothing(*arguments):
            if not (torch.is_grad_enabled() and _any_trained(arguments)):
                return self._kernel(*arguments)
            if self._function is not None:
                y: Tensor = self._function.apply(*arguments)  # type: ignore[no-untyped-call]
                return y
        result: Tensor = self._op(*arguments)
        return result


def _any_trained(arguments: tuple[Any, ...]) -> bool:
    return any(isinstance(t, Tensor) and t.requires_grad for t in arguments)


def _function(
    kernel: Callable[..., Tensor], backward: Callable[..., Any], setup: Callable[..., None]
) -> type[torch.autograd.Function]:
    """The autograd function that ``register_autograd`` makes of an op's gradient."""

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor:
            output = kernel(*inputs)
            setup(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return backward(ctx, *grads)

    return Direct


def define(
    signature: str,
    kernel: Callable[..., Tensor],
    fake: Callable[..., Tensor],
    gradient: tuple[Callable[..., Any], Callable[..., None]] | None = None,
) -> Op:
    """One op: CPU and CUDA kernels are the same function, any other device is an error of the dispatcher.

    ``gradient``: its backward, and what keeps the operands for it.
    """
    name, _, _ = signature.partition("(")
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    _library.define(signature, tags=tags)  # type: ignore[no-untyped-call]
    for device in ("CPU", "CUDA"):
        _library.impl(name, kernel, device)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    if gradient is not None:
        backward, setup = gradient
        torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup, lib=_library)
    return Op(name, kernel, gradient)
