"""The main job on a small checkpoint: every layout, the proof, and faults that must be caught.

Real names, dtypes and ratios (head_dim 128, 16 frequencies, 3 modalities), fewer and narrower blocks, random
bytes. Needs no torch, no numpy, no network; about 430 MB of temporary disk.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from h3_mapper.config import H3Config
from h3_mapper.convert import convert
from h3_mapper.errors import AmbiguousLayoutError, OutputExistsError
from h3_mapper.outcome import BAD_INPUT, DIFFERENT, OK, Outcome
from h3_mapper.plan import tensors
from h3_mapper.safetensors_io import read_header
from h3_mapper.shards import DIFFUSERS_STEM, index_json, out_files
from h3_mapper.source import open_source
from h3_mapper.spec import ITEMSIZE, Layout
from h3_mapper.verify import Verified, verify

DEMO = H3Config(
    num_attention_heads=8,
    hidden_size=768,
    num_layers=2,
    num_refiner_layers=1,
    ffn_dim=2048,
    text_dim=640,
    time_embed_hidden_dim=768,
    time_embed_dim=384,
)
"""The released model with 8 heads instead of 56, a seventh of its widths (an eighth of the text's, which 7 does not
divide), 2 + 1 blocks; tensor parallelism of 2, 4 and 8 fits, as with the release."""

SHARD_BYTES = 24_000_000


def demo(keep: Path | None = None) -> Outcome:
    """Run the demonstration. The exit code is 0 only if every step came out as promised."""
    with _folder(keep) as root:
        steps = _Steps()
        _layouts(root, steps)
        _faults(root, steps)
        kept = f"\nThe checkpoints are in {root}." if keep else ""
    code = OK if all(step["as_promised"] for step in steps.data) else DIFFERENT
    end = "All as promised." if code == OK else "NOT as promised: see the lines marked FAILED."
    return Outcome("\n".join([*steps.lines, end]) + kept, {"steps": steps.data}, code)


class _Steps:
    """Lines for people and objects for --json, together."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.data: list[dict[str, object]] = []

    def add(self, text: str, as_promised: bool) -> None:
        self.lines.append(f"{'' if as_promised else 'FAILED: '}{text}")
        self.data.append({"step": text, "as_promised": as_promised})


def _layouts(root: Path, steps: _Steps) -> None:
    start = root / "diffusers"
    count, size = write_random(start, DEMO)
    steps.add(
        f"made    a Diffusers H3: {count} tensors, {size / 1e6:.0f} MB in {_shards(start)} shards", True
    )
    before = start
    for layout in (Layout.RELEASE, Layout.MODULE, Layout.DIFFUSERS):
        after = root / (layout if layout.native else "diffusers-again")
        began = time.perf_counter()
        done = convert(before, after, layout, max_shard_size=SHARD_BYTES)
        took = time.perf_counter() - began
        steps.add(
            f"convert {before.name} -> {layout}: {done.components[0].tensors} tensors in {took:.2f} s, "
            f"{done.nbytes / took / 1e9:.2f} GB/s with fsync and digests",
            True,
        )
        result = verify(start, after)
        steps.add(f"verify  {start.name} = {after.name}: {result.atoms} atoms, every bit", result.equal)
        before = after
    same = all(_same_tensor(start, before, spec.name) for spec in tensors(DEMO, Layout.DIFFUSERS))
    steps.add("compare the first and the last folder, byte for byte: equal", same)


