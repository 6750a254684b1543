"""Adapters (LoRA, DoRA, FastH3 deltas) for MiniMax-H3: read, write, check, shard and merge.

`read` takes named tensors in any of the `FORMATS` to an `Adapter` in canonical terms, `write` takes it to any other.
"""

from h3_mapper.lora.adapter import Adapter, LowRank, shard
from h3_mapper.lora.arrays import Raw
from h3_mapper.lora.formats import FORMATS, Fc1Rows, Format, Naming, QkvRows
from h3_mapper.lora.read import Statement, read
from h3_mapper.lora.write import Written, write

__all__ = [
    "FORMATS", "Adapter", "Fc1Rows", "Format", "LowRank", "Naming", "QkvRows", "Raw", "Statement", "Written",
    "read", "shard", "write",
]  # fmt: skip
