"""Load weights of any layout into a live engine, each rank reading its own share, with the checks the engine lacks.

vLLM-Omni 0.30's own ``load_weights`` takes native names in the release's row order without asking (module rows are
scrambled in silence), casts dtypes in silence, truncates oversize tensors, skips unknown names with a warning, and
leaves ``rope.inv_freq`` uninitialised if the source lacks it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from h3_kernels.binding import differing_dtypes, dtype_reasons
from h3_mapper.config import H3Config
from h3_mapper.errors import listed
from h3_mapper.identify import identified
from h3_mapper.source import Component, open_source
from h3_mapper.spec import Layout
from h3_mapper.sync import WeightSync
from h3_mapper.tp import shard_specs
from torch import Tensor

from h3_adapter_vllm.errors import WeightsError
from h3_adapter_vllm.survey import module_at

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def load_h3_weights(
    model: Any, source: str | os.PathLike[str] | Iterable[tuple[str, Tensor]], layout: Layout | str
) -> frozenset[str]:
    """Fill a ``MiniMaxH3DiTModel``, bound or not, with the rank's share of ``source``; returns the names loaded.

    Args:
        model: The engine, before ``process_weights_after_loading`` on a CPU, LoRA-wrapped or not, at any tp.
        source: A folder, an index or a safetensors file of one transformer, of which only this rank's rows and columns
            are read; or whole (name, tensor) pairs in any order, as a trainer sends them.
        layout: What the source's rows are: ``diffusers``, ``release`` or ``module``. A native source cannot tell.

    Raises:
        WeightsError: The model and the source are not of the same architecture, or the model's own tensors are not what
            the architecture says. Nothing was changed.
        MapperError: A file is malformed or says another layout (nothing was changed); or a pair has a wrong name, shape
            or dtype, or is missing (pairs before it were loaded: load again).
    """
    layout = Layout(layout)
    layer = module_at(model, "blocks.0.attn.qkv_proj")
    config = model_config(model)
    live = live_tensors(model)
    _check_live(live, config, layer.tp_size)
    pairs = _file_pairs(Path(source), layout, config) if isinstance(source, str | os.PathLike) else source
    sync = WeightSync(
        config,
        Layout.MODULE,
        source=layout,
        components={"transformer": ""},
        tp=layer.tp_size,
        rank=layer.tp_rank,
    )
    with torch.no_grad():
        sync.load_into(pairs, live)
    names = sync.finish()
    model.adaln_cache.clear()
    model.post_load_weights()
    return names


def model_config(model: Any) -> H3Config:
    """The sizes of a live engine."""
    sizes = {**asdict(model.arch), "rope_theta": model._rope_theta}
    return H3Config.from_mapping(sizes).with_gates(model.vsa_gates_enabled)


def live_tensors(model: Any) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their names in the bare model, without LoRA wrappers."""
    return {name.replace(".base_layer.", "."): t for name, t in model.state_dict(keep_vars=True).items()}


def tensor_obstacles(model: Any) -> Iterator[str]:
    """Tensors of the engine, norms and biases included, in another dtype than the checkpoint's, one line a dtype."""
    specs = shard_specs(
        model_config(model), Layout.MODULE, module_at(model, "blocks.0.attn.qkv_proj").tp_size
    )
    held = {name: tensor.dtype for name, tensor in live_tensors(model).items()}
    expected = {spec.name: DTYPES[spec.dtype] for spec in specs}
    yield from dtype_reasons(differing_dtypes(held, expected))


def _check_live(live: Mapping[str, Tensor], config: H3Config, tp: int) -> None:
    specs = {spec.name: spec for spec in shard_specs(config, Layout.MODULE, tp)}
    if live.keys() != specs.keys():
        differing = listed(live.keys() ^ specs.keys())
        raise WeightsError(f"the engine's tensors are not those of its configuration: {differing}")
    for name, spec in specs.items():
        found, shape = live[name], tuple(live[name].shape)
        if shape != spec.shape or found.dtype != DTYPES[spec.dtype]:
            hint = (
                "; vLLM packed it for the CPU, load before process_weights_after_loading"
                if shape == (0,)
                else ""
            )
            raise WeightsError(
                f"{name}: the engine holds {found.dtype} {list(shape)}, expected {DTYPES[spec.dtype]} "
                f"{list(spec.shape)} at tp={tp}{hint}"
            )


def _file_pairs(path: Path, layout: Layout, config: H3Config) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors as windows of mapped files: only the pages that are copied from are read."""
    components = open_source(path)
    if len(components) > 1:
        raise WeightsError(f"{path}: holds several transformers ({listed(components)}); point at one of them")
    found = identified(next(iter(components.values())), layout)
    if found.config != config:
        differing = {
            key: (value, asdict(config)[key])
            for key, value in asdict(found.config).items()
            if value != asdict(config)[key]
        }
        what = ", ".join(f"{key} {theirs} against {ours}" for key, (theirs, ours) in differing.items())
        raise WeightsError(f"{path}: not the engine's architecture: {what}")
    return _windows(found.component)


def _windows(component: Component) -> Iterator[tuple[str, Tensor]]:
    maps: dict[Path, mmap.mmap] = {}
    for name, (header, entry) in component.tensors.items():
        if header.path not in maps:
            with header.path.open("rb") as file:
                # Copy-on-write, because torch refuses a read-only buffer; nothing writes to it.
                maps[header.path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        dtype = DTYPES[entry.dtype]
        count = (entry.end - entry.begin) // dtype.itemsize
        window = torch.frombuffer(
            maps[header.path], dtype=dtype, count=count, offset=header.data_start + entry.begin
        )
        yield name, window.view(entry.shape)
