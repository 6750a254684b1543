"""Adapters against the libraries that load them: PEFT, Diffusers and vLLM-Omni."""

import json
import warnings
from dataclasses import replace
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
from h3_mapper import H3Config
from h3_mapper.lora import Adapter, LowRank, Naming, Raw, Statement, read, shard, write
from h3_mapper.lora.arrays import raw
from h3_mapper.lora.blocks import Change, changed_rows
from h3_mapper.lora.files import save_adapter
from h3_mapper.lora.floats import widen
from h3_mapper.lora.merge import find_base, merge
from h3_mapper.lora.modules import atoms_of, places
from h3_mapper.spec import Layout
from lora_testkit import SCALE_ONE, assert_same_products, block_modules, diffusers_lora, products, values
from mapper_testkit import TINY
from merge_testkit import base_state, save_base, torch_tensor
from sync_engines import lora_worker, run_ranks

with warnings.catch_warnings():
    # The libraries, and what they import, use deprecated torch and Python functions while being imported.
    warnings.simplefilter("ignore")
    import peft
    from diffusers.loaders.lora_pipeline import MiniMaxH3LoraLoaderMixin
    from mapper_engines import diffusers_model, vllm_engine
    from vllm_omni.diffusion.models.minimax_h3 import lora as turbo_loader
    from vllm_omni.diffusion.models.minimax_h3.fasth3 import FastH3WeightFusion
    from vllm_omni.diffusion.models.minimax_h3.npu import lora as flashgen_loader
    from vllm_omni.lora.request import LoRARequest

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("h3-mapper-engines")]

HALF = Statement(alpha=2.0)
ENGINE = replace(TINY, num_attention_heads=4, attention_head_dim=16, num_refiner_layers=1, ffn_dim=64)
WIDE = replace(TINY, attention_head_dim=128)
"""Heads of 128, which Diffusers' reader of DiffSynth files assumes."""


def as_torch(tensors):
    return {name: torch_tensor(raw(value)) for name, value in tensors.items()}


def as_raw(tensors):
    return {name: Raw((v := raw(value)).dtype, v.shape, bytes(v.data)) for name, value in tensors.items()}


def hold(path, tensors, metadata=None):
    safetensors.torch.save_file(as_torch(tensors), path, metadata)
    return path


@pytest.mark.parametrize("name", ["kohya", "comfy", "diffsynth", "turbo"])
def test_diffusers_own_converter_agrees(tmp_path, name):
    """Same products from Diffusers' reading of our file; alphas are powers of two, so its folding is exact."""
    said = SCALE_ONE if name == "diffsynth" else Statement(alpha=4.0)
    source = read(diffusers_lora(rank=2, config=WIDE), WIDE, statement=said)
    written = write(source, name, WIDE)
    folder = tmp_path / "lora"
    folder.mkdir()
    hold(folder / "lora.safetensors", written.tensors, written.metadata)
    theirs, metadata = MiniMaxH3LoraLoaderMixin.lora_state_dict(
        str(folder), weight_name="lora.safetensors", return_lora_metadata=True
    )
    config = {k.partition(".")[2]: v for k, v in (metadata or {}).items()} or {"r": None, "lora_alpha": None}
    plain = {"statement": SCALE_ONE} if metadata is None else {"peft_config": config}
    assert_same_products(source, read(as_raw(theirs), WIDE, **plain))


def test_diffusers_converter_would_catch_a_wrong_row_order(tmp_path):
    source = read(diffusers_lora(rank=2, config=WIDE), WIDE, statement=SCALE_ONE)
    wrong = {n.replace(".default", ""): v for n, v in write(source, "diffsynth", WIDE).tensors.items()}
    theirs = MiniMaxH3LoraLoaderMixin.lora_state_dict(as_torch(wrong))
    with pytest.raises(AssertionError):
        assert_same_products(source, read(as_raw(theirs), WIDE, statement=SCALE_ONE))


def test_diffusers_model_loads_our_file_with_our_scales(tmp_path):
    tensors = diffusers_lora(rank={"to_q": 4})
    config = {"r": 3, "lora_alpha": 6, "rank_pattern": {"to_q": 4}, "alpha_pattern": {"to_q": 2}}
    source = read(tensors, TINY, peft_config=config)
    save_adapter(write(source, "diffusers", TINY), tmp_path / "lora.safetensors", tmp_path / "x")
    state, metadata = MiniMaxH3LoraLoaderMixin.lora_state_dict(
        str(tmp_path), weight_name="lora.safetensors", return_lora_metadata=True
    )
    model = diffusers_model()
    model.load_lora_adapter(state, prefix="transformer", metadata=metadata, adapter_name="default")
    assert_same_products(source, bound(model))


