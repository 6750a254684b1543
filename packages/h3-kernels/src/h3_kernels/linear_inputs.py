"""Checks shared by the two public linears, and the flattening of leading dimensions."""

from torch import Tensor

from h3_kernels.contract import Legal, Rejected
from h3_kernels.errors import ContractError, InputError
from h3_kernels.providers import DTYPES


def check_operands(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise InputError unless x [..., K], weight [N, K] and bias [N] fit, share a device, and x and weight a dtype."""
    for operand, given in (("x", x), ("weight", weight)):
        if not isinstance(given, Tensor):
            raise InputError(f"{name}: {operand} is a {type(given).__name__}; expected a torch.Tensor")
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise InputError(
            f"{name}: x {list(x.shape)} and weight {list(weight.shape)}; expected [..., K] and [N, K]"
        )
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        raise InputError(
            f"{name}: x is {x.dtype}, weight is {weight.dtype}; expected one dtype, bf16 or fp32"
        )
    if weight.device != x.device:
        raise InputError(f"{name}: x is on {x.device}, weight on {weight.device}; move them to one device")
    if x.device.type not in ("cpu", "cuda"):
        raise InputError(f"{name}: no provider runs on {x.device}; use the CPU or a CUDA device")
    if bias is None:
        return
    if bias.shape != weight.shape[:1] or bias.dtype not in DTYPES or bias.device != x.device:
        raise InputError(
            f"{name}: bias {list(bias.shape)} {bias.dtype} on {bias.device}; "
            f"expected [{weight.shape[0]}], bf16 or fp32, on {x.device}"
        )


def require(name: str, verdict: Legal | Rejected) -> None:
    """Raise ContractError with the reason of a rejection."""
    if isinstance(verdict, Rejected):
        raise ContractError(f"{name}: {verdict.reason}")
