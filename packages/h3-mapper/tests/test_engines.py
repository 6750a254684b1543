"""The mapping against the real engines: their names, their converter, their tables, their velocities.

Chain of argument: (1) our names, shapes and dtypes are the engines'; (2) a checkpoint Diffusers saved,
converted and loaded by vLLM-Omni, gives Diffusers' velocities bit for bit, and back; (3) the two engines'
own mapping code agrees with our plan on arbitrary dimensions.
"""

import json
import shutil
import warnings

import pytest
import torch
from h3_mapper import H3Config, Layout, convert, diffusers_to_native, native_to_diffusers, plan, tensors
from hypothesis import given, settings
from mapper_testkit import TINY, configs
from safetensors.torch import load_file, save_file

with warnings.catch_warnings():
    # Both engines, and what they import, use deprecated torch and Python functions while being imported.
    warnings.simplefilter("ignore")
    import diffusers  # noqa: F401
    import mapper_engines as engines
    import vllm_omni  # noqa: F401
    from diffusers import MiniMaxH3Transformer3DModel
    from diffusers.loaders.single_file_utils import convert_minimax_h3_transformer_checkpoint_to_diffusers
    from vllm_omni.diffusion.models.minimax_h3 import fasth3
    from vllm_omni.diffusion.models.minimax_h3 import minimax_h3_transformer as vllm_h3

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("h3-mapper-engines")]


@pytest.fixture(scope="module", autouse=True)
def engine():
    torch.set_num_threads(1)
    with engines.vllm_engine():
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint written by Diffusers' own save_pretrained, in several shards, and its velocities."""
    folder = tmp_path_factory.mktemp("saved") / "transformer"
    engines.diffusers_model().save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


def from_diffusers(folder):
    """Diffusers' own loading, in the precision its class keeps."""
    return MiniMaxH3Transformer3DModel.from_pretrained(folder, torch_dtype=torch.bfloat16).eval()


def stream(folder):
    for path in sorted(folder.glob("*.safetensors")):
        yield from load_file(path).items()


# --- 1. names, shapes, dtypes ----------------------------------------------------------------------------


def test_native_names_shapes_and_dtypes_are_vllm_omnis():
    """All 535, full size, in the module's own order, on the meta device."""
    state = engines.native_model(H3Config(), device="meta").state_dict()
    ours = [(s.name, s.shape, engines.TORCH[s.dtype]) for s in tensors(H3Config(), Layout.MODULE)]
    assert [(name, tuple(t.shape), t.dtype) for name, t in state.items()] == ours
    assert len(ours) == 535


def test_diffusers_names_shapes_and_dtypes_are_diffusers():
    """All 638, full size; fp32 is what the class keeps in fp32."""
    with torch.device("meta"):
        model = MiniMaxH3Transformer3DModel()
    kept = MiniMaxH3Transformer3DModel._keep_in_fp32_modules
    ours = tensors(H3Config(), Layout.DIFFUSERS)
    assert [(n, tuple(t.shape)) for n, t in model.state_dict().items()] == [(s.name, s.shape) for s in ours]
    assert {s.name for s in ours if s.dtype == "F32"} == {
        s.name for s in ours if any(module in s.name.split(".") for module in kept)
    }
    assert len(ours) == 638


def test_fp32_names_are_vllm_omnis():
    ours = {spec.name for spec in tensors(H3Config(), Layout.RELEASE) if spec.dtype == "F32"}
    assert ours == vllm_h3.MINIMAX_H3_FP32_PARAM_NAMES | vllm_h3.MINIMAX_H3_FP32_BUFFER_NAMES


def test_vsa_gates_are_vllm_omnis():
    model = engines.native_model()
    model.enable_vsa_gates()
    gated = TINY.with_gates(True)
    assert {n: tuple(t.shape) for n, t in model.state_dict().items()} == {
        spec.name: spec.shape for spec in tensors(gated, Layout.MODULE)
    }


# --- 2. velocities ---------------------------------------------------------------------------------------


def test_a_diffusers_checkpoint_converted_to_release_gives_the_same_velocities_in_vllm_omni(saved, tmp_path):
    convert(saved, tmp_path / "release", "release", max_shard_size="100KB")
    model = engines.native_model()
    loaded = model.load_weights(stream(tmp_path / "release"))
    assert loaded == set(model.state_dict())
    r = engines.request()
    assert engines.same_bits(
        engines.native_velocities(engines.ready(model), r),
        engines.diffusers_velocities(from_diffusers(saved), r),
    )


def test_a_module_checkpoint_loads_as_a_state_dict_with_the_same_velocities(saved, tmp_path):
    convert(saved, tmp_path / "module", "module")
    model = engines.native_model()
    model.load_state_dict(dict(stream(tmp_path / "module")), strict=True)
    r = engines.request()
    assert engines.same_bits(
        engines.native_velocities(engines.ready(model), r),
        engines.diffusers_velocities(from_diffusers(saved), r),
    )