def test_peft_loads_our_folder_with_our_scales_and_magnitudes(tmp_path):
    rng = np.random.default_rng(2)
    tensors = diffusers_lora(prefix="base_model.model.")
    for module in block_modules():
        rows = tensors[f"base_model.model.{module}.lora_B.weight"].shape[0]
        tensors[f"base_model.model.{module}.lora_magnitude_vector"] = values(rng, (rows,), "F32")
    source = read(tensors, TINY, peft_config={"r": 3, "lora_alpha": 12, "use_dora": True})
    save_adapter(write(source, "peft", TINY), tmp_path / "lora", tmp_path / "x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = peft.PeftModel.from_pretrained(diffusers_model(), tmp_path / "lora").base_model.model
    found = bound(model)
    assert_same_products(source, found)
    for atom, term in source.low_rank.items():
        assert bytes(raw(found.low_rank[atom].magnitude).data) == bytes(term.magnitude.data), atom


def test_peft_saves_what_we_read(tmp_path):
    """The other way: an adapter that PEFT wrote, rsLoRA and patterns included."""
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        use_rslora=True,
        rank_pattern={"to_k": 9},
        target_modules=["to_q", "to_k", "ff.net.2"],
    )
    model = peft.get_peft_model(diffusers_model(), config)
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    model.save_pretrained(tmp_path / "lora")
    stored = safetensors.torch.load_file(tmp_path / "lora" / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    ours = read(as_raw(stored), TINY, peft_config=settings)
    assert_same_products(ours, bound(model.base_model.model))
    with pytest.raises(AssertionError):
        assert_same_products(read(as_raw(stored), TINY, statement=SCALE_ONE), bound(model.base_model.model))


def test_dora_merge_matches_peft(tmp_path):
    """One linear of the model, wrapped by PEFT with DoRA, merged by PEFT in fp32 and by us."""
    torch.manual_seed(0)
    linear = torch.nn.Sequential(torch.nn.Linear(TINY.ffn_dim, TINY.hidden_size, bias=False))
    wrapped = peft.get_peft_model(
        linear, peft.LoraConfig(r=4, lora_alpha=6, target_modules=["0"], use_dora=True)
    )
    layer = wrapped.base_model.model[0]
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_()
        layer.lora_magnitude_vector["default"].weight.mul_(1.5)
    weight = layer.base_layer.weight.detach().clone()
    module = "transformer_blocks.0.ff.net.2"
    tensors_ = {
        f"{module}.lora_A.weight": raw(layer.lora_A["default"].weight),
        f"{module}.lora_B.weight": raw(layer.lora_B["default"].weight),
        f"{module}.lora_magnitude_vector": raw(layer.lora_magnitude_vector["default"].weight),
    }
    tensors_ = {name: Raw(v.dtype, v.shape, bytes(v.data)) for name, v in tensors_.items()}
    dora = read(tensors_, TINY, peft_config={"r": 4, "lora_alpha": 6, "use_dora": True})
    peft_merged = wrapped.merge_and_unload()[0].weight.detach()
    name = "blocks.0.mlp.fc2.weight"

    def merged(adapter):
        change = Change(adapter, 1.0, atoms_of(TINY))
        return widen(changed_rows(change, name, raw(weight), 0, TINY.hidden_size))

    np.testing.assert_allclose(merged(dora), peft_merged.numpy(), rtol=1e-5, atol=1e-6)
    without = {k: v for k, v in tensors_.items() if "magnitude" not in k}
    plain = read(without, TINY, peft_config={"r": 4, "lora_alpha": 6})
    assert np.abs(merged(plain) - peft_merged.numpy()).max() > 0.1


def bound(model):
    """The adapter that a live PEFT-wrapped model applies, from its layers."""
    known, terms = places(TINY, Naming.DIFFUSERS), {}
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "scaling") and len(layer.lora_A):
            place = known[f"{name}.weight"]
            a = as_raw({"a": layer.lora_A["default"].weight})["a"]
            b = place.split(as_raw({"b": layer.lora_B["default"].weight})["b"])
            vector = getattr(layer, "lora_magnitude_vector", {})
            m = place.split(as_raw({"m": vector["default"].weight})["m"]) if "default" in vector else {}
            scale = Fraction(layer.scaling["default"])
            terms |= {atom: LowRank(a, rows, scale, m.get(atom)) for atom, rows in b.items()}
    return Adapter(terms)


# --- vLLM-Omni -------------------------------------------------------------------------------------------

