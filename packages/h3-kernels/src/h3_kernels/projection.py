"""``h3-projection-gemm-v1``: the column-parallel linear, and every projection that tensor parallelism replicates."""

from collections.abc import Sequence

from torch import Tensor

from h3_kernels.collectives.protocol import Collective, check_collective, name_of
from h3_kernels.contract import PROJECTION, UNITS, legality
from h3_kernels.errors import InputError
from h3_kernels.linear_inputs import check_operands, require
from h3_kernels.linears import ColumnCall, apply_group, apply_linear
from h3_kernels.logical_keys import LogicalKeys, keys_of_rows

Keys = LogicalKeys | Tensor | None


def projection(  # noqa: PLR0913  # one call states the whole contract
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    provider: str = "auto",
    logical_keys: Keys = None,
    parts: Sequence[int] = (0,),
    tp: int = 1,
    rank: int = 0,
    collective: Collective | None = None,
    gather_rows: int | None = None,
) -> Tensor:
    """y [..., N] = x [..., K] weight [N, K]^T + bias [N]: one fp32 chain over K per element, rounded once.

    x and weight are both bf16 or both fp32; y has their dtype. A column's bits depend on its weight row alone, so a
    fused weight equals its parts and a shard equals its slice; a row's bits depend on that row of x alone.

    Backward: dX is the canonical tree over 8 ranges of N. For a fused weight, ``parts`` lists its equal row blocks in
    the order a unit consumes them: (0, 1, 2) for [q; k; v], (0, 1) for [gate; value], (1, 0) for [value; gate]. With
    ``tp`` above 1, weight is ``rank``'s shard (its 1/tp of every part) and ``collective`` completes dX; its bits are
    those of tp=1. dW and dbias sum over rows in ascending ``logical_keys``, or in the order given without them.

    ``gather_rows``: x holds this rank's rows of a sequence of that many (sequence parallel, ``contract.row_range``);
    y has all rows, dX again this rank's.

    Raises InputError, ContractError, CollectiveError, LogicalKeysError or ProviderError; nothing is computed then.
    """
    check_operands("projection", x, weight, bias)
    if not parts or sorted(parts) != list(range(len(parts))):
        raise InputError(
            f"projection: parts {list(parts)} is not a permutation of 0..{max(len(parts) - 1, 0)}"
        )
    n = weight.shape[0] * tp
    require("projection", legality(PROJECTION, n=n, k=weight.shape[1], tp=tp, parts=len(parts)))
    check_collective(collective, tp, rank, UNITS)
    if gather_rows is not None and x.dim() != 2:
        raise InputError(f"projection: gather_rows needs x [T, K], got {list(x.shape)}; flatten it first")
    rows = x.numel() // max(x.shape[-1], 1)
    call = ColumnCall(
        keys=keys_of_rows(logical_keys, rows if gather_rows is None else gather_rows, x.device),
        parts=list(parts),
        units=input_grad_units(n, len(parts)) // tp,
        gather_rows=gather_rows or 0,
        out_dtype=x.dtype,
        provider=provider,
        collective=name_of(collective),
    )
    return apply_linear(call, x, weight, bias)


def projection_group(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    provider: str = "auto",
    logical_keys: Keys = None,
    tp: int = 1,
    rank: int = 0,
    collective: Collective | None = None,
) -> tuple[Tensor, ...]:
    """[projection(x, w, b) for every weight], with the dX of the fused weight: one tree, one rounding.

    Equals ``projection(x, cat(weights), parts=(0, 1, ...))`` bit for bit in y, dX, dW and dbias. Separate
    ``projection`` calls agree in all but dX, which autograd then adds up from rounded parts. Weights are [N, K] of
    one shape.

    Raises what ``projection`` raises.
    """
    weights, biases = list(weights), [None] * len(weights) if biases is None else list(biases)
    if not weights or len(biases) != len(weights) or len({w.shape for w in weights}) > 1:
        shapes = [list(w.shape) for w in weights]
        raise InputError(
            f"projection_group: weights {shapes}, {len(biases)} biases; expected equal shapes, a bias each"
        )
    for weight, bias in zip(weights, biases, strict=True):
        check_operands("projection_group", x, weight, bias)
    parts, n = len(weights), weights[0].shape[0] * len(weights) * tp
    require("projection_group", legality(PROJECTION, n=n, k=x.shape[-1], tp=tp, parts=parts))
    check_collective(collective, tp, rank, UNITS)
    rows = x.numel() // max(x.shape[-1], 1)
    call = ColumnCall(
        keys=keys_of_rows(logical_keys, rows, x.device),
        parts=list(range(parts)),
        units=input_grad_units(n, parts) // tp,
        gather_rows=0,
        out_dtype=x.dtype,
        provider=provider,
        collective=name_of(collective),
    )
    return apply_group(call, x, weights, biases)


def input_grad_units(n: int, parts: int) -> int:
    """Units of dX of a whole [N, K] weight: 8, or 1 (a plain chain) where N does not divide, so cannot be sharded."""
    return 1 if n % (parts * UNITS) else UNITS
