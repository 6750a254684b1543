"""Fail closed: every wrong checkpoint has its own error, and nothing at all is written.

A docstring of the form owner/repository#number names a public report of the fault that the test plants.
"""

import json
import shutil
import struct
import sys

import pytest
from h3_mapper import Layout, convert
from h3_mapper.errors import (
    AlreadyConvertedError,
    AmbiguousLayoutError,
    ConfigError,
    DerivedTensorError,
    DtypeError,
    IncompleteGroupError,
    LayoutError,
    LayoutMismatchError,
    MapperError,
    MissingTensorError,
    MixedLayoutsError,
    NoSpaceError,
    OutputError,
    OutputExistsError,
    OutputInsideSourceError,
    OutputThroughLinkError,
    PrunedVariantError,
    QuantisedVariantError,
    ReadBackError,
    ShapeError,
    TruncatedFileError,
    UnknownNameError,
)
from h3_mapper.shards import out_files
from mapper_testkit import TINY, read_files, reference_native, refused, snapshot, write_diffusers, write_file

FILE = "diffusion_pytorch_model.safetensors"
FC1 = "transformer_blocks.1.ff.net.0.proj.weight"


@pytest.fixture
def src(tmp_path):
    write_diffusers(tmp_path / "src", TINY)
    return tmp_path / "src"


def edit(src, **changes):
    """Rewrite the checkpoint's one file with tensors replaced (None removes); `__` in a name stands for `.`."""
    held = read_files(src)
    for name, tensor in changes.items():
        held.pop(name.replace("__", "."), None)
        if tensor is not None:
            held[name.replace("__", ".")] = tensor
    write_file(src / FILE, held, {"format": "pt"})


def native(src, layout, metadata, **changes):
    """Replace the checkpoint by its native form, with this metadata."""
    held = reference_native(read_files(src), TINY, layout)
    held.update({name.replace("__", "."): tensor for name, tensor in changes.items()})
    (src / FILE).unlink()
    write_file(src / "model.safetensors", {n: t for n, t in held.items() if t is not None}, metadata)
    (src / "config.json").write_text(json.dumps(TINY.to_json(native=True)))


def bf16(*shape):
    size = 2
    for dim in shape:
        size *= dim
    return ("BF16", list(shape), bytes(size))


# --- names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("transformer_blocks.0.attn.to_qq.weight", r"nearest known name: .*to_q"),
        ("transformer_blocks.007.norm1.weight", "no H3 tensor"),
        ("transformer_blocks.٣.norm1.weight", "no H3 tensor"),
        ("transformer_blocks.0.attn.to_q.weight_extra", "no H3 tensor"),
        ("token_refiner.refiner_blocks.0.adaln_proj.linear.weight", "no H3 tensor"),
        ("model.norm.weight", "no H3 tensor"),
        ("transformer_blocks.2.norm1.weight", "config.json .2 blocks"),
        ("token_refiner.refiner_blocks.9.norm1.weight", "config.json"),
    ],
)
def test_an_unknown_name_is_refused(src, name, hint):
    edit(src, **{name: bf16(48)})
    refused(UnknownNameError, hint, src)


@pytest.mark.parametrize("prefix", ["_fsdp_wrapped_module.", "model.diffusion_model."])
def test_a_wrappers_prefix_is_named_as_what_it_is(src, prefix):
    state = read_files(src)
    write_file(src / FILE, {f"{prefix}{name}": tensor for name, tensor in state.items()})
    refused(UnknownNameError, "`convert --variant` takes it off", src)


def test_a_checkpoint_of_something_else_is_refused(src):
    write_file(src / FILE, {"token_refiner.final_norm.weight": bf16(48)})
    refused(MissingTensorError, "none of 1 tensors", src)


@pytest.mark.parametrize("name", ["proj_in.weight", FC1, "transformer_blocks.1.adaln_proj.linear.bias"])
def test_a_missing_tensor_is_named(src, name):
    edit(src, **{name: None})
    refused(MissingTensorError, name, src)


