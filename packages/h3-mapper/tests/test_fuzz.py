"""Whole checkpoints, damaged at random: every command either does its job or refuses with a MapperError,
on one line, and a refused conversion leaves nothing."""

import json
import struct

import pytest
from h3_mapper import Layout, MapperError, convert, verify
from h3_mapper.identify import identified_all
from h3_mapper.inspect import inspect
from hypothesis import given, settings
from hypothesis import strategies as st
from mapper_testkit import TINY, refused, snapshot, write_diffusers

FILE = "diffusion_pytorch_model.safetensors"
DTYPES = st.sampled_from(["F32", "BF16", "F16", "I8", "F8_E4M3", "F4", "XX", 3, None])
SIZES = st.integers(-1, 200) | st.sampled_from([2**31, 2**63, 1.0, True, "48", None])
NAMES = st.sampled_from(
    [
        "blocks.0.norm1.weight",
        "transformer_blocks.00.norm1.weight",
        "transformer_blocks.999999.norm1.weight",
        "transformer_blocks.0.attn.to_q.weight_scale",
        "adaln_t_table",
        "__metadata__",
        "",
        "\u0000\x1b[31m\n",
        "x" * 300,
    ]
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A checkpoint's header as an object, its data, and its config.json."""
    folder = tmp_path_factory.mktemp("sound") / "src"
    write_diffusers(folder, TINY)
    raw = (folder / FILE).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return (
        json.loads(raw[8 : 8 + length]),
        raw[8 + length :],
        json.loads((folder / "config.json").read_text()),
    )


def damage(data, header, config):
    name = data.draw(st.sampled_from(sorted(header)))
    match data.draw(st.sampled_from(["rename", "dtype", "shape", "offset", "drop", "config", "layout"])):
        case "rename":
            header[data.draw(NAMES)] = header.pop(name)
        case "dtype" if "dtype" in header[name]:
            header[name]["dtype"] = data.draw(DTYPES)
        case "shape" if "shape" in header[name]:
            header[name]["shape"] = data.draw(st.lists(SIZES, max_size=3))
        case "offset" if "data_offsets" in header[name]:
            header[name]["data_offsets"] = data.draw(st.lists(SIZES, max_size=3))
        case "drop":
            del header[name]
        case "config":
            config[data.draw(st.sampled_from(sorted(config)))] = data.draw(SIZES)
        case "layout":
            header["__metadata__"] = {"h3.layout": data.draw(st.sampled_from([*Layout, "grouped", ""]))}
        case _:
            pass


@settings(max_examples=8 * settings().max_examples)
@given(data=st.data())
def test_a_damaged_checkpoint_is_converted_or_refused(sound, tmp_path_factory, data):
    header, payload, config = json.loads(json.dumps(sound[0])), sound[1], dict(sound[2])
    for _ in range(data.draw(st.integers(1, 2))):
        if header:
            damage(data, header, config)
    root = tmp_path_factory.mktemp("fuzz")
    source = root / "src"
    source.mkdir()
    text = json.dumps(header).encode()
    (source / FILE).write_bytes(struct.pack("<Q", len(text)) + text + payload)
    (source / "config.json").write_text(json.dumps(config))
    before = snapshot(root)
    refusal = None
    try:
        convert(source, root / "out", "release")
    except MapperError as error:
        refusal = str(error)
    if refusal is None:
        assert verify(source, root / "out").equal
    else:
        assert refusal.isprintable()
        assert snapshot(root) == before


def test_every_entry_point_gives_one_answer_on_trailing_bytes(tmp_path):
    """Comfy-Org/ComfyUI#15602: one path loaded the file, another refused it."""
    write_diffusers(tmp_path / "src", TINY)
    write_diffusers(tmp_path / "good", TINY)
    with (tmp_path / "src" / FILE).open("ab") as file:
        file.write(bytes(16))
    calls = (
        lambda: convert(tmp_path / "src", tmp_path / "out", "release"),
        lambda: verify(tmp_path / "src", tmp_path / "good"),
        lambda: verify(tmp_path / "good", tmp_path / "src"),
        lambda: inspect(tmp_path / "src"),
        lambda: identified_all(tmp_path / "src"),
    )
    messages = set()
    for call in calls:
        with pytest.raises(MapperError, match="16 bytes follow") as caught:
            call()
        messages.add((type(caught.value), str(caught.value)))
    assert len(messages) == 1
    refused(type(caught.value), "16 bytes follow", tmp_path / "src")
