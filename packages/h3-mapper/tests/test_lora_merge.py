"""Merging an adapter: every row is exact or within one rounding, in every layout, and nothing else is touched."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from h3_mapper import convert, verify
from h3_mapper.cli import main
from h3_mapper.digest import Digest
from h3_mapper.errors import QuantisedVariantError
from h3_mapper.identify import identified_all
from h3_mapper.lora import Statement, read, write
from h3_mapper.lora.errors import MissingExtraError, NonFiniteError, ScaleError
from h3_mapper.lora.files import save_adapter
from h3_mapper.lora.floats import narrow, widen
from h3_mapper.lora.merge import find_base, merge
from h3_mapper.manifest import compute
from h3_mapper.plan import spans
from h3_mapper.spec import Layout
from lora_testkit import SCALE_ONE, block_modules, diffusers_lora, products, values
from mapper_testkit import TINY, random_diffusers, write_file
from merge_testkit import base_state, save_base, torch_tensor


@pytest.fixture
def adapter():
    return read(diffusers_lora(), TINY, statement=SCALE_ONE)


def expected_merge(adapter, layout, strength=1.0):
    """Merged weights by exact arithmetic: fp64, rounded once."""
    change = products(adapter)
    made = {}
    for name, tensor in base_state(layout).items():
        exact = tensor.double()
        for span in spans(TINY, layout).get(name, ()):
            if span.atom in change:
                rows = slice(span.row, span.row + span.stop - span.start)
                exact[rows] += strength * torch.from_numpy(change[span.atom][span.start : span.stop])
        made[name] = (tensor, exact)
    return made


@pytest.mark.parametrize("layout", list(Layout))
def test_merge_rounds_once_and_touches_nothing_else(tmp_path, adapter, layout):
    folder = save_base(tmp_path / "base", layout)
    before = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    done = merge(find_base(folder), adapter, tmp_path / "out")
    assert {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()} == before
    (file,) = (tmp_path / "out").glob("*.safetensors")
    merged = safetensors.torch.load_file(file)
    changed = 0
    for name, (old, exact) in expected_merge(adapter, layout).items():
        new = merged[name]
        assert new.dtype == old.dtype
        if torch.equal(exact, old.double()):
            assert torch.equal(new.view(torch.uint8), old.view(torch.uint8)), name
            continue
        changed += 1
        wrong = new != exact.to(old.dtype)  # only where the fp32 sum lies next to a rounding boundary
        assert wrong.float().mean() < 1e-3, name
        ulp = exact.abs().clamp(min=2.0**-126) * 2.0**-7
        assert ((new.double() - exact).abs() <= ulp * 0.51).all(), name
    assert changed == done.changed


def test_merge_gives_the_same_bits_in_every_layout(tmp_path, adapter):
    digests = []
    for layout in Layout:
        merge(find_base(save_base(tmp_path / f"base-{layout}", layout)), adapter, tmp_path / f"out-{layout}")
        found = identified_all(tmp_path / f"out-{layout}")[""]
        digests.append(compute(found, Digest.XXH3, 1).atoms)
    assert digests[0] == digests[1] == digests[2]


def test_exact_adapters_merge_exactly(tmp_path):
    """Small integers: fp32 has no rounding to do, so the merged bf16 bits are known."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    tensors_ = {}
    for name, value in diffusers_lora().items():
        tensors_[name] = narrow(rng.integers(-2, 3, value.shape).astype(np.float32), "BF16")
    exact = read(tensors_, TINY, statement=Statement(alpha=1.5))
    state = {n: torch.randint(-4, 5, t.shape).to(t.dtype) for n, t in base_state(Layout.DIFFUSERS).items()}
    folder = save_base(tmp_path / "base", Layout.DIFFUSERS, state)
    merge(find_base(folder), exact, tmp_path / "out", strength=2.0)
    merged = safetensors.torch.load_file(next((tmp_path / "out").glob("*.safetensors")))
    change = products(exact)
    for name, held in spans(TINY, Layout.DIFFUSERS).items():
        wanted = state[name].double()
        for span in held:
            if span.atom in change:
                wanted[span.row : span.row + span.stop - span.start] += 2.0 * torch.from_numpy(
                    change[span.atom]
                )
        assert torch.equal(merged[name], wanted.to(merged[name].dtype)), name
    with pytest.raises(AssertionError):
        assert torch.equal(
            merged["transformer_blocks.0.attn.to_q.weight"], state["transformer_blocks.0.attn.to_q.weight"]
        )