@pytest.mark.parametrize("part", "qkv")
def test_an_incomplete_qkv_names_the_module_and_the_member(src, part):
    """vllm-project/vllm-omni#5824: loading succeeded with one member of a fused pair absent."""
    name = f"transformer_blocks.1.attn.to_{part}.weight"
    edit(src, **{name: None})
    refused(IncompleteGroupError, f"blocks.1.attn.qkv_proj.weight.*absent: {name}", src)


def test_a_release_file_without_inv_freq_is_incomplete(src):
    """verl-project/verl-omni#383: engines leave the buffer uninitialised and say nothing."""
    native(src, Layout.RELEASE, {"h3.layout": "release"}, rope__inv_freq=None)
    refused(MissingTensorError, r"rope\.inv_freq", src, Layout.DIFFUSERS)


# --- shapes and dtypes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("transformer_blocks.0.adaln_proj.linear.weight", (900, 24)),
        ("transformer_blocks.0.attn.to_out.0.weight", (48, 80)),
        (FC1, (162, 48)),
        ("transformer_blocks.0.norm1.weight", (47,)),
        ("transformer_blocks.0.attn.to_q.weight", (64, 48, 1)),
        ("transformer_blocks.0.norm2.weight", (1, 48)),
        ("norm_out.linear.bias", ()),
    ],
)
def test_a_wrong_shape_is_refused_larger_ones_too(src, name, shape):
    """Engines narrow an oversized tensor without a word. sgl-project/sglang#38904: right count, wrong rank."""
    edit(src, **{name: bf16(*shape)})
    refused(ShapeError, name, src)


def test_no_dtype_is_ever_cast(src):
    """sgl-project/sglang#35370: precision is a property of the variant, not a preference."""
    data = dict(read_files(src))
    edit(src, proj_in__bias=("BF16", [48], bytes(96)))
    refused(DtypeError, "proj_in.bias is BF16; H3 keeps it in F32", src)
    edit(src, proj_in__bias=data["proj_in.bias"], norm_out__norm__weight=("F32", [48], bytes(192)))
    refused(DtypeError, r"norm_out\.norm\.weight is F32", src)
    edit(src, norm_out__norm__weight=("F16", [48], bytes(96)))
    refused(DtypeError, "is F16", src)


def test_inv_freq_with_other_bits_is_refused(src):
    """verl-project/verl-omni#383: theta**-x differs from 1/theta**x in the last bit."""
    good = struct.unpack("<4f", TINY.inv_freq())
    bits = [struct.unpack("<I", struct.pack("<f", value))[0] for value in good]
    bits[2] += 1
    native(
        src, Layout.RELEASE, {"h3.layout": "release"}, rope__inv_freq=("F32", [4], struct.pack("<4I", *bits))
    )
    refused(DerivedTensorError, r"rope\.inv_freq\[2\]", src, Layout.DIFFUSERS)
    refused(DerivedTensorError, r"rope\.inv_freq\[2\]", src, Layout.MODULE)


# --- layouts ---------------------------------------------------------------------------------------------


def test_native_files_that_state_no_row_order_are_refused_with_both_meanings(src):
    """Community merges stored [Q|K|V] under the release's names and shapes: every frame was the same noise."""
    native(src, Layout.RELEASE, None)
    refused(
        AmbiguousLayoutError,
        "per head.*all q, then all k.*--from release or --from module",
        src,
        Layout.DIFFUSERS,
    )


@pytest.mark.parametrize("to", [Layout.DIFFUSERS, Layout.MODULE])
def test_a_statement_settles_it(src, tmp_path, to):
    native(src, Layout.RELEASE, None)
    convert(src, tmp_path / "out", to, stated="release")


def test_mixed_layouts_are_refused(src):
    edit(src, blocks__0__norm1__weight=bf16(48))
    refused(MixedLayoutsError, "1 native names", src)


