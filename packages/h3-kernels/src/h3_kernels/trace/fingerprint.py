"""What two runs must share before their bits may be compared: sizes, nodes, contracts, precision, weights,
scheduler.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from h3_kernels.attention_providers import requested
from h3_kernels.graph import PackedDiT, Settings
from h3_kernels.graph.settings import requested_operator
from h3_kernels.trace.digest import digest_of, row_digests


def fingerprint(
    graph: PackedDiT,
    settings: Settings | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
    **facts: str | int | float,
) -> dict[str, Any]:
    """Fingerprint of a model under a contract, JSON values only; ``id`` is a digest of the rest.

    ``weights``: whole tensors by ``module`` name (not a rank's shards); a digest of each block and of each other
    component enters the fingerprint.
    ``facts``: what else must agree, e.g. ``revision=...``, ``variant="FL2VA"``, ``video_shift=12.0``. The
    attention provider that ``settings`` or H3_ATTENTION names is part of it; degrees of parallelism, padding,
    providers of linears and checkpointing are not: they change no bit.
    """
    settings = settings or Settings()
    document: dict[str, Any] = {
        "architecture": graph.config.to_mapping(),
        "contract": settings.contract,
        "attention": requested(settings.attention),
        "nodes": _hash([[n.name, n.op, requested_operator(n, settings), n.eps] for n in graph.nodes]),
        "facts": dict(sorted(facts.items())),
    }
    if weights is not None:
        components: dict[str, dict[str, str]] = {}
        for name in sorted(weights):
            components.setdefault(_component(name), {})[name] = _tensor(weights[name])
        document["weights"] = {component: _hash(tensors) for component, tensors in components.items()}
        dtypes = {name: str(weights[name].dtype).removeprefix("torch.") for name in sorted(weights)}
        document["precision"] = _hash(dtypes)
    return {"id": _hash(document), **document}


def _component(name: str) -> str:
    """``blocks.3`` of ``blocks.3.norm1.weight``; outside the block stacks, the first part of the name."""
    parts = name.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[0] + 1]) if numbered else parts[0]


def _tensor(x: Tensor) -> str:
    rows = row_digests(x if x.dim() else x.reshape(1))
    return digest_of(rows, x.shape, str(x.dtype))


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
