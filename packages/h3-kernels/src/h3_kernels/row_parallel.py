"""``h3-parallel-v1``: the row-parallel linear, whose bytes do not depend on the tensor-parallel degree."""

from torch import Tensor

from h3_kernels.collectives.protocol import Collective, check_collective, name_of
from h3_kernels.contract import UNITS, legality, parallel_id, parse_parallel_id
from h3_kernels.errors import ContractError, InputError
from h3_kernels.linear_inputs import check_operands, require
from h3_kernels.linears import RowCall, apply_linear
from h3_kernels.logical_keys import LogicalKeys, keys_of_rows


def row_parallel(  # noqa: PLR0913  # one call states the whole contract
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    contract: str = parallel_id(UNITS),
    tp: int = 1,
    rank: int = 0,
    collective: Collective | None = None,
    provider: str = "auto",
    logical_keys: LogicalKeys | Tensor | None = None,
    scatter_rows: bool = False,
) -> Tensor:
    """y [..., N] = x [..., K] weight [N, K]^T + bias [N]: unit chains over K, canonical fp32 tree, one rounding.

    x and weight are both bf16 or both fp32; y has their dtype. With ``tp`` above 1 they are ``rank``'s K / tp
    columns, ``collective`` adds the ranks' fp32 subtree roots, and y is whole on every rank. ``bias`` is whole on
    every rank.

    Backward: dX is one chain over N, local to the rank; dW and dbias sum over rows in ascending ``logical_keys``, or
    in the order given without them.

    ``scatter_rows``: y holds this rank's rows only (sequence parallel, ``contract.row_range``); x is then [T, K /
    tp].

    Raises InputError, ContractError, CollectiveError, LogicalKeysError or ProviderError; nothing is computed then.
    """
    check_operands("row_parallel", x, weight, bias)
    try:
        units = parse_parallel_id(contract)
    except ValueError as error:
        raise ContractError(f"row_parallel: {error}") from None
    require("row_parallel", legality(contract, n=weight.shape[0], k=weight.shape[1] * tp, tp=tp))
    check_collective(collective, tp, rank, units)
    if scatter_rows and x.dim() != 2:
        raise InputError(f"row_parallel: scatter_rows needs x [T, K], got {list(x.shape)}; flatten it first")
    rows = x.numel() // max(x.shape[-1], 1)
    keys = keys_of_rows(logical_keys, rows, x.device)
    call = RowCall(keys, units // tp, scatter_rows, provider, name_of(collective))
    return apply_linear(call, x, weight, bias)
