"""Keep one architecture's code in a CUDA shared object: the others' is zeroed, so that the file compresses.

The file keeps its size and layout. A fat binary is a 16-byte header (magic 0xBA55ED50, u16 version, u16 header size,
u64 size of what follows) and a run of entries; an entry starts with u16 kind, u16 version, u32 header size, u64 payload
size, and has its architecture at byte 28 (read off files of CUDA 13; checked against `cuobjdump --list-elf`).
"""

from __future__ import annotations

import struct
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)
HEADER = struct.Struct("<HHQ")
ENTRY = struct.Struct("<HHIQ")
ARCHITECTURE_AT = 28
KINDS = (1, 2, 16)  # PTX, cubin, and the compressed or relocatable forms CUDA 13 adds


def keep_only(source: Path, target: Path, architecture: int) -> tuple[int, int]:
    """Write `source` to `target` with only `architecture`'s code (90 for sm_90 and sm_90a).

    Returns (payload bytes kept, payload bytes zeroed). Raises ValueError if the file holds no code for it.
    """
    data = bytearray(source.read_bytes())
    kept = zeroed = at = 0
    while (found := data.find(MAGIC, at)) >= 0:
        version, header, size = HEADER.unpack_from(data, found + len(MAGIC))
        start = found + len(MAGIC) + HEADER.size
        if version != 1 or header != len(MAGIC) + HEADER.size or start + size > len(data):
            at = found + len(MAGIC)
            continue
        entry, end = start, start + size
        while entry < end:
            kind, _, entry_header, payload = ENTRY.unpack_from(data, entry)
            if kind not in KINDS:
                break
            (arch,) = struct.unpack_from("<I", data, entry + ARCHITECTURE_AT)
            body = entry + entry_header
            if arch == architecture:
                kept += payload
            else:
                zeroed += payload
                data[body : body + payload] = bytes(payload)
            entry = body + payload
        at = end
    if not kept:
        raise ValueError(f"{source}: holds no code for sm_{architecture}")
    target.write_bytes(data)
    return kept, zeroed
