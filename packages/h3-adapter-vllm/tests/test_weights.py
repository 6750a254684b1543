"""load_h3_weights: any layout, from files or pairs, at any tp, into bound or wrapped engines, or a refusal."""

import json

import pytest
import torch
from h3_adapter_vllm import WeightsError, install_h3_rollout, load_h3_weights
from h3_adapter_vllm.testing import engine as tiny
from h3_mapper.apply import convert_state_dict, native_to_diffusers
from h3_mapper.errors import AlreadyConvertedError, DtypeError, MapperError, MissingTensorError
from h3_mapper.plan import plan
from h3_mapper.spec import Layout
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

pytestmark = pytest.mark.engine

LAYOUTS = ("diffusers", "release", "module")


@pytest.fixture(scope="module")
def states(engine, release):
    """The same weights in every layout."""
    from h3_adapter_vllm.weights import model_config

    config = model_config(engine.build(device="meta"))
    return {
        "release": release,
        "module": convert_state_dict(release, plan(config, Layout.RELEASE, Layout.MODULE)),
        "diffusers": native_to_diffusers(release, layout="release", config=config),
    }


@pytest.fixture(scope="module")
def folders(states, tmp_path_factory):
    """A folder of two shards and an index per layout."""
    found = {}
    for layout, state in states.items():
        folder = found[layout] = tmp_path_factory.mktemp(layout)
        names = sorted(state)
        weight_map = {}
        for number, part in enumerate((names[::2], names[1::2]), start=1):
            shard = f"model-{number:05d}-of-00002.safetensors"
            save_file({name: state[name].contiguous() for name in part}, folder / shard)
            weight_map |= dict.fromkeys(part, shard)
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps({**tiny.TINY, "patch_size": [1, 2, 2]}))
    return found


def same_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["folder", "pairs"])
def test_every_layout_gives_the_engines_own_loaders_state(engine, model, states, folders, layout, kind):
    fresh = engine.build()
    source = folders[layout] if kind == "folder" else reversed(states[layout].items())
    names = load_h3_weights(fresh, source, layout)
    assert names == set(model.state_dict())
    assert same_state(fresh, model)


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(LAYOUTS), st.randoms(use_true_random=False))
def test_pairs_may_come_in_any_order(engine, expected, states, layout, random):
    pairs = list(states[layout].items())
    random.shuffle(pairs)
    fresh = engine.build()
    load_h3_weights(fresh, pairs, layout)
    assert same_state(fresh, expected)


@pytest.fixture(scope="module")
def expected(engine, release):
    """What the engine's own loader makes of the release layout."""
    model = engine.build()
    model.load_weights(release.items())
    return model


def test_wrong_layout_scrambles_rows(engine, model, folders):
    """Negative twin: release rows taken for module rows have the right shapes and another state."""
    fresh = engine.build()
    load_h3_weights(fresh, folders["release"], "module")
    assert not same_state(fresh, model)
    assert torch.equal(fresh.blocks[0].mlp.fc1.weight, model.blocks[0].mlp.fc1.weight)


def sharded_states(folders):
    """Worker: this rank's state from the engine's loader and from each folder, equal or not."""
    release = torch.load(folders["weights"])
    model = tiny.build()
    model.load_weights(release.items())
    equal = {}
    for layout in LAYOUTS:
        fresh = tiny.build()
        load_h3_weights(fresh, folders[layout], layout)
        equal[layout] = same_state(fresh, model)
    return equal


@pytest.mark.parametrize("tp", [2, 8])
def test_each_rank_reads_its_share(pool, weights, folders, tp):
    for equal in pool.run(sharded_states, {**folders, "weights": weights}, tp=tp):
        assert equal == dict.fromkeys(LAYOUTS, True)


