"""Logical keys: the identity of each row, and so the order in which weight gradients consume rows.

A weight gradient sums over rows. Rows are packed, padded and permuted differently by every engine and every batch, so
the sum follows the rows' keys, not their place in memory: ascending, lexicographic, padding dropped.
"""

import torch
from torch import Tensor

from h3_kernels.errors import LogicalKeysError

KEY_WIDTHS = (2, 3)


class LogicalKeys:
    """Keys of the T rows of one microbatch, checked, copied and sorted once, used by every linear of the model.

    ``keys`` is int64 [T, 2] or [T, 3], for example (sample, token). A row whose first column is negative is padding
    and takes no part in weight gradients. Active keys must be unique. Building one synchronises with the device.

    Raises LogicalKeysError for another dtype or shape, or if an active key occurs twice.
    """

    __slots__ = ("__weakref__", "keys", "order")

    def __init__(self, keys: Tensor) -> None:
        if keys.dtype != torch.int64 or keys.dim() != 2 or keys.shape[1] not in KEY_WIDTHS:
            raise LogicalKeysError(
                f"keys are {keys.dtype} {list(keys.shape)}; expected int64 [T, 2] or [T, 3]"
            )
        self.keys = keys.detach().clone()
        self.order = canonical_order(self.keys)
        """int64 indices of the active rows in ascending key order, or None if the rows already are in that order."""

    @property
    def rows(self) -> int:
        """T, padding included."""
        return self.keys.shape[0]

    def check_rows(self, rows: int) -> None:
        """Raise LogicalKeysError unless there is one key for each of ``rows`` rows."""
        if rows != self.rows:
            raise LogicalKeysError(
                f"{self.rows} keys for {rows} rows; give one key a row, padding rows included"
            )


def as_logical_keys(keys: "LogicalKeys | Tensor | None") -> LogicalKeys | None:
    """``keys`` itself, or built from a tensor, or None."""
    return LogicalKeys(keys) if isinstance(keys, Tensor) else keys


def keys_of_rows(keys: "LogicalKeys | Tensor | None", rows: int, device: torch.device) -> LogicalKeys | None:
    """``keys`` for ``rows`` rows on ``device``, or None.

    Raises LogicalKeysError if they are of another number of rows, or if their order cannot be applied there.
    """
    keys = as_logical_keys(keys)
    if keys is None:
        return None
    keys.check_rows(rows)
    if keys.order is not None and keys.order.device != device:
        raise LogicalKeysError(
            f"keys are on {keys.order.device}, their rows on {device}; move the keys there"
        )
    return keys


def canonical_order(keys: Tensor) -> Tensor | None:
    """Indices of the active rows of ``keys`` [T, W] in ascending order; None if that is 0..T-1.

    Raises LogicalKeysError, naming the key and both rows, if an active key occurs twice.
    """
    if _ascend(keys):
        return None
    active = (keys[:, 0] >= 0).nonzero().squeeze(1)
    order = active
    for column in reversed(range(keys.shape[1])):
        order = order[torch.argsort(keys[order, column], stable=True)]
    ordered = keys[order]
    twice = (ordered[1:] == ordered[:-1]).all(dim=1).nonzero()
    if twice.numel():
        at = int(twice[0])
        raise LogicalKeysError(
            f"key {ordered[at].tolist()} is on rows {int(order[at])} and {int(order[at + 1])}; "
            "active keys must be unique"
        )
    identity = torch.arange(keys.shape[0], device=keys.device)
    return None if torch.equal(order, identity) else order


def _ascend(keys: Tensor) -> bool:
    """Whether every row is active and its key above the one before: the common case, told by one read of the device."""
    earlier, later = keys[:-1].unbind(1), keys[1:].unbind(1)
    above, tied = later[0] > earlier[0], later[0] == earlier[0]
    for before, after in zip(earlier[1:], later[1:], strict=True):
        above = above | (tied & (after > before))
        tied = tied & (after == before)
    return bool(above.all() & (keys[:, 0] >= 0).all())
