"""The report of an installed model, read back from what ran."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from h3_kernels.binding import External, Report
from torch import nn

from h3_adapter_diffusers.bindings import (
    BLOCK_LISTS,
    EXTERNAL_AFTER,
    EXTERNAL_BEFORE,
    EXTERNAL_IN_BLOCK,
    EXTERNAL_IN_REFINER,
)
from h3_adapter_diffusers.linear_binding import LinearBinding
from h3_adapter_diffusers.settings import Settings


def linear_report(model: nn.Module, binding: LinearBinding, s: Settings) -> Report:
    """Every node of the forward, in order, with what serves it: the bound linears, and what stays Diffusers'.

    A linear is Bound only if it ran our callable in the model's last forward; otherwise the reason is given.
    """
    report = Report(s.title("training"))
    nodes = [*((name, External(operator)) for name, operator in _external(model)), *binding.nodes()]
    for name, state in sorted(nodes, key=lambda node: _place(node[0])):
        report.add(name, state)
    return report


def _external(model: Any) -> Iterator[tuple[str, str]]:
    yield from EXTERNAL_BEFORE.items()
    for blocks in BLOCK_LISTS:
        for index, block in enumerate(model.get_submodule(blocks)):
            backend = getattr(block.attn.processor, "_attention_backend", None)
            attention = f"{getattr(backend, 'value', backend) or 'native (torch SDPA)'} attention"
            nodes = EXTERNAL_IN_BLOCK if hasattr(block, "adaln_proj") else EXTERNAL_IN_REFINER
            for suffix, operator in nodes.items():
                yield f"{blocks}.{index}.{suffix}", operator.format(attention=attention)
    yield from EXTERNAL_AFTER.items()


_ORDER = (
    "adaln",
    "norm1",
    "to_qkv",
    "to_q",
    "to_k",
    "to_v",
    "qk_norm",
    "rope",
    "attention",
    "to_out",
    "norm2",
)


def _place(name: str) -> tuple[int, int, int]:
    """Sort key of a node: before the blocks, refiner blocks, blocks, after; then by its place in the
    block."""
    for group, blocks in enumerate(BLOCK_LISTS, start=1):
        if name.startswith(blocks + "."):
            index, _, suffix = name[len(blocks) + 1 :].partition(".")
            found = [i for i, part in enumerate(_ORDER) if part in suffix]
            tail = ("net.0", "act", "net.2", "residual")
            last = next((i for i, part in enumerate(tail) if part in suffix), len(tail))
            return group, int(index), found[0] if found else len(_ORDER) + last
    after = name.startswith(("norm_out", "proj_out", "audio_proj_out"))
    return (3 if after else 0), 0, 0
