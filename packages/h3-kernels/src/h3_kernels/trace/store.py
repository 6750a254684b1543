"""A trace on disk: ``PATH.json`` has names and operators, ``PATH.safetensors`` digests and the trajectory."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from h3_kernels.errors import InputError
from h3_kernels.trace.record import Output, Parallel, Step, Trace

_VERSION = 1
_FIELDS = ("node", "slot", "requested", "actual", "dtype", "shape", "held")
_SUFFIXES = (".json", ".safetensors")


def _files(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    text = os.fspath(path)
    for suffix in _SUFFIXES:
        text = text.removesuffix(suffix)
    return Path(text + _SUFFIXES[0]), Path(text + _SUFFIXES[1])


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write both files of ``trace``. ``path`` may carry either suffix or none.

    The JSON is written last, under a temporary name that is then renamed, so a trace that can be opened is
    complete.
    """
    table: dict[tuple[Any, ...], int] = {}
    tensors: dict[str, Tensor] = {f"noise.{k}": v for k, v in trace.noise.items()}
    tensors |= {f"sigmas.{k}": v for k, v in trace.sigmas.items()}
    steps = []
    for number, step in enumerate(trace.steps):
        entries = []
        for o in step.outputs.values():
            at = table.setdefault(tuple(getattr(o, name) for name in _FIELDS), len(table))
            entries.append([at, o.rows.shape[0]])
        steps.append(entries)
        if entries:
            tensors[f"rows.{number}"] = torch.cat([o.rows for o in step.outputs.values()])
        tensors |= {f"velocity.{number}.{k}": v for k, v in step.velocity.items()}
        tensors |= {f"latents.{number}.{k}": v for k, v in step.latents.items()}
    document = {
        "version": _VERSION,
        "label": trace.label,
        "fingerprint": trace.fingerprint,
        "rows_per_digest": trace.rows_per_digest,
        "parallel": None if trace.parallel is None else asdict(trace.parallel),
        "outputs": [dict(zip(_FIELDS, key, strict=True)) for key in table],
        "steps": steps,
    }
    names, data = _files(path)
    save_file(tensors or {"empty": torch.zeros(0)}, data)
    partial = names.with_suffix(".json.partial")
    partial.write_text(json.dumps(document, sort_keys=True) + "\n")
    partial.replace(names)


_MALFORMED = (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError, SafetensorError)
"""What reading a file of another form raises: JSON, missing or mistyped fields, rows that do not add up."""


def load(path: str | os.PathLike[str]) -> Trace:
    """Read a trace. Raises InputError if it is not one, is damaged, or is of another version."""
    names, data = _files(path)
    try:
        document = json.loads(names.read_text())
        if document.get("version") == _VERSION:
            return _trace(document, load_file(data))
    except _MALFORMED as error:
        raise InputError(f"{names}: not a trace, or damaged: {type(error).__name__}: {error}") from error
    raise InputError(f"{names} is not a trace of version {_VERSION}; it says {document.get('version')!r}")


def _trace(document: dict[str, Any], tensors: dict[str, Tensor]) -> Trace:
    trace = Trace(
        document["label"],
        document["fingerprint"],
        document["rows_per_digest"],
        document["parallel"] and Parallel(**document["parallel"]),
        _streams(tensors, "noise."),
        _streams(tensors, "sigmas."),
    )
    for number, entries in enumerate(document["steps"]):
        step = Step(
            velocity=_streams(tensors, f"velocity.{number}."), latents=_streams(tensors, f"latents.{number}.")
        )
        rows = torch.split(tensors[f"rows.{number}"], [count for _, count in entries]) if entries else ()
        for (at, _), part in zip(entries, rows, strict=True):
            fields = dict(document["outputs"][at])
            fields["shape"] = tuple(fields["shape"])
            step.outputs[(fields["node"], fields["slot"])] = Output(**fields, rows=part)
        trace.steps.append(step)
    return trace


def _streams(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