def _faults(root: Path, steps: _Steps) -> None:
    """Faults with right names, shapes and dtypes: nothing but the bits can tell."""
    start, release = root / "diffusers", root / "release"
    swapped = root / "swapped"
    shutil.copytree(release, swapped)
    swap_halves(swapped, "blocks.1.mlp.fc1.weight")
    steps.add(
        _caught("fc1 halves swapped in blocks.1", verify(start, swapped)), not verify(start, swapped).equal
    )

    bare = root / "undeclared"
    shutil.copytree(root / "module", bare)
    for shard in bare.glob("*.safetensors"):
        _forget_layout(shard)
    wrong = verify(start, bare, stated=(None, Layout.RELEASE))
    steps.add(_caught("module rows stated as release", wrong), not wrong.equal and bool(wrong.hint))
    try:
        convert(bare, root / "never", Layout.DIFFUSERS)
        refusal = ""
    except AmbiguousLayoutError as error:
        refusal = str(error).replace(f"{root}/", "")
    refused = bool(refusal) and not (root / "never").exists()
    steps.add(
        f"refused native files that state no row order, nothing written (exit code {BAD_INPUT}):\n    {refusal}",
        refused,
    )


def _caught(fault: str, result: Verified) -> str:
    first = result.differences[0] if result.differences else None
    named = (
        f"{len(result.differences)} of {result.atoms} atoms differ, first {first.atom}: {first.reason}"
        if first
        else ""
    )
    hint = "\n    " + result.hint.rpartition("/")[2] if result.hint else ""
    return f"caught  {fault}: {named} (exit code {DIFFERENT}){hint}"


def write_random(folder: Path, config: H3Config, seed: int = 0) -> tuple[int, int]:
    """A sharded Diffusers checkpoint of random finite values; returns (tensors, bytes of tensor data)."""
    folder.mkdir()
    source = random.Random(seed)
    specs = tensors(config, Layout.DIFFUSERS)
    files = out_files(specs, DIFFUSERS_STEM, SHARD_BYTES, {})
    for file in files:
        with (folder / file.name).open("xb") as out:
            out.write(file.header)
            for entry in file.entries:
                out.write(_finite(source.randbytes(entry.end - entry.begin), ITEMSIZE[entry.dtype]))
    if len(files) > 1:
        (folder / f"{DIFFUSERS_STEM}.safetensors.index.json").write_text(index_json(files))
    (folder / "config.json").write_text(json.dumps(config.to_json(native=False), indent=2))
    return len(specs), sum(spec.nbytes for spec in specs)


_SMALL_EXPONENTS = bytes((high & 0x83) | 0x3C for high in range(256))


def _finite(data: bytes, itemsize: int) -> bytes:
    """The same bits with sizes between 2^-7 and 2, so that the checkpoint holds no NaN and no infinity."""
    values = bytearray(data)
    values[itemsize - 1 :: itemsize] = values[itemsize - 1 :: itemsize].translate(_SMALL_EXPONENTS)
    return bytes(values)


def swap_halves(folder: Path, name: str) -> None:
    """Plant a fault: exchange the two halves of a tensor's rows in its file."""
    header, entry = open_source(folder)[""].tensors[name]
    with header.path.open("r+b") as file:
        file.seek(header.data_start + entry.begin)
        data = file.read(entry.end - entry.begin)
        half = len(data) // 2
        file.seek(header.data_start + entry.begin)
        file.write(data[half:] + data[:half])


def _forget_layout(path: Path) -> None:
    """Blank the declared layout's key, as a tool that drops metadata would; the length stays."""
    header = read_header(path)
    with path.open("r+b") as file:
        text = file.read(header.data_start).replace(b"h3.layout", b"h3.erased")
        file.seek(0)
        file.write(text)


def _same_tensor(a: Path, b: Path, name: str) -> bool:
    sides = []
    for folder in (a, b):
        header, entry = open_source(folder)[""].tensors[name]
        with header.path.open("rb") as file:
            file.seek(header.data_start + entry.begin)
            sides.append(file.read(entry.end - entry.begin))
    return sides[0] == sides[1]


def _shards(folder: Path) -> int:
    return len(list(folder.glob("*.safetensors")))


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="h3-mapper-demo-") as name:
            yield Path(name)
        return
    if keep.exists():
        raise OutputExistsError(f"{keep}: exists already; name a new folder")
    keep.mkdir(parents=True)
    yield keep
