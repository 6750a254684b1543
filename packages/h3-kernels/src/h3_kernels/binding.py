"""What an installed adapter did with each node: bound, external or refused. Needs no torch."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any


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
