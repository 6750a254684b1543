"""Shared by the tests: hypothesis strategies and small configurations in which no two dimensions alias."""

import json
import random
import struct
from pathlib import Path

import pytest
from h3_mapper import H3Config, Layout, MapperError, convert, tensors
from hypothesis import strategies as st

TINY = H3Config(
    num_attention_heads=2,
    attention_head_dim=32,
    hidden_size=48,
    num_layers=2,
    num_refiner_layers=2,
    ffn_dim=80,
    in_channels=4,
    audio_in_channels=6,
    text_dim=40,
    freq_dim=16,
    time_embed_hidden_dim=56,
    time_embed_dim=24,
    rope_freq_dim=4,
)
"""hidden != heads * head_dim and 6 * rope_freq_dim < head_dim: a swapped dimension cannot pass."""


def configs() -> st.SearchStrategy[H3Config]:
    """Any small H3 dimensions, odd sizes, one head and one layer included."""
    small = st.integers(1, 5)
    return st.builds(
        H3Config,
        num_attention_heads=small,
        attention_head_dim=st.integers(1, 6),
        hidden_size=st.integers(1, 7),
        num_layers=st.integers(1, 3),
        num_refiner_layers=st.integers(1, 2),
        ffn_dim=small,
        in_channels=st.integers(1, 3),
        audio_in_channels=small,
        patch_size=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)),
        text_dim=small,
        freq_dim=small,
        time_embed_hidden_dim=small,
        time_embed_dim=small,
        rope_freq_dim=st.integers(1, 16),
        rope_theta=st.sampled_from([10000.0, 500.0]),
        vsa_gates=st.booleans(),
    )


# --- an independent writer and reference mapping: nothing below uses the package's table or file code ----

ITEMSIZE = {"F32": 4, "BF16": 2}


def write_file(
    path: Path, tensors: dict[str, tuple[str, list[int], bytes]], metadata: dict[str, str] | None = None
):
    """A safetensors file of name -> (dtype, shape, bytes), in the order given."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    write_raw(path, json.dumps(header).encode(), b"".join(data for _, _, data in tensors.values()))


def write_raw(path: Path, header: bytes, data: bytes):
    """Any header bytes before any data bytes."""
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def read_files(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Every tensor of every safetensors file in a folder."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + size])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            found[name] = (entry["dtype"], entry["shape"], raw[8 + size + begin : 8 + size + end])
    return found


def random_diffusers(config: H3Config, seed: int = 0) -> dict[str, tuple[str, list[int], bytes]]:
    """Random bytes under every Diffusers name of `config`."""
    source = random.Random(seed)
    return {
        spec.name: (spec.dtype, list(spec.shape), source.randbytes(spec.nbytes))
        for spec in tensors(config, Layout.DIFFUSERS)
    }


def write_diffusers(folder: Path, config: H3Config, seed: int = 0, shards: int = 1):
    """A Diffusers folder: random weights in `shards` files, index, config.json. Returns its tensors."""
    folder.mkdir(parents=True)
    held = random_diffusers(config, seed)
    (folder / "config.json").write_text(json.dumps(config.to_json(native=False)))
    names = list(held)
    if shards == 1:
        write_file(folder / "diffusion_pytorch_model.safetensors", held, {"format": "pt"})
        return held
    files = {n: f"diffusion_pytorch_model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)}
    for n, file in files.items():
        write_file(folder / file, {name: held[name] for name in names[n::shards]}, {"format": "pt"})
    weight_map = {name: files[i % shards] for i, name in enumerate(names)}
    index = {"metadata": {"total_size": sum(len(d) for _, _, d in held.values())}, "weight_map": weight_map}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    return held


RENAMED = [  # longest first where one contains another
    ("token_refiner.refiner_blocks.", "token_refiner.blocks."),
    ("transformer_blocks.", "blocks."),
    ("attn.to_out.0.", "attn.out_proj."),
    ("attn.norm_q.", "attn.q_norm."),
    ("attn.norm_k.", "attn.k_norm."),
    ("ff.net.0.proj.", "mlp.fc1."),
    ("ff.net.2.", "mlp.fc2."),
]
TOP = {
    "proj_in": "video_patch_proj",
    "audio_proj_in": "audio_patch_proj",
    "context_embedder": "condition_proj",
    "time_embedder.linear_1": "time_embedder.proj_in",
    "time_embedder.linear_2": "time_embedder.proj_out",
    "norm_out.norm": "final_layer.norm",
    "norm_out.linear": "final_layer.adaln_proj.linear",
    "proj_out": "final_layer.video_out",
    "audio_proj_out": "final_layer.audio_out",
}


def reference_native(held: dict[str, tuple[str, list[int], bytes]], config: H3Config, layout: Layout):
    """Diffusers tensors in a native layout, by string replacement and byte slicing (no plan, no table)."""
    result: dict[str, tuple[str, list[int], bytes]] = {}
    for name, (dtype, shape, data) in held.items():
        module, _, kind = name.rpartition(".")
        if module in TOP:
            result[f"{TOP[module]}.{kind}"] = (dtype, shape, data)
            continue
        new = name
        for old, native in RENAMED:
            new = new.replace(old, native, 1)
        if ".to_q." in name:
            parts = [held[name.replace(".to_q.", f".to_{c}.")][2] for c in "qkv"]
            rows, width = shape
            head = config.attention_head_dim * width * ITEMSIZE[dtype]
            step = head if layout is Layout.RELEASE else rows * width * ITEMSIZE[dtype]
            fused = b"".join(part[at : at + step] for at in range(0, len(data), step) for part in parts)
            result[new.replace("to_q", "qkv_proj")] = (dtype, [3 * rows, width], fused)
        elif ".to_k." in name or ".to_v." in name:
            continue
        elif ".mlp.fc1." in new:
            half = len(data) // 2
            result[new] = (dtype, shape, data[half:] + data[:half])
        else:
            result[new] = (dtype, shape, data)
    result["rope.inv_freq"] = ("F32", [config.rope_freq_dim], config.inv_freq())
    return result


def snapshot(root: Path) -> dict[str, bytes | str]:
    """Every path under `root` with its content: two equal snapshots mean nothing was written."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else "folder"
        for path in sorted(root.rglob("*"))
    }


def refused(
    error: type[MapperError], match: str, source: Path, to: Layout = Layout.RELEASE, **options: object
):
    """`convert` refuses `source` with exactly this class and message, and writes nothing beside it."""
    root = source.parent
    before = snapshot(root)
    destination = options.pop("destination", root / "never")
    with pytest.raises(MapperError, match=match) as caught:
        convert(source, destination, to, **options)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)
    assert snapshot(root) == before
