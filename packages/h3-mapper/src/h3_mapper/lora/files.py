"""Adapters on disk: one .safetensors file, or a PEFT folder with its adapter_config.json."""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h3_mapper.config import H3Config
from h3_mapper.errors import FileFormatError, OutputError, OutputExistsError, SourceError, listed, naming
from h3_mapper.lora.adapter import Adapter
from h3_mapper.lora.arrays import ITEMSIZE, Raw, raw
from h3_mapper.lora.errors import UnsupportedAdapterError
from h3_mapper.lora.read import Statement, read
from h3_mapper.lora.write import Written
from h3_mapper.output import check_destination, hidden, staging, write_text
from h3_mapper.readback import read_back
from h3_mapper.safetensors_io import read_header
from h3_mapper.shards import OutFile, out_files
from h3_mapper.source import instead, read_json

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """What lies at a path: tensors as views of the mapped file, metadata, adapter_config.json if there is one."""

    path: Path
    tensors: Mapping[str, Raw]
    metadata: Mapping[str, str]
    peft_config: Mapping[str, Any] | None

    def read(self, config: H3Config | None = None, statement: Statement | None = None) -> Adapter:
        """The adapter in canonical terms; see `h3_mapper.lora.read`. Errors name the file."""
        with naming(self.path):
            return read(
                self.tensors,
                config,
                metadata=self.metadata,
                peft_config=self.peft_config,
                statement=statement,
            )


def open_adapter(path: Path) -> AdapterFile:
    """Map an adapter file or folder. Raises SourceError, FileFormatError, UnsupportedAdapterError."""
    file = _weights(path)
    header = read_header(file)
    if not header.entries:
        raise SourceError(f"{file}: holds no tensor; expected an adapter's factors: export it again")
    peft_config = None
    if file.name == WEIGHTS and (file.parent / CONFIG).is_file():
        peft_config = read_json(file.parent / CONFIG)
        if not isinstance(peft_config, dict):
            raise FileFormatError(f"{file.parent / CONFIG}: not a JSON object")
    for entry in header.entries.values():
        if entry.dtype not in ITEMSIZE:
            raise UnsupportedAdapterError(
                f"{file}: {entry.name} is {entry.dtype}; factors must be {listed(ITEMSIZE)}"
            )
    with file.open("rb") as stream:
        data = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))[header.data_start :]
    tensors = {e.name: Raw(e.dtype, e.shape, data[e.begin : e.end]) for e in header.entries.values()}
    return AdapterFile(file, tensors, header.metadata, peft_config)


def _weights(path: Path) -> Path:
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if (path / WEIGHTS) in files:
            return path / WEIGHTS
        if len(files) != 1:
            found = listed(file.name for file in files) or "none"
            raise SourceError(
                f"{path}: expected {WEIGHTS} or exactly one .safetensors file, found {found}"
                f"{instead(path) or '; point at the adapter, not at a model'}"
            )
        return files[0]
    if not path.exists():
        raise SourceError(f"{path}: no such file or folder")
    if path.suffix == ".gguf":
        raise FileFormatError(f"{path}: this is a GGUF file; adapters are read from safetensors")
    if path.suffix != ".safetensors":
        raise SourceError(f"{path}: not a .safetensors file or a folder; pickles are not opened")
    return path


def save_adapter(written: Written, destination: Path, source: Path) -> tuple[Path, ...]:
    """Write an adapter as a new file, or as a new folder if its format has a configuration. Returns the files.

    source is only compared with the destination. Raises OutputError and its kinds; nothing is left on failure.
    """
    values = {name: raw(tensor) for name, tensor in written.tensors.items()}
    sized = [_Sized(name, value.shape, value.dtype, len(value.data)) for name, value in values.items()]
    (file,) = out_files(sized, "adapter_model", 2**62, written.metadata)
    check_destination(destination, source, file.size)
    if written.peft_config is None:
        _save_file(values, file, destination)
        return (destination,)
    with staging(destination) as folder:
        _fill(folder / WEIGHTS, file, values)
        write_text(folder / CONFIG, json.dumps(written.peft_config, indent=2, sort_keys=True) + "\n")
        read_back(folder / WEIGHTS, file)
    return destination / WEIGHTS, destination / CONFIG


@dataclass(frozen=True, slots=True)
class _Sized:
    """One tensor to write, as `out_files` sees it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


def _save_file(values: Mapping[str, Raw], file: OutFile, destination: Path) -> None:
    """Write beside the destination, then link it into place: a link never replaces what appeared meanwhile."""
    with tempfile.TemporaryDirectory(prefix=hidden(destination), dir=destination.parent) as folder:
        temporary = Path(folder) / "adapter.safetensors"
        _fill(temporary, file, values)
        read_back(temporary, file)
        try:
            os.link(temporary, destination)
        except FileExistsError:
            raise OutputExistsError(f"{destination}: was created by someone else during the run") from None
        except OSError as error:
            raise OutputError(f"{destination}: {error.strerror}; nothing was written") from error


def _fill(path: Path, file: OutFile, values: Mapping[str, Raw]) -> None:
    with path.open("xb") as out:
        out.write(file.header)
        for entry in file.entries:
            out.write(values[entry.name].data)
        out.flush()
        os.fsync(out.fileno())
