"""What an installed adapter did with each node: bound, external or refused. Importing it imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from h3_kernels.contract import PROJECTION

if TYPE_CHECKING:
    import torch

    from h3_kernels.providers import GemmCall

_SHOWN = 13  # tensor names in one reason: the checkpoint's twelve fp32 tensors and rope.inv_freq


class Style(StrEnum):
    """How tensor parallelism cuts a linear, and so which contract it computes."""

    COLUMN = "column"
    """Each rank holds some of the output features of every row block."""
    ROW = "row"
    """Each rank holds a contiguous K range; the partial sums are reduced."""

    def contract(self, row_parallel: str) -> str:
        """Contract id of such a linear when row-parallel linears use ``row_parallel``."""
        return row_parallel if self is Style.ROW else PROJECTION


@dataclass(frozen=True, slots=True)
class Probe:
    """Outcome of comparing a provider's bits with the fixed-order chain on the device that will run it."""

    ok: bool
    detail: str
    """One line: what was compared and on which inputs, or what differed first."""
    compared: int = 0
    """Number of output values compared."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The node computes ``contract`` through ``provider``."""

    contract: str
    provider: str
    probe: Probe | None = None

    state = "bound"

    @property
    def detail(self) -> str:
        """One line for the report's table."""
        proof = f"; {self.probe.detail}" if self.probe else ""
        return f"{self.contract} by {self.provider}{proof}"


@dataclass(frozen=True, slots=True)
class External:
    """The node stays the engine's own ``operator``; the contract says nothing about it."""

    operator: str

    state = "external"

    @property
    def detail(self) -> str:
        """One line for the report's table."""
        return self.operator


@dataclass(frozen=True, slots=True)
class Refused:
    """The node should have been bound and was not."""

    reason: str

    state = "refused"

    @property
    def detail(self) -> str:
        """One line for the report's table."""
        return self.reason


Binding = Bound | External | Refused


@dataclass(frozen=True, slots=True)
class Ran:
    """The last call of a bound linear, as read back by the report."""

    forward: int
    """Number of the model's forward since the install."""
    rows: int
    device: torch.device
    k_contiguous: bool


def served(contract: str, call: GemmCall, device: torch.device, wanted: str) -> Binding:
    """What served ``call``: ``choose`` remembers what it chose for it, so this is the provider that ran."""
    from h3_kernels.errors import ProviderError
    from h3_kernels.providers import choose, proof

    try:
        return Bound(contract, choose(call, wanted, device).name, proof(call, wanted, device))
    except ProviderError as error:
        return Refused(str(error))


def differing_dtypes(
    held: Mapping[str, object], expected: Mapping[str, object]
) -> dict[tuple[object, object], list[str]]:
    """(dtype held, dtype expected) -> the tensors for which the two differ; tensors that are not held are left out."""
    found: dict[tuple[object, object], list[str]] = {}
    for name, dtype in expected.items():
        if held.get(name, dtype) != dtype:
            found.setdefault((held[name], dtype), []).append(name)
    return found


def dtype_reasons(found: Mapping[tuple[object, object], list[str]]) -> Iterator[str]:
    """What ``differing_dtypes`` found, one line a pair of dtypes."""
    for (now, wanted), names in found.items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        verb = "is" if len(names) == 1 else "are"
        yield f"{', '.join(names[:_SHOWN])}{more}: {verb} {now}, expected {wanted}"


@dataclass(slots=True)
class Report:
    """Bindings by node name, in the order they were added. ``str()`` is a table, ``to_json()`` a document."""

    title: str = ""
    nodes: dict[str, Binding] = field(default_factory=dict)

    def add(self, node: str, binding: Binding) -> None:
        """Record the binding of ``node``. Raises ValueError if the node already has one."""
        if node in self.nodes:
            raise ValueError(f"node {node!r} is already {self.nodes[node].state}; a node has one binding")
        self.nodes[node] = binding

    def __getitem__(self, node: str) -> Binding:
        return self.nodes[node]

    def __iter__(self) -> Iterator[str]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def bound(self) -> dict[str, Bound]:
        """Nodes that compute a contract."""
        return {name: state for name, state in self.nodes.items() if isinstance(state, Bound)}

    def external(self) -> dict[str, External]:
        """Nodes left to the engine."""
        return {name: state for name, state in self.nodes.items() if isinstance(state, External)}

    def refused(self) -> dict[str, Refused]:
        """Nodes that could not be bound, with the reason."""
        return {name: state for name, state in self.nodes.items() if isinstance(state, Refused)}

    def __str__(self) -> str:
        width = max((len(name) for name in self.nodes), default=0)
        rows = [f"{name:<{width}}  {state.state:<8}  {state.detail}" for name, state in self.nodes.items()]
        counts = f"{len(self.bound())} bound, {len(self.external())} external, {len(self.refused())} refused"
        return "\n".join([f"{self.title}: {counts}" if self.title else counts, *rows])

    def to_json(self) -> str:
        """The report as a JSON document: title, and one record per node with its state and fields."""
        nodes: list[dict[str, Any]] = [
            {"node": name, "state": state.state, **asdict(state)} for name, state in self.nodes.items()
        ]
        return json.dumps({"title": self.title, "nodes": nodes}, indent=2)