def test_vllm_omnis_live_weights_saved_and_converted_back_are_diffusers(saved, tmp_path):
    """The way back starts from what the engine holds, not from our own file."""
    model = engines.native_model()
    convert(saved, tmp_path / "release", "release")
    model.load_weights(stream(tmp_path / "release"))
    (tmp_path / "live").mkdir()
    save_file(
        {n: t.contiguous() for n, t in model.state_dict().items()}, tmp_path / "live" / "model.safetensors"
    )
    shutil.copy(tmp_path / "release" / "config.json", tmp_path / "live")
    convert(tmp_path / "live", tmp_path / "back", "diffusers", stated="module")
    again, first = from_diffusers(tmp_path / "back"), from_diffusers(saved)
    assert again.state_dict().keys() == first.state_dict().keys()
    assert engines.same_bits(again.state_dict().values(), first.state_dict().values())
    assert dict(again.config) | {"_name_or_path": ""} == dict(first.config) | {"_name_or_path": ""}
    r = engines.request()
    assert engines.same_bits(engines.diffusers_velocities(again, r), engines.diffusers_velocities(first, r))


def test_the_wrong_native_layout_is_accepted_by_the_engine_and_gives_other_velocities(saved, tmp_path):
    """Negative twin, and the reason the layout is always stated: names, shapes and dtypes all pass."""
    convert(saved, tmp_path / "module", "module")
    model = engines.native_model()
    assert model.load_weights(stream(tmp_path / "module")) == set(model.state_dict())
    r = engines.request()
    video, _ = engines.native_velocities(engines.ready(model), r)
    right, _ = engines.diffusers_velocities(from_diffusers(saved), r)
    assert (video.float() - right.float()).abs().max() > 0.1


def test_inv_freq_is_diffusers_own_buffer(saved, tmp_path):
    convert(saved, tmp_path / "release", "release")
    ours = dict(stream(tmp_path / "release"))["rope.inv_freq"]
    assert engines.same_bits([ours], [from_diffusers(saved).rope.inv_freq])
    full = torch.frombuffer(bytearray(H3Config().inv_freq()), dtype=torch.float32)
    with torch.device("cpu"):
        assert torch.equal(full, MiniMaxH3Transformer3DModel(**_one_block(), rope_freq_dim=16).rope.inv_freq)


def _one_block():
    sizes = TINY.to_json(native=False) | {
        "num_layers": 1,
        "attention_head_dim": 128,
        "num_attention_heads": 1,
    }
    return {key: value for key, value in sizes.items() if key not in ("_class_name", "rope_freq_dim")}


def test_the_converted_config_json_is_the_engines_own(saved, tmp_path):
    """Written for vLLM-Omni it builds the same architecture as the Diffusers keys do."""
    convert(saved, tmp_path / "release", "release")
    read = vllm_h3.MiniMaxH3DiTArchConfig.from_mapping
    native = read(json.loads((tmp_path / "release" / "config.json").read_text()))
    derived = {"adaln_out_features": 18 * TINY.hidden_size, "final_adaln_out_features": 2 * TINY.hidden_size}
    assert native == read(json.loads((saved / "config.json").read_text()) | derived)


# --- 3. the engines' own mapping code --------------------------------------------------------------------


def random_state(config):
    generator = torch.Generator().manual_seed(0)
    return {
        s.name: torch.randn(s.shape, generator=generator).to(engines.TORCH[s.dtype])
        for s in tensors(config, Layout.DIFFUSERS)
    }


@pytest.mark.parametrize(("layout", "theirs"), [("release", "interleaved"), ("module", "stacked")])
@settings(max_examples=25)
@given(config=configs())
def test_diffusers_own_converter_agrees(layout, theirs, config):
    state = random_state(config)
    native = diffusers_to_native(state, layout=layout, config=config)
    back = convert_minimax_h3_transformer_checkpoint_to_diffusers(
        dict(native), config.to_json(native=False), qkv_layout=theirs
    )
    ours = native_to_diffusers(native, layout=layout, config=config)
    assert back.keys() == ours.keys() == state.keys()
    assert engines.same_bits([back[n] for n in state], [ours[n] for n in state])
    other = {"interleaved": "stacked", "stacked": "interleaved"}[theirs]
    wrong = convert_minimax_h3_transformer_checkpoint_to_diffusers(
        dict(native), config.to_json(native=False), qkv_layout=other
    )
    if config.num_attention_heads > 1:
        name = "transformer_blocks.0.attn.to_q.weight"
        assert not torch.equal(wrong[name], state[name])


@pytest.mark.parametrize("gates", [False, True])
def test_vllm_omnis_name_tables_agree_on_every_tensor(gates):
    """`_resolve_native_target` of all 638 (688 with gates) names, and what it says of rows."""
    config = H3Config().with_gates(gates)
    targets = {rows.name: t for t in plan(config, Layout.DIFFUSERS, Layout.MODULE).targets for rows in t.rows}
    assert len(targets) == 638 + 50 * gates
    for name, target in targets.items():
        module, _, kind = name.rpartition(".")
        native, rows, _ = fasth3._resolve_native_target(module)
        assert f"{native}.{kind}" == target.name
        place = [block.name for block in target.rows]
        if rows in "qkv":
            assert place.index(name) == "qkv".index(rows)
        elif rows == "swap_halves":
            assert target.rows[0].start == target.shape[0] // 2
        else:
            assert (rows, place) == ("plain", [name])


@settings(max_examples=25)
@given(config=configs())
def test_vllm_omnis_row_reordering_is_release_to_module(config):
    state = random_state(config)
    release = diffusers_to_native(state, layout="release", config=config)
    module = diffusers_to_native(state, layout="module", config=config)
    name = "blocks.0.attn.qkv_proj.weight"
    theirs = vllm_h3._reorder_grouped_qkv_to_qkv(
        release[name],
        num_query_groups=config.num_attention_heads,
        heads_per_group=1,
        head_dim=config.attention_head_dim,
    )
    assert torch.equal(theirs, module[name])
