"""What computed each node of the last forward of scope `model`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from h3_kernels.binding import Ran
from h3_kernels.graph import Node, PackedInputs, Tracer
from torch import Tensor


class Record:
    """Tracer of a forward; passes everything on to a tracer of the caller's, the watcher."""

    def __init__(self, last: str) -> None:
        self.actual: dict[str, str] = {}
        self.ran: dict[str, Ran] = {}
        self.tuned: set[str] = set()
        """Nodes with LoRA terms."""
        self.watcher: Tracer | None = None
        self._last = last
        self._kind: Hashable = None

    def knows(self, *kind: Hashable) -> bool:
        """Whether a whole forward of this kind was recorded last, so that the next one need not be.

        Recording takes the host a tenth of what a forward of few rows takes it.
        """
        told = (*kind, frozenset(self.tuned))
        same, self._kind = told == self._kind, told
        return same and self._last in self.ran and self.watcher is None

    @property
    def reads_values(self) -> bool:
        """Whether nodes' outputs are read: by the watcher, unless it says that it does not."""
        return self.watcher is not None and getattr(self.watcher, "reads_values", True)

    def begin(self, inputs: PackedInputs) -> None:
        """A forward starts."""
        self.actual, self.ran = {}, {}
        if self.watcher is not None:
            self.watcher.begin(inputs)

    def record(self, node: Node, requested: str, actual: str, outputs: Mapping[str, Tensor]) -> None:
        """A node has run."""
        self.actual[node.name] = actual
        first = next(iter(outputs.values()))
        self.ran[node.name] = Ran(0, first.shape[0], first.device, k_contiguous=True)
        if self.watcher is not None:
            self.watcher.record(node, requested, actual, outputs)
