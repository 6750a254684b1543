"""The two arithmetic contracts as data: ids, units, the tree, and which shapes are legal. Needs no torch.

``h3-projection-gemm-v1``: every output element is one *chain*: a single fp32 accumulator that starts at zero and
consumes K in ascending 16-wide steps, then one round-to-nearest-even to the output dtype.

``h3-parallel-v1-uU``: K is cut into U equal contiguous *units*. Each unit is a chain; the U partials are added in
fp32 along the canonical tree, the bias is added in fp32 at the root, and the root is rounded once. Rank r of tp owns
units [U r / tp, U (r + 1) / tp): a whole subtree, so it sends one fp32 tensor and the bytes are those of one process.

Both contracts are declared by this project; docs/contract.md gives the order of the backward pass.
"""

from dataclasses import dataclass
from typing import Final

PROJECTION: Final = "h3-projection-gemm-v1"
PARALLEL_PREFIX: Final = "h3-parallel-v1-u"

UNITS: Final = 8
UNIT_COUNTS: Final = (1, 2, 4, 8)
TP_DEGREES: Final = (1, 2, 4, 8)
MMA_K: Final = 16
"""Width of one MMA step of bf16 operands (PTX ISA, mma and wgmma: K is 16)."""

Tree = int | tuple["Tree", "Tree"]


@dataclass(frozen=True, slots=True)
class Legal:
    """The contract covers the call."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The contract does not cover the call; ``reason`` is one line for people."""

    reason: str


def tree(units: int = UNITS) -> Tree:
    """Nested pairs of unit numbers in the order they are added: ``((0, 1), (2, 3))`` for 4 units.

    Raises ValueError unless ``units`` is 1, 2, 4 or 8.
    """
    if units not in UNIT_COUNTS:
        raise ValueError(f"unit count {units} is not one of {UNIT_COUNTS}")
    nodes: list[Tree] = list(range(units))
    while len(nodes) > 1:
        nodes = [(nodes[i], nodes[i + 1]) for i in range(0, len(nodes), 2)]
    return nodes[0]


TREE: Final[Tree] = tree(UNITS)


def parallel_id(units: int = UNITS) -> str:
    """Contract id of the row-parallel order with ``units`` units. Raises ValueError for another count."""
    if units not in UNIT_COUNTS:
        raise ValueError(f"unit count {units} is not one of {UNIT_COUNTS}")
    return f"{PARALLEL_PREFIX}{units}"


def parse_parallel_id(contract: str) -> int:
    """Unit count of a row-parallel contract id. Raises ValueError for anything else, naming the ids there are."""
    known = {parallel_id(units): units for units in UNIT_COUNTS}
    if contract not in known:
        raise ValueError(f"contract {contract!r} is not a row-parallel contract; known: {', '.join(known)}")
    return known[contract]


def unit_bounds(k: int, units: int = UNITS) -> tuple[tuple[int, int], ...]:
    """Half-open K range of every unit, ascending. Raises ValueError unless ``units`` divides ``k``."""
    if units not in UNIT_COUNTS:
        raise ValueError(f"unit count {units} is not one of {UNIT_COUNTS}")
    if k <= 0 or k % units:
        raise ValueError(f"K={k} does not divide into {units} equal units")
    width = k // units
    return tuple((u * width, (u + 1) * width) for u in range(units))


def rank_units(tp: int, rank: int, units: int = UNITS) -> tuple[int, int]:
    """Half-open range of the units that ``rank`` of ``tp`` owns: always one whole subtree of the canonical tree.

    Raises ValueError unless tp is 1, 2, 4 or 8, does not exceed ``units``, and 0 <= rank < tp.
    """
    if units not in UNIT_COUNTS:
        raise ValueError(f"unit count {units} is not one of {UNIT_COUNTS}")
    if tp not in TP_DEGREES or tp > units:
        raise ValueError(
            f"tp={tp} does not divide {units} units; use one of {UNIT_COUNTS[: units.bit_length()]}"
        )
    if not 0 <= rank < tp:
        raise ValueError(f"rank {rank} is not in 0..{tp - 1}")
    width = units // tp
    return rank * width, (rank + 1) * width


def row_range(rows: int, tp: int, rank: int) -> tuple[int, int]:
    """Half-open range of the rows ``rank`` holds of scattered ``rows``: ceil(rows / tp) each, the last ones fewer."""
    chunk = -(-rows // tp)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


def legality(contract: str, *, n: int, k: int, tp: int = 1, parts: int = 1) -> Legal | Rejected:
    """Whether ``contract`` covers a linear of N x K (sizes of the whole weight, not of a shard) at degree ``tp``.

    ``parts`` is the number of equal row blocks a fused column-parallel weight holds (3 for q/k/v, 2 for gate/value);
    tensor parallelism shards each of them, and the backward pass cuts each of them into 8 units (docs/contract.md).
    """
    if n <= 0 or k <= 0:
        return Rejected(f"N={n}, K={k}: both must be positive")
    if contract == PROJECTION:
        return _projection_legality(n, tp, parts)
    try:
        units = parse_parallel_id(contract)
        rank_units(tp, 0, units)
        unit_bounds(k, units)
    except ValueError as error:
        return Rejected(str(error))
    return Legal()


def _projection_legality(n: int, tp: int, parts: int) -> Legal | Rejected:
    if tp not in TP_DEGREES:
        return Rejected(f"tp={tp} is not one of {TP_DEGREES}")
    if parts < 1 or n % parts:
        return Rejected(f"N={n} does not divide into {parts} equal parts")
    if tp > 1 and n % (parts * UNITS):
        return Rejected(
            f"N={n} in {parts} parts does not divide into {UNITS} units each, so dX has no order at tp={tp}"
        )
    return Legal()