def test_shards_that_declare_different_layouts_are_refused(src):
    held = reference_native(read_files(src), TINY, Layout.RELEASE)
    (src / FILE).unlink()
    half = len(held) // 2
    for n, second in ((1, "module"), (2, None)):
        write_file(
            src / "m-00001-of-00002.safetensors", dict(list(held.items())[:half]), {"h3.layout": "release"}
        )
        metadata = {"h3.layout": second} if second else None
        write_file(src / "m-00002-of-00002.safetensors", dict(list(held.items())[half:]), metadata)
        refused(MixedLayoutsError, "different layouts" if n == 1 else "some do not", src, Layout.DIFFUSERS)


def test_an_unknown_declared_layout_is_refused(src):
    native(src, Layout.RELEASE, {"h3.layout": "grouped"})
    refused(LayoutError, "'grouped'", src, Layout.DIFFUSERS)


def test_a_statement_against_the_names_or_the_metadata_is_refused(src):
    refused(
        LayoutMismatchError,
        r"names are Diffusers but --from .* says module; expected diffusers: .* leave it out",
        src,
        stated="module",
    )
    native(src, Layout.MODULE, {"h3.layout": "module"})
    refused(LayoutMismatchError, "metadata says module", src, Layout.DIFFUSERS, stated="release")
    refused(LayoutMismatchError, "names are native", src, Layout.RELEASE, stated="diffusers")


@pytest.mark.parametrize("layout", Layout)
def test_what_is_in_the_layout_already_is_refused(src, layout):
    """radixark/miles_diffusion#226: two half swaps cancel, two qkv moves scramble."""
    if layout.native:
        native(src, layout, {"h3.layout": str(layout)})
    refused(AlreadyConvertedError, f"in layout {layout} already", src, layout)


# --- variants --------------------------------------------------------------------------------------------


def test_a_pruned_checkpoint_is_named_with_its_width(src):
    """Comfy-Org/ComfyUI#16279: a pruned AdaLN loaded into a full model."""
    changes = {name: None for name in read_files(src) if name.startswith("time_embedder.")}
    wide = {f"transformer_blocks.{n}.adaln_proj.linear.weight": bf16(864, 2) for n in range(2)}
    edit(src, **changes, **wide)
    refused(PrunedVariantError, "pruned.*width 2.*2688", src)
    edit(src, adaln_t_table=("F32", [5, 2], bytes(40)))
    refused(PrunedVariantError, "adaln_t_table", src)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("transformer_blocks.0.ff.net.0.proj.weight_scale", ("F32", [2], bytes(8))),
        ("transformer_blocks.0.ff.net.0.proj.comfy_quant", ("U8", [4], bytes(4))),
        (FC1, ("I8", [160, 48], bytes(160 * 48))),
        (FC1, ("F8_E4M3", [160, 48], bytes(160 * 48))),
        (FC1, ("F4", [160, 48], bytes(80 * 48))),
        ("transformer_blocks.0.attn.to_q.weight.absmax", ("F32", [3], bytes(12))),
    ],
)
def test_a_quantised_checkpoint_is_named(src, name, tensor):
    """safetensors/safetensors#839: dtypes a reader does not know. Ours reads all, then says what it refuses."""
    edit(src, **{name: tensor})
    refused(QuantisedVariantError, "quantised", src)


# --- config.json -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ('{"_class_name": "FluxTransformer2DModel", "num_layers": 2}', "Flux"),
        ("[]", "object"),
        ('{"a": 1}', "none of"),
    ],
)
def test_a_config_of_something_else_is_refused(src, content, match):
    """ddalcu/mlx-serve#130: the error must name the unsupported type, not some unrelated tensor."""
    (src / "config.json").write_text(content)
    refused(ConfigError, match, src)