def test_merging_and_unmerging_in_bf16_would_not_restore_the_base(tmp_path, adapter):
    """R05: why a merge never edits the base."""
    folder = save_base(tmp_path / "base", Layout.DIFFUSERS)
    merge(find_base(folder), adapter, tmp_path / "merged")
    merge(find_base(tmp_path / "merged"), adapter, tmp_path / "back", strength=-1.0)
    once = safetensors.torch.load_file(next((tmp_path / "back").glob("*.safetensors")))
    base = base_state(Layout.DIFFUSERS)
    name = "transformer_blocks.0.attn.to_q.weight"
    assert not torch.equal(once[name], base[name])
    assert torch.equal(once["transformer_blocks.0.norm1.weight"], base["transformer_blocks.0.norm1.weight"])


def test_quantised_base_is_refused_and_points_to_bf16(tmp_path, adapter):
    """L16."""
    state = base_state(Layout.MODULE)
    name = "blocks.0.mlp.fc2.weight"
    state[name] = state[name].to(torch.int8)
    state["blocks.0.mlp.fc2.weight_scale"] = torch.ones(TINY.hidden_size, 1)
    folder = save_base(tmp_path / "base", Layout.MODULE, state)
    with pytest.raises(QuantisedVariantError, match="BF16"):
        find_base(folder)
    assert main(["lora", "merge", str(folder), str(folder), str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_fasth3_deltas_and_gates_are_merged(tmp_path):
    rng = np.random.default_rng(9)
    tensors_ = diffusers_lora(prefix="")
    tensors_["transformer_blocks.0.norm1.diff"] = values(rng, (TINY.hidden_size,))
    tensors_["proj_in.diff_b"] = values(rng, (TINY.hidden_size,), "F32")
    for block in range(TINY.num_layers):
        tensors_[f"transformer_blocks.{block}.attn.to_gate_compress.set_weight"] = values(
            rng, (TINY.inner_size, TINY.hidden_size)
        )
    student = read(tensors_, TINY, metadata={"format": "fastvideo-lora-v2"})
    folder = save_base(tmp_path / "base", Layout.RELEASE)
    done = merge(find_base(folder), student, tmp_path / "out")
    merged = safetensors.torch.load_file(next((tmp_path / "out").glob("*.safetensors")))
    base = base_state(Layout.RELEASE)
    gate = "blocks.1.attn.to_gate_compress.weight"
    assert torch.equal(merged[gate], torch_tensor(student.assigned[gate]))
    norm = "blocks.0.norm1.weight"
    delta = torch_tensor(student.deltas[norm]).float()
    assert torch.equal(merged[norm], (base[norm].float() + delta).to(torch.bfloat16))
    bias = "video_patch_proj.bias"
    assert torch.equal(merged[bias], base[bias] + torch_tensor(student.deltas[bias]))
    assert done.tensors == len(base) + TINY.num_layers
    assert identified_all(tmp_path / "out")[""].config.vsa_gates


def test_merge_from_the_command_line(tmp_path, adapter):
    folder = save_base(tmp_path / "base", Layout.RELEASE)
    file = tmp_path / "lora.safetensors"
    save_adapter(write(adapter, "diffsynth", TINY), file, tmp_path / "x")
    assert main(["lora", "merge", str(folder), str(file), str(tmp_path / "out"), "--alpha", "rank"]) == 0
    merge(find_base(folder), adapter, tmp_path / "direct")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "direct" / "model.safetensors"
    ).read_bytes()
    assert main(["lora", "merge", str(folder), str(file), str(tmp_path / "out"), "--alpha", "rank"]) == 2


def test_a_root_with_both_partitions_gets_the_adapter_s_own(tmp_path, adapter, capsys):
    """A Ref2VA adapter loads into FL2VA without an error anywhere, and spoils it; names or metadata decide."""
    (tmp_path / "root").mkdir()
    save_base(tmp_path / "root" / "transformer", Layout.DIFFUSERS, base_state(Layout.DIFFUSERS, seed=1))
    save_base(tmp_path / "root" / "transformer_ref", Layout.DIFFUSERS, base_state(Layout.DIFFUSERS, seed=2))
    reference = replace(adapter, component="transformer_ref")
    save_adapter(write(reference, "kohya", TINY), tmp_path / "ref.safetensors", tmp_path / "x")
    assert (
        main(
            [
                "lora",
                "merge",
                str(tmp_path / "root"),
                str(tmp_path / "ref.safetensors"),
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    merge(find_base(tmp_path / "root" / "transformer_ref"), adapter, tmp_path / "direct")
    name = "diffusion_pytorch_model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "direct" / name).read_bytes()
    save_adapter(
        write(replace(adapter, component=None), "kohya", TINY), tmp_path / "any.safetensors", tmp_path / "x"
    )
    assert (
        main(
            ["lora", "merge", str(tmp_path / "root"), str(tmp_path / "any.safetensors"), str(tmp_path / "no")]
        )
        == 2
    )
    assert "say which one to merge into" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("strength", "error"), [(float("nan"), ScaleError), (float("inf"), ScaleError), (3e38, NonFiniteError)]
)
def test_a_merge_that_is_not_finite_writes_nothing(tmp_path, adapter, strength, error):
    save_base(tmp_path / "base", Layout.DIFFUSERS)
    with pytest.raises(error, match="strength"):
        merge(find_base(tmp_path / "base"), adapter, tmp_path / "out", strength=strength)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_without_numpy_a_merge_says_what_to_install(tmp_path, adapter, monkeypatch):
    base = find_base(save_base(tmp_path / "base", Layout.DIFFUSERS))
    monkeypatch.setitem(__import__("sys").modules, "numpy", None)
    with pytest.raises(MissingExtraError, match="needs numpy: pip install numpy"):
        merge(base, adapter, tmp_path / "out")


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_rounding_is_torch_s(dtype):
    """Every high half of fp32, with lower halves around the tie: to nearest, ties to even, NaN stays NaN."""
    high = np.arange(2**16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = (high[:, None] | low[None, :]).reshape(-1)
    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    wanted = torch.from_numpy(bits.view(np.float32).copy()).to(kinds[dtype])
    got = torch_tensor(narrow(bits.view(np.float32), dtype))
    nan = wanted.isnan()
    assert torch.equal(got.isnan(), nan)
    raw_bits = {2: torch.int16, 4: torch.int32}[wanted.element_size()]
    assert torch.equal(got[~nan].view(raw_bits), wanted[~nan].view(raw_bits))
    assert torch.equal(
        torch.from_numpy(widen(narrow(bits.view(np.float32), dtype)))[~nan], wanted.float()[~nan]
    )


def test_block_modules_is_every_linear_of_every_block():
    assert len(block_modules()) == 6 * (TINY.num_layers + TINY.num_refiner_layers)


@pytest.mark.parametrize("part", "qkv")
def test_an_adapter_of_one_part_of_a_fused_tensor_merges_into_every_layout(tmp_path, part):
    """The other parts of a native qkv_proj stay as they are; merged bases of all layouts hold the same atoms."""
    held = {
        name: (kind, shape, bytes(len(data))) for name, (kind, shape, data) in random_diffusers(TINY).items()
    }
    name = f"transformer_blocks.1.attn.to_{part}"
    sizes = {"A": [2, TINY.hidden_size], "B": [TINY.inner_size, 2]}
    factors = {
        f"{name}.lora_{side}.weight": ("F32", size, np.ones(size, np.float32).tobytes())
        for side, size in sizes.items()
    }
    write_file(tmp_path / "l.safetensors", factors)
    (tmp_path / "base").mkdir()
    write_file(tmp_path / "base" / "diffusion_pytorch_model.safetensors", held)
    (tmp_path / "base" / "config.json").write_text(json.dumps(TINY.to_json(native=False)))
    for layout in ("release", "module"):
        convert(tmp_path / "base", tmp_path / layout, layout)
    for base in ("base", "release", "module"):
        into = str(tmp_path / f"merged-{base}")
        code = main(
            ["lora", "merge", str(tmp_path / base), str(tmp_path / "l.safetensors"), into, "--alpha", "rank"]
        )
        assert code == 0
        assert verify(tmp_path / "merged-base", into).equal
        changed = {d.atom for d in verify(tmp_path / "base", into).differences}
        assert changed == {f"blocks.1.attn.qkv_proj.weight[{part}]"}
