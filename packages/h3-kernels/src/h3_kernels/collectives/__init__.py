"""Deterministic collectives: fp32 subtree roots of all ranks, added in canonical tree order, same bytes
everywhere."""

from h3_kernels.collectives.distributed import Form, TorchDistributedCollective
from h3_kernels.collectives.protocol import Collective, LocalCollective

__all__ = ["Collective", "Form", "LocalCollective", "TorchDistributedCollective"]
