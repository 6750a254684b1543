"""Audit: how many values of an engine's linear differ from the contract's, and where first.

Comparing never waits for the device; reading the totals does.

A row of the contract has the same bits in any batch, so computing it for a few rows of the call checks those rows of
the whole call exactly: an audited forward computes at most ``AUDIT_ROWS`` rows of each linear a second time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

AUDIT_ROWS = 64

_BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True, slots=True)
class AuditRow:
    """What audit mode saw of one linear since the install."""

    node: str
    compared: int
    """Output values compared."""
    differing: int
    """Values whose bits differ."""
    first: tuple[int, int] | None
    """(row, column) of the first difference in the first call that had one; the column is of this rank's shard."""
    provider: float | None
    """The engine's value there."""
    contract: float | None
    """The contract's value there."""

    def __str__(self) -> str:
        where = (
            f", first at {list(self.first)}: {self.provider!r} instead of {self.contract!r}"
            if self.first
            else ""
        )
        return f"{self.node}: {self.differing} of {self.compared} values differ{where}"


def sampled_rows(x: Tensor) -> Tensor:
    """Up to ``AUDIT_ROWS`` evenly spaced row indices of x [M, ...], ascending, with both ends."""
    rows = x.shape[0]
    if rows <= AUDIT_ROWS:
        return torch.arange(rows, device=x.device)
    return torch.arange(AUDIT_ROWS, device=x.device) * (rows - 1) // (AUDIT_ROWS - 1)


class Auditor:
    """Accumulates one linear's comparison in tensors on its device."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None  # [compared, differing] int64
        self._first: Tensor | None = None  # [row, column] int64, -1 until a difference was seen
        self._values: Tensor | None = None  # [provider, contract] fp32 at that place

    def compare(self, provider: Tensor, contract: Tensor, rows: Tensor) -> None:
        """Compare [R, N] outputs bit by bit; ``rows`` [R] are their row numbers in the call."""
        if provider.numel() == 0:
            return
        if self._counts is None or self._first is None or self._values is None:
            self._counts = torch.zeros(2, dtype=torch.int64, device=provider.device)
            self._first = torch.full((2,), -1, dtype=torch.int64, device=provider.device)
            self._values = torch.zeros(2, dtype=torch.float32, device=provider.device)
        bits = _BITS[contract.dtype]
        differs = (provider.contiguous().view(bits) != contract.contiguous().view(bits)).flatten()
        self._counts[0] += differs.numel()
        self._counts[1] += differs.sum()
        flat = differs.to(torch.uint8).argmax()  # the first difference, or 0
        columns = provider.shape[1]
        # ``take`` and not [...]: indexing by a number on the device would bring the number to the host.
        keep = (self._first[0] >= 0) | ~differs.take(flat)
        place = torch.stack([rows.take(flat // columns), flat % columns])
        values = torch.stack([provider.take(flat), contract.take(flat)]).float()
        self._first.copy_(torch.where(keep, self._first, place))
        self._values.copy_(torch.where(keep, self._values, values))

    def row(self, node: str) -> AuditRow:
        """The totals; waits for the device."""
        if self._counts is None or self._first is None or self._values is None:
            return AuditRow(node, 0, 0, None, None, None)
        compared, differing = self._counts.tolist()
        row, column = self._first.tolist()
        if row < 0:
            return AuditRow(node, compared, differing, None, None, None)
        provider, contract = self._values.tolist()
        return AuditRow(node, compared, differing, (row, column), provider, contract)
