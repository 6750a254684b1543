"""Pruned and quantised files as they are published, what their layers multiply with, and their conversion."""

import json
from dataclasses import replace

import numpy as np
import pytest
from h3_mapper.classify import classify
from h3_mapper.errors import (
    QuantisedVariantError,
)
from h3_mapper.plan import spans, tensors
from h3_mapper.safetensors_io import DTYPE_BITS, Entry, encode_header, read_header
from h3_mapper.source import LAYOUT_KEY
from h3_mapper.spec import Layout
from h3_mapper.variant_files import convert_variant
from mapper_testkit import TINY

PRUNED = replace(TINY, time_embed_dim=8)
CONVROT = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16}
LINEARS = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")


class Value:
    """Bytes with a dtype and a shape: what a file holds."""

    def __init__(self, dtype, shape, data):
        self.dtype, self.shape, self.data = dtype, tuple(shape), bytes(data)
        assert len(self.data) * 8 == int(np.prod(self.shape)) * DTYPE_BITS[dtype]

    def __eq__(self, other):
        return (self.dtype, self.shape, self.data) == (other.dtype, other.shape, other.data)

    def __hash__(self):
        return hash(self.data)


def random(rng, dtype, shape):
    return Value(dtype, shape, rng.bytes(int(np.prod(shape)) * DTYPE_BITS[dtype] // 8))


def floats(values, shape):
    return Value("F32", shape, np.asarray(values, np.float32).tobytes())


def blob(content):
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return Value("U8", (len(data),), data)


def save(path, values, metadata=None):
    entries, offset = [], 0
    for name, value in values.items():
        entries.append(Entry(name, value.dtype, value.shape, offset, offset + len(value.data)))
        offset += len(value.data)
    path.write_bytes(encode_header(entries, metadata or {}) + b"".join(v.data for v in values.values()))
    return path


def load(path):
    header = read_header(path)
    data = path.read_bytes()[header.data_start :]
    return {e.name: Value(e.dtype, e.shape, data[e.begin : e.end]) for e in header.entries.values()}


def one_file(folder):
    (file,) = folder.glob("*.safetensors")
    return file


def full(layout=Layout.MODULE, config=TINY, seed=0):
    rng = np.random.default_rng(seed)
    values = {spec.name: random(rng, spec.dtype, spec.shape) for spec in tensors(config, layout)}
    if "rope.inv_freq" in values:
        values["rope.inv_freq"] = Value("F32", (config.rope_freq_dim,), config.inv_freq())
    return values


def pruned(seed=0):
    rng = np.random.default_rng(seed)
    values = {name: v for name, v in full(config=PRUNED).items() if not name.startswith("time_embedder.")}
    for name, value in values.items():
        if "adaln_proj" in name:
            values[name] = random(rng, "F32", value.shape)
    return values | {"adaln_t_table": random(rng, "F32", (1025, 8))}


def quantised(layout=Layout.MODULE, dtype="I8", scale="row", content=CONVROT, seed=0):
    """Block linears quantised as published: a scale for each row (or one, or one for each part), a blob each."""
    rng = np.random.default_rng(seed)
    values = full(layout, seed=seed)
    held = spans(TINY, layout)
    for name in list(values):
        module = name.removesuffix(".weight")
        native = held[name][0].atom if name in held else ""
        if not name.endswith(".weight") or not any(f"{leaf}.weight" in native for leaf in LINEARS):
            continue
        rows, columns = values[name].shape
        values[name] = random(rng, dtype, (rows, columns))
        parts = len({span.atom for span in held[name]})
        shape = {"row": (rows, 1), "tensor": (), "part": (1, parts), "block": (rows // 8, 1)}[scale]
        values[f"{module}.weight_scale"] = floats(rng.random(int(np.prod(shape))), shape)
        if content is not None:
            values[f"{module}.comfy_quant"] = blob(content)
    return values


def dequantised(values, layout):
    """q * scale by atom in fp64: what a layer multiplies with, wherever its rows lie."""
    made = {}
    for name, held in spans(TINY, layout).items():
        module = name.removesuffix(".weight")
        if f"{module}.weight_scale" not in values:
            continue
        q = np.frombuffer(values[name].data, np.int8).reshape(values[name].shape).astype("f8")
        scale = np.frombuffer(values[f"{module}.weight_scale"].data, np.float32).astype("f8").reshape(-1)
        parts = list(dict.fromkeys(span.atom for span in held))
        for span in held:
            rows = q[span.row : span.row + span.stop - span.start]
            if len(scale) == len(q):
                each = scale[span.row : span.row + span.stop - span.start, None]
            elif len(scale) == len(parts):
                each = scale[parts.index(span.atom)]
            elif len(scale) == 1:
                each = scale[0]
            else:
                block = len(q) // len(scale)
                each = np.repeat(scale, block)[span.row : span.row + span.stop - span.start, None]
            made.setdefault(span.atom, []).append(rows * each)
    return {atom: np.concatenate(rows) for atom, rows in made.items()}


def assert_same_layers(one, two):
    assert one.keys() == two.keys()
    for atom, rows in one.items():
        np.testing.assert_array_equal(rows, two[atom], err_msg=atom)


def through(tmp_path, values, source, target, name="x"):
    folder = tmp_path / f"{name}-source"
    folder.mkdir(exist_ok=True)
    save(folder / "model.safetensors", values, {LAYOUT_KEY: str(source)} if source.native else {})
    (folder / "config.json").write_text(json.dumps(TINY.to_json(native=source.native)))
    convert_variant(folder, tmp_path / name, target)
    return load(one_file(tmp_path / name))


def problems_of(values):
    seen = {name: (value.shape, value.dtype) for name, value in values.items()}
    found = classify(
        seen, {name: value.data for name, value in values.items() if name.endswith("comfy_quant")}
    )
    return found, " | ".join(found.problems)


def refused(tmp_path, values, match, target=Layout.RELEASE, source=Layout.MODULE):
    with pytest.raises(QuantisedVariantError, match=match):
        through(tmp_path, values, source, target)
    assert not (tmp_path / "x").exists()
