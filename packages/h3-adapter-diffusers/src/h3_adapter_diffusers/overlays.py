"""Replacements of graph nodes: which ones an overlay names, Diffusers' arithmetic, and the audit of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import torch
from h3_kernels.audit import Auditor
from h3_kernels.graph import Node
from torch import Tensor

from h3_adapter_diffusers import provider_ops

Outputs = tuple[Tensor, ...]
Replacement = Callable[..., Outputs]


def expand(
    overlay: Mapping[str, Replacement | None], nodes: tuple[Node, ...]
) -> tuple[dict[str, tuple[Node, Replacement | None]], list[str]]:
    """Patterns to nodes, and the patterns that name none. Nodes that only copy have nothing to keep."""
    found: dict[str, tuple[Node, Replacement | None]] = {}
    unmatched = []
    for pattern, given in overlay.items():
        matches = [n for n in nodes if fnmatchcase(n.name, pattern)]
        found |= {n.name: (n, given) for n in matches if given is not None or n.op in provider_ops.OPERATIONS}
        unmatched += [] if matches else [pattern]
    return found, unmatched


def diffusers_arithmetic(context: provider_ops.Context, node: Node) -> Replacement:
    """Runs Diffusers' operations in the place of `node`."""
    operation = provider_ops.OPERATIONS[node.op]

    def diffusers(strict: Replacement, *inputs: Tensor) -> Outputs:
        return operation(context, node, *inputs)

    return diffusers


def audited(provider: Replacement, auditor: Auditor, contract: Replacement | None) -> Replacement:
    """Returns what `provider` gives, and lets `auditor` compare it with the node's own result, row by row.

    `contract` computes the node with its LoRA terms; None if it has none.
    """

    def audit(strict: Replacement, *inputs: Tensor) -> Outputs:
        outputs = provider(strict, *inputs)
        with torch.no_grad():
            detached = [t.detach() for t in inputs]
            expected = strict(*detached) if contract is None else contract(strict, *detached)
            for ours, theirs in zip(expected, outputs, strict=True):
                rows = torch.arange(theirs.shape[0], device=theirs.device)
                auditor.compare(theirs.detach().flatten(1), ours.flatten(1), rows)
        return outputs

    return audit
