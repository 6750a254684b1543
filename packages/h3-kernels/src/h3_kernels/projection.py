"""``h3-projection-gemm-v1``: the column-parallel linear, and every projection that tensor parallelism
replicates."""

from collections.abc import Sequence

import torch
from torch import Tensor

from h3_kernels import autograd as _ops  # noqa: F401  # registers torch.ops.h3_kernels
from h3_kernels.collectives.protocol import Collective, check_collective, name_of
from h3_kernels.contract import PROJECTION, UNITS, legality
from h3_kernels.errors import CollectiveError, InputError
from h3_kernels.linear_inputs import check_operands, flatten_rows, require, unflatten_rows
from h3_kernels.logical_keys import LogicalKeys, as_logical_keys


def projection(  # noqa: PLR0913  # one call states the whole contract
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    provider: str = "auto",
    logical_keys: LogicalKeys | Tensor | None = None,
    parts: Sequence[int] = (0,),
    tp: int = 1,
    rank: int = 0,
    collective: Collective | None = None,
    gather_rows: int | None = None,
) -> Tensor:
    """y [..., N] = x [..., K] weight [N, K]^T + bias [N]: one fp32 chain over K per element, rounded once.

    x and weight are both bf16 or both fp32; y has their dtype. A column's bits depend on its weight row
    alone, so a fused weight equals its parts and a shard equals its slice; a row's bits depend on that row of
    x alone.

    Backward: dX is the canonical tree over 8 ranges of N. For a fused weight, ``parts`` lists its equal row
    blocks in the order a unit consumes them: (0, 1, 2) for [q; k; v], (0, 1) for [gate; value], (1, 0) for
    [value; gate]. With ``tp`` above 1, weight is ``rank``'s shard (its 1/tp of every part) and ``collective``
    completes dX; its bits are those of tp=1. dW and dbias sum over rows in ascending ``logical_keys``, or in
    the order given without them.

    ``gather_rows``: x holds this rank's rows of a sequence of that many (sequence parallel,
    ``contract.row_range``); y has all rows, dX again this rank's.

    Raises InputError, ContractError, CollectiveError, LogicalKeysError or ProviderError; nothing is computed
    then.
    """
    check_operands("projection", x, weight, bias)
    order_of_parts = _checked_parts(parts)
    require(
        "projection", legality(PROJECTION, n=weight.shape[0] * tp, k=weight.shape[1], tp=tp, parts=len(parts))
    )
    check_collective(collective, tp, rank, UNITS)
    rows = flatten_rows(x)
    if gather_rows is not None and (tp == 1 or x.dim() != 2):
        raise CollectiveError(
            f"projection: gather_rows needs tp above 1 and x [T, K]; got tp={tp}, x {list(x.shape)}"
        )
    keys = as_logical_keys(logical_keys)
    if keys is not None:
        keys.check_rows(rows.shape[0] if gather_rows is None else gather_rows)
    y = torch.ops.h3_kernels.column_parallel(
        rows,
        weight,
        bias,
        None if keys is None else keys.order,
        order_of_parts,
        input_grad_units(weight.shape[0] * tp, len(parts)) // tp,
        gather_rows or 0,
        provider,
        name_of(collective),
    )
    return y if gather_rows is not None else unflatten_rows(y, x)


def input_grad_units(n: int, parts: int) -> int:
    """Units of dX of a whole N x K weight: 8, or 1 (a plain chain) where N does not divide and so cannot be
    sharded."""
    return 1 if n % (parts * UNITS) else UNITS


def _checked_parts(parts: Sequence[int]) -> list[int]:
    if not parts or sorted(parts) != list(range(len(parts))):
        raise InputError(
            f"projection: parts {list(parts)} is not a permutation of 0..{max(len(parts) - 1, 0)}"
        )
    return list(parts)