PARTS = {"qkv_proj": ("[q]", "[k]", "[v]"), "fc1": ("[gate]", "[value]")}


def layer_products(report):
    """B @ A by atom, from the stacked buffers of the manager's layers (scale already folded into B)."""
    found = {}
    for module, (a_side, b_side) in report["layers"].items():
        parts = PARTS.get(module.rpartition(".")[2], ("",))
        for part, a, b in zip(parts, a_side, b_side, strict=True):
            total = np.zeros((b.shape[0], a.shape[1]))
            for r in range(a.shape[0]):
                total += b[:, r : r + 1].double().numpy() * a[r : r + 1].double().numpy()
            found[f"{module}.weight{part}"] = total
    return found


@pytest.fixture(scope="module")
def adapter_folders(tmp_path_factory):
    source = read(diffusers_lora(rank=4, config=ENGINE), ENGINE, statement=HALF)
    folder = tmp_path_factory.mktemp("lora")
    for name in ("vllm-omni", "engine"):
        save_adapter(write(source, name, ENGINE), folder / name, folder / "x")
    return source, [
        (str(folder / "vllm-omni"), False),
        (str(folder / "engine"), True),
        (str(folder / "engine"), False),
    ]


@pytest.mark.parametrize("tp", [1, 2])
def test_vllm_omni_binds_every_slice_of_our_folders(adapter_folders, tp):
    """verl-omni's end-to-end check: all slices active, each rank the shard of the product; and what cannot bind."""
    source, folders = adapter_folders
    for rank, (fused, engine, unprepared) in enumerate(run_ranks(tp, lora_worker, ENGINE, folders)):
        bound_reports = {"engine": engine} if tp > 1 else {"vllm-omni": fused, "engine": engine}
        for name, report in bound_reports.items():
            assert "error" not in report, (name, report)
            wanted, found = products(shard(source, ENGINE, tp, rank)), layer_products(report)
            assert found.keys() == wanted.keys()
            for atom, product in wanted.items():
                assert np.abs(product).max() > 0
                np.testing.assert_array_equal(found[atom], product, err_msg=f"{name} {atom}")
        if tp > 1:  # its manager compares the whole B with one rank's output slices
            assert "binding is incomplete" in fused["error"]
        assert "fc1_0" in unprepared["error"], "0.30 declares q, k and v only"


@pytest.fixture
def tiny_contracts():
    """vLLM-Omni's Turbo and FlashGen loaders with the released sizes replaced by TINY's; their code is untouched."""
    modules = block_modules()
    sizes = {
        "_TURBO_RANK": 4,
        "_TURBO_EXPECTED_RAW_TARGETS": frozenset(modules),
        "_TURBO_TARGET_DIMS": {
            **{f"attn.to_{part}": (TINY.hidden_size, TINY.inner_size) for part in "qkv"},
            "attn.to_out.0": (TINY.inner_size, TINY.hidden_size),
            "ff.net.0.proj": (TINY.hidden_size, 2 * TINY.ffn_dim),
            "ff.net.2": (TINY.ffn_dim, TINY.hidden_size),
        },
    }
    native = {
        "_NATIVE_RANK": 12,
        "_NATIVE_ALPHA": 6,
        "_NATIVE_NUM_QUERY_GROUPS": TINY.num_attention_heads,
        "_NATIVE_HEAD_DIM": TINY.attention_head_dim,
        "_NATIVE_QKV_SLICE": TINY.inner_size,
        "_NATIVE_EXPECTED_TARGETS": frozenset(
            f"{head}.{leaf}"
            for head in [*(f"blocks.{n}" for n in range(2)), *(f"token_refiner.blocks.{n}" for n in range(2))]
            for leaf in ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
        ),
        "_NATIVE_TARGET_DIMS": {
            "attn.qkv_proj": (TINY.hidden_size, 3 * TINY.inner_size),
            "attn.out_proj": (TINY.inner_size, TINY.hidden_size),
            "mlp.fc1": (TINY.hidden_size, 2 * TINY.ffn_dim),
            "mlp.fc2": (TINY.ffn_dim, TINY.hidden_size),
        },
    }
    with mock.patch.multiple(turbo_loader, **sizes), mock.patch.multiple(flashgen_loader, **native):
        yield