def test_loading_into_a_bound_and_wrapped_engine(engine, model, states, release):
    """A weight sync under an install: the next forward computes the new weights, bit for bit."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.utils import replace_submodule
    from vllm_omni.diffusion.lora.utils import from_layer_diffusion

    request = engine.request()
    doubled = {name: t if "inv_freq" in name else t * 2 for name, t in states["diffusers"].items()}
    fresh = engine.build()
    load_h3_weights(fresh, doubled.items(), "diffusers")
    config = LoRAConfig(max_lora_rank=8, max_loras=1, max_cpu_loras=1, lora_dtype=torch.bfloat16)
    with install_h3_rollout(model, scope="linears"), install_h3_rollout(fresh, scope="linears"):
        for name in ("blocks.0.mlp.fc2", "blocks.1.attn.out_proj"):
            replace_submodule(model, name, from_layer_diffusion(model.get_submodule(name), 1, config, []))
        load_h3_weights(model, doubled.items(), "diffusers")
        a, b = (engine.velocities(m, [request]) for m in (model, fresh))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_gates_of_a_sparse_model_are_loaded_and_reported(engine, model):
    """With VSA gates the model has one more linear a block: loaded like the others, and the engine's in the report."""
    request = engine.request()
    model.enable_vsa_gates()
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.to_gate_compress.weight)
    fresh = engine.build()
    fresh.enable_vsa_gates()
    names = load_h3_weights(fresh, engine.release_state(model).items(), "release")
    assert "blocks.1.attn.to_gate_compress.weight" in names
    assert same_state(fresh, model)
    engine.run_plain(fresh)
    with install_h3_rollout(fresh, scope="linears") as handle:
        engine.velocities(fresh, [request])
        assert handle.report()["blocks.0.attn.to_gate_compress"].operator == "bf16 ColumnParallelLinear"
        assert len(handle.report().bound()) == 16


def test_cached_adaln_is_dropped(load, engine, states):
    cached, fresh = load(adaln_cache=True), engine.build()
    request = engine.request()
    engine.velocities(cached, [request])
    changed = [(name, t if "inv_freq" in name else t * 0.5) for name, t in states["module"].items()]
    load_h3_weights(cached, changed, "module")
    load_h3_weights(fresh, changed, "module")
    a, b = (engine.velocities(m, [request]) for m in (cached, fresh))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def unchanged(engine, source, layout, error, match, prepare=lambda model: None):
    """Loading is refused with ``match`` and no tensor of the engine changes."""
    model = engine.build()
    engine.randomise(model, seed=3)
    prepare(model)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(error, match=match):
        load_h3_weights(model, source, layout)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_file_refusals_change_nothing(engine, folders, tmp_path):
    unchanged(engine, folders["release"], "diffusers", MapperError, "diffusers")
    unchanged(engine, folders["diffusers"], "module", MapperError, "module")
    unchanged(engine, tmp_path / "absent", "release", MapperError, "no such file or folder")
    for part in ("transformer", "transformer_ref"):
        (tmp_path / part).symlink_to(folders["diffusers"])
    unchanged(engine, tmp_path, "diffusers", WeightsError, "several transformers")


def test_missing_tensor_in_a_file_changes_nothing(engine, states, tmp_path):
    state = {name: t for name, t in states["release"].items() if name != "blocks.1.norm2.weight"}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**tiny.TINY, "patch_size": [1, 2, 2]}))
    unchanged(engine, tmp_path, "release", MissingTensorError, r"blocks\.1\.norm2\.weight")


def test_other_architecture_is_named(engine, folders):
    wide = engine.build({**engine.TINY, "ffn_dim": 256})
    with pytest.raises(WeightsError, match="not the engine's architecture: ffn_dim 384 against 256"):
        load_h3_weights(wide, folders["release"], "release")


def test_engine_with_other_dtypes_is_named(engine, folders):
    match = r"blocks\.0\.mlp\.fc2\.weight: the engine holds torch\.float16 .* expected torch\.bfloat16"

    def halve(model):
        model.blocks[0].mlp.fc2.half()

    unchanged(engine, folders["release"], "release", WeightsError, match, halve)


def test_packed_engine_is_named(engine, folders):
    def pack(model):
        layer = model.blocks[0].mlp.fc2
        layer.quant_method.process_weights_after_loading(layer)

    unchanged(engine, folders["release"], "release", WeightsError, "vLLM packed it for the CPU", pack)


def test_pairs_of_another_dialect_or_dtype_are_refused(engine, states):
    unchanged(engine, states["release"].items(), "diffusers", AlreadyConvertedError, "native name")
    casts = [(name, t.half()) for name, t in states["release"].items() if t.dtype == torch.bfloat16]
    unchanged(engine, casts, "release", DtypeError, "F16")


def test_incomplete_pairs_are_named(engine, states):
    model = engine.build()
    pairs = [
        (name, t)
        for name, t in states["diffusers"].items()
        if name != "transformer_blocks.0.attn.to_k.weight"
    ]
    with pytest.raises(MapperError, match=r"transformer_blocks\.0\.attn\.to_k\.weight"):
        load_h3_weights(model, pairs, "diffusers")
