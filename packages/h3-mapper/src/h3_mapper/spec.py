"""The vocabulary of a mapping: layouts, atoms, tensors and ordered row blocks. No arithmetic, no I/O.

Every difference between two H3 layouts is a renaming and a reordering of whole rows (dim 0). A row-major
tensor's rows are contiguous bytes, so one primitive is enough: a target tensor is a list of `Rows`, and
moving a checkpoint between layouts is copying byte ranges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NoReturn

from h3_mapper.errors import LayoutError

if TYPE_CHECKING:
    from h3_mapper.config import H3Config

ITEMSIZE = {"F32": 4, "BF16": 2}
"""Bytes per element of the dtypes an H3 transformer has, by their safetensors names."""


class Layout(StrEnum):
    """Where rows live. `release` and `module` share every name, shape and dtype: only a statement tells."""

    DIFFUSERS = "diffusers"
    """638 tensors: to_q, to_k, to_v apart; ff.net.0.proj rows [value; gate]; no rope.inv_freq."""
    RELEASE = "release"
    """535 tensors, the native files on disk: qkv_proj rows per head [q k v]; fc1 [gate; value]."""
    MODULE = "module"
    """535 tensors, a loaded native module's state: qkv_proj rows [Q; K; V]; fc1 [gate; value]."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise LayoutError(f"{value!r} is not a layout; expected {', '.join(cls)}")

    @property
    def native(self) -> bool:
        """Whether this layout has native names (`blocks.0.attn.qkv_proj.weight`)."""
        return self is not Layout.DIFFUSERS


class Part(StrEnum):
    """What the rows of an atom are."""

    Q = "q"
    K = "k"
    V = "v"
    GATE = "gate"
    VALUE = "value"
    PLAIN = "plain"


class Parallel(StrEnum):
    """How tensor parallelism cuts an atom (vLLM-Omni 0.30 module tree)."""

    COLUMN = "column"
    """dim 0 is cut, atom by atom: q, k, v by head range, gate and value each by rows."""
    ROW = "row"
    """dim 1 is cut."""
    WHOLE = "whole"
    """every rank holds it whole."""


@dataclass(frozen=True, slots=True)
class Atom:
    """Rows that stay together, in order, in every layout: the layout-independent unit of identity.

    name: the native tensor's name, with the part in brackets if it is fused: `blocks.0.mlp.fc1.weight[gate]`.
    shape, dtype: of the atom alone (a q atom has inner_size rows). group: one of `groups(config)`.
    """

    name: str
    part: Part
    shape: tuple[int, ...]
    dtype: str
    group: str
    parallel: Parallel

    @property
    def rows(self) -> int:
        """Length of dim 0."""
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole atom."""
        return self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of one layout."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: str

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [start, stop) of an atom, lying in a tensor of some layout from that tensor's row `row` on."""

    atom: str
    start: int
    stop: int
    row: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [start, stop) of the source tensor `name`."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Target:
    """One tensor to build: the concatenation of `rows` along dim 0.

    A derived tensor (rope.inv_freq) has no rows; `data` then holds its little-endian bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: str
    rows: tuple[Rows, ...]
    data: bytes | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Plan:
    """How to build every tensor of layout `target` from the tensors of layout `source`.

    sources: everything the source holds, in the source layout's order.
    targets: everything to write, in the target layout's order.
    checks: the derived tensors among `sources`; their bits are compared, never copied.
    """

    source: Layout
    target: Layout
    config: H3Config
    sources: tuple[TensorSpec, ...]
    targets: tuple[Target, ...]
    checks: tuple[Target, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all targets."""
        return sum(t.nbytes for t in self.targets)

    def inverse(self) -> Plan:
        """The plan from `target` back to `source`, computed from the row blocks (not from the table).

        Raises PlanError if the blocks do not cover every source row exactly once.
        """
        from h3_mapper.proof import invert

        return invert(self)