def test_without_config_json_shapes_must_tell(src):
    (src / "config.json").unlink()
    edit(src, **{"transformer_blocks.0.attn.norm_q.weight": bf16(3)})
    refused(ConfigError, "whole heads", src)
    edit(src, **{"transformer_blocks.0.attn.norm_q.weight": None})
    refused(MissingTensorError, "norm_q", src)


# --- output ----------------------------------------------------------------------------------------------


def test_an_existing_output_is_refused(src, tmp_path):
    (tmp_path / "out").mkdir()
    refused(OutputExistsError, "exists", src, destination=tmp_path / "out")
    refused(OutputInsideSourceError, "source itself", src / FILE, destination=src / FILE)
    refused(OutputInsideSourceError, "source itself", src, destination=src)


def test_an_output_inside_the_source_is_refused(src):
    refused(OutputInsideSourceError, "inside", src, destination=src / "release")


def test_an_output_through_a_link_or_into_a_hub_cache_is_refused(src, tmp_path):
    """paiml/aprender#3971: a write through a snapshot's link changed the shared blob."""
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    refused(OutputThroughLinkError, "symbolic link", src, destination=tmp_path / "link")
    inside = tmp_path / "models--org--h3" / "snapshots" / "abc"
    inside.mkdir(parents=True)
    refused(OutputThroughLinkError, "hub cache", src, destination=inside / "out")
    (tmp_path / "alias").symlink_to(inside)
    refused(OutputThroughLinkError, "hub cache", src, destination=tmp_path / "alias" / "out")


def test_an_output_without_a_parent_is_refused(src, tmp_path):
    refused(OutputError, "no such folder", src, destination=tmp_path / "a" / "b")


def test_too_little_space_is_refused_before_the_first_byte(src, monkeypatch):
    usage = shutil.disk_usage(src)
    monkeypatch.setattr("h3_mapper.output.shutil.disk_usage", lambda _: usage._replace(free=1_000_000))
    refused(NoSpaceError, "needs .* free", src)


def test_a_disk_that_fills_up_during_the_run_leaves_nothing(src, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("h3_mapper.stream.os.pwrite", full)
    refused(NoSpaceError, "nothing was written", src)


def test_a_source_that_shrinks_during_the_run_leaves_nothing(src, monkeypatch):
    monkeypatch.setattr("h3_mapper.stream.os.preadv", lambda *_: 0)
    refused(TruncatedFileError, "ended at byte", src)


def test_an_interrupt_leaves_nothing(src, tmp_path):
    before = snapshot(tmp_path)

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(src, tmp_path / "out", "release", progress=interrupt)
    assert snapshot(tmp_path) == before


def test_output_that_appears_during_the_run_is_not_overwritten(src, tmp_path):
    def create(done, total):
        (tmp_path / "out").mkdir(exist_ok=True)

    with pytest.raises(OutputExistsError, match="by someone else"):
        convert(src, tmp_path / "out", "release", progress=create)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "src"]


def test_what_the_library_does_not_read_back_is_not_kept(src, monkeypatch):
    """The independent reader decides: a header written wrong (here: one dtype) must not survive."""
    monkeypatch.setattr(sys.modules["h3_mapper.convert"], "out_files", _one_wrong_dtype)
    refused(ReadBackError, r"rope\.inv_freq reads back as", src)


def _one_wrong_dtype(tensors, stem, limit, metadata):
    files = out_files(tensors, stem, limit, metadata)
    wrong = files[0].header.replace(b'"rope.inv_freq":{"dtype":"F32"', b'"rope.inv_freq":{"dtype":"I32"')
    assert wrong != files[0].header
    return (type(files[0])(files[0].name, wrong, files[0].entries), *files[1:])


@pytest.mark.parametrize("size", ["0", "-1", "5XB", "", "GB", "nan"])
def test_a_shard_size_that_is_none_is_refused(src, size):
    refused(MapperError, "max shard size", src, max_shard_size=size)