def model_products(lora_model):
    """scale * B @ A by atom of a vLLM LoRAModel, packed or plain."""
    found = {}
    for name, weights in lora_model.loras.items():
        module, _, leaf = name.removeprefix("transformer.").rpartition(".")
        packed = isinstance(weights.lora_a, list)
        if leaf.startswith("to_"):
            atoms = [f"{module}.qkv_proj.weight[{leaf[3:]}]"]
        else:
            atoms = [
                f"{module}.{leaf}.weight{part}" for part in (PARTS.get(leaf, ("",)) if packed else ("",))
            ]
        sides = zip(
            atoms,
            weights.lora_a if packed else [weights.lora_a],
            weights.lora_b if packed else [weights.lora_b],
            weights.scaling if packed else [weights.scaling],
            strict=True,
        )
        for atom, a, b, scaling in sides:
            total = np.zeros((b.shape[0], a.shape[1]))
            for r in range(a.shape[0]):
                total += b[:, r : r + 1].double().numpy() * a[r : r + 1].double().numpy()
            found[atom] = scaling * total
    return found


@pytest.mark.parametrize("name", ["turbo", "flashgen"])
@pytest.mark.usefixtures("tiny_contracts")
def test_vllm_omni_s_own_loaders_read_our_files(tmp_path, name):
    schedule = {"tasks": "t2va", "base_schedule": "0.999,0.749,0.5,0.25,0.0"}
    source = replace(read(diffusers_lora(rank=4), TINY, statement=HALF), metadata=schedule)
    file = {
        "turbo": "minimax_h3_fl2v_turbo_4step_v0.2.safetensors",
        "flashgen": "minimax_h3_t2va_flashgen_4step_v1.0_768p_bf16.safetensors",
    }[name]
    save_adapter(write(source, name, TINY), tmp_path / file, tmp_path / "x")
    load = {
        "turbo": turbo_loader.load_minimax_h3_turbo_lora,
        "flashgen": flashgen_loader.load_minimax_h3_native_lora,
    }[name]
    with vllm_engine():
        request = LoRARequest("test", 1, str(tmp_path / file))
        loaded = load(
            partition="fl2va", lora_request=request, lora_path=tmp_path / file, dtype=torch.bfloat16
        )
    assert loaded is not None
    found, wanted = model_products(loaded[0]), products(source)
    assert found.keys() == wanted.keys()
    for atom, product in wanted.items():
        np.testing.assert_array_equal(found[atom], product, err_msg=atom)


def test_vllm_omni_s_fasth3_fusion_equals_our_merge(tmp_path):
    """Its fusion of our file into the on-disk stream, and our merge: equal but where fp32 sums straddle a tie."""
    rng = np.random.default_rng(6)
    tensors = diffusers_lora(prefix="")
    tensors["transformer_blocks.0.norm1.diff"] = values(rng, (TINY.hidden_size,))
    tensors["audio_proj_out.diff_b"] = values(rng, (TINY.audio_in_channels,), "F32")
    metadata = {"format": "fastvideo-lora-v2", "finetuned_model": "FastVideo/FastH3-test"}
    student = read(tensors, TINY, metadata=metadata)
    save_adapter(write(student, "fasth3", TINY), tmp_path / "fasth3.safetensors", tmp_path / "x")
    fusion = FastH3WeightFusion.from_path(
        tmp_path / "fasth3.safetensors", head_dim=TINY.attention_head_dim, num_blocks=2, num_refiner_blocks=2
    )
    fusion._device = torch.device("cpu")
    theirs = dict(fusion.apply(base_state(Layout.RELEASE).items()))
    fusion.validate_fully_applied()
    merge(find_base(save_base(tmp_path / "base", Layout.RELEASE)), student, tmp_path / "out")
    ours = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        different = (ours[name] != value).float().mean()
        assert different < 1e-3, name
        assert torch.allclose(ours[name].float(), value.float(), rtol=2**-7), name


def test_release_sizes_of_the_published_targets():
    """312 Turbo modules and 263 FlashGen modules at full size, from the same table as everything else."""
    from h3_mapper.lora.formats import Naming
    from h3_mapper.lora.modules import places

    turbo, flashgen = turbo_loader._TURBO_EXPECTED_RAW_TARGETS, flashgen_loader._NATIVE_EXPECTED_TARGETS
    assert (len(turbo), len(flashgen)) == (312, 259)
    dims = turbo_loader._TURBO_TARGET_DIMS
    for target in turbo:
        wanted = next(size for suffix, size in dims.items() if target.endswith(suffix))
        assert places(H3Config(), Naming.DIFFUSERS)[f"{target}.weight"].shape == wanted[::-1], target
    for target in flashgen:
        wanted = flashgen_loader._native_target_dims(target)
        assert places(H3Config(), Naming.NATIVE)[f"{target}.weight"].shape == wanted[::-1], target


def test_widen_is_what_torch_reads():
    value = torch.randn(3, 5).to(torch.bfloat16)
    np.testing.assert_array_equal(widen(raw(value)), value.float().numpy())
