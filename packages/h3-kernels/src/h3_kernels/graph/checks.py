"""What a forward's rows must satisfy before any node reads them.

The nodes index tables by tag and timestep and launch by the longest document, so a wrong value would read another row's
modulation, or leave rows unwritten, in silence. On the CPU a fault is an InputError. On a device nothing is read back:
the conditions are tensors, and one that does not hold stops the device (``torch._assert_async``). Not under graph
capture: the run before it has been checked.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from h3_kernels.errors import InputError
from h3_kernels.graph.inputs import PackedInputs
from h3_kernels.modes import capturing


def check_rows(inputs: PackedInputs) -> None:
    """Check tags, timestep indices and documents of ``inputs``, once a forward.

    Raises InputError on the CPU; on CUDA the error is asynchronous.
    """
    device = inputs.positions.device
    if capturing(device):
        return
    for condition, message in _conditions(inputs):
        if device.type == "cuda":
            torch._assert_async(condition, message)
        elif not bool(condition):
            raise InputError(message)


def _conditions(inputs: PackedInputs) -> Iterator[tuple[Tensor, str]]:
    levels = inputs.timesteps.shape[0]
    if inputs.rows:
        yield _within(inputs.tags, -1, 2), "tags: expected -1 (padding), 0 (video), 1 (text) or 2 (audio)"
        yield (
            _within(inputs.timestep_index, 0, levels - 1),
            f"timestep_index: expected 0..{levels - 1}, a row of the {levels} timesteps",
        )
    packed = (inputs.cu_seqlens, inputs.max_seqlen, inputs.rows)
    text = (inputs.text_cu_seqlens, inputs.text_max_seqlen, inputs.text.shape[0])
    for name, (bounds, longest, rows) in (("", packed), ("text_", text)):
        whole = (bounds[0] == 0) & (bounds[-1] == rows)
        message = f"{name}cu_seqlens: expected to rise from 0 to {rows} by at most {name}max_seqlen {longest}"
        yield whole & _within(bounds.diff(), 0, longest), message


def _within(values: Tensor, low: int, high: int) -> Tensor:
    least, most = torch.aminmax(values)
    return (least >= low) & (most <= high)
