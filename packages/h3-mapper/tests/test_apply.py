"""In memory: the same bytes as the reference mapping for torch and numpy, memory that is new or whole,
bounded groups, and every refusal before anything is copied."""

import json
import weakref

import numpy as np
import pytest
import torch
from h3_mapper import (
    Layout,
    MapperError,
    convert_state_dict,
    diffusers_to_native,
    diffusers_to_native_groups,
    native_to_diffusers,
    native_to_diffusers_groups,
    plan,
    tensors,
)
from h3_mapper.errors import (
    AlreadyConvertedError,
    DerivedTensorError,
    DtypeError,
    IncompleteGroupError,
    LayoutError,
    MissingTensorError,
    MixedLayoutsError,
    PrunedVariantError,
    QuantisedVariantError,
    ShapeError,
    UnknownNameError,
    UnsupportedTensorError,
)
from h3_mapper.runs import runs
from hypothesis import given
from hypothesis import strategies as st
from mapper_testkit import TINY, configs, random_diffusers, reference_native
from safetensors.torch import save_file

NATIVE = [Layout.RELEASE, Layout.MODULE]
BOTH = pytest.mark.parametrize("library", ["torch", "numpy"])
QKV = "blocks.0.attn.qkv_proj.weight"


def arrays(held, library):
    if library == "numpy":
        kinds = {"F32": "<f4", "BF16": "<u2"}
        return {n: np.frombuffer(bytearray(b), kinds[d]).reshape(s) for n, (d, s, b) in held.items()}
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16}
    return {n: torch.frombuffer(bytearray(b), dtype=kinds[d]).reshape(s) for n, (d, s, b) in held.items()}


def raw(state):
    def one(array):
        if isinstance(array, np.ndarray):
            return array.tobytes()
        return array.detach().contiguous().view(torch.uint8).numpy().tobytes()

    return {name: one(array) for name, array in state.items()}


def bytes_of(held):
    return {name: data for name, (_, _, data) in held.items()}


@BOTH
@pytest.mark.parametrize("layout", NATIVE)
@given(config=configs())
def test_both_ways_equal_the_reference_bit_for_bit(library, layout, config):
    held = random_diffusers(config)
    state = arrays(held, library)
    native = diffusers_to_native(state, layout=layout, config=config)
    assert raw(native) == bytes_of(reference_native(held, config, layout))
    assert raw(native_to_diffusers(native, layout=layout, config=config)) == bytes_of(held)
    assert raw(state) == bytes_of(held)


@BOTH
@pytest.mark.parametrize("layout", NATIVE)
def test_groups_are_the_same_tensors_one_group_at_a_time(library, layout):
    state = arrays(random_diffusers(TINY), library)
    native = diffusers_to_native(state, layout=layout, config=TINY)
    grouped = list(diffusers_to_native_groups(state, layout=layout, config=TINY))
    assert [group for group, _ in grouped] == [
        "model",
        "token_refiner.blocks.0",
        "token_refiner.blocks.1",
        "blocks.0",
        "blocks.1",
    ]
    assert raw({n: t for _, part in grouped for n, t in part.items()}) == raw(native)
    back = native_to_diffusers_groups(native, layout=layout, config=TINY)
    assert raw({n: t for _, part in back for n, t in part.items()}) == raw(state)


def test_groups_hold_one_group_of_a_lazy_state_dict():
    """Nothing but the current group's tensors is alive, on either side."""
    held, alive = random_diffusers(TINY), weakref.WeakSet()

    class Lazy(dict):
        def __getitem__(self, name):
            tensor = arrays({name: held[name]}, "torch")[name].clone()
            alive.add(tensor)
            return tensor

    groups_of = {spec.name: spec.group for spec in tensors(TINY, Layout.DIFFUSERS)}
    largest = max(list(groups_of.values()).count(group) for group in groups_of.values())
    for _, part in diffusers_to_native_groups(Lazy.fromkeys(held), layout="module", config=TINY):
        del part
        assert len(alive) <= largest


@pytest.mark.parametrize("layout", NATIVE)
def test_what_is_only_renamed_is_the_callers_tensor_and_the_rest_is_new(layout):
    state = arrays(random_diffusers(TINY), "torch")
    native = diffusers_to_native(state, layout=layout, config=TINY)
    assert native["blocks.0.mlp.fc2.weight"] is state["transformer_blocks.0.ff.net.2.weight"]
    mine = {t.untyped_storage().data_ptr() for t in state.values()}
    assert native[QKV].untyped_storage().data_ptr() not in mine


def test_a_saved_dict_never_holds_windows_of_a_larger_storage(tmp_path):
    """safetensors/safetensors#98: q, k, v cut from one tensor; a view would write, or keep, three times the bytes."""
    native = diffusers_to_native(arrays(random_diffusers(TINY), "torch"), layout="module", config=TINY)
    fused = torch.zeros(3, 48, dtype=torch.bfloat16)
    native["blocks.0.norm1.weight"] = fused[1]
    native["blocks.0.mlp.fc2.weight"] = native["blocks.0.mlp.fc2.weight"].t().contiguous().t()
    back = native_to_diffusers(native, layout="module", config=TINY)
    for tensor in back.values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    assert len({t.untyped_storage().data_ptr() for t in back.values()}) == len(back)
    save_file({n: t.contiguous() for n, t in back.items()}, tmp_path / "x.safetensors")


def test_numpy_windows_are_copied_too():
    native = diffusers_to_native(arrays(random_diffusers(TINY), "numpy"), layout="module", config=TINY)
    native["blocks.0.norm1.weight"] = np.zeros((3, 48), "<u2")[1]
    back = native_to_diffusers(native, layout="module", config=TINY)
    window = back["transformer_blocks.0.norm1.weight"]
    assert window.base is None or window.base.nbytes == window.nbytes


def test_sources_with_any_strides_are_read_right():
    held = random_diffusers(TINY)
    state = {n: t.t().contiguous().t() if t.ndim == 2 else t for n, t in arrays(held, "torch").items()}
    native = diffusers_to_native(state, layout="release", config=TINY)
    assert raw(native) == bytes_of(reference_native(held, TINY, Layout.RELEASE))


@BOTH
@pytest.mark.parametrize("layout", NATIVE)
def test_out_receives_every_value_and_must_fit(library, layout):
    held = random_diffusers(TINY)
    state, mapping = arrays(held, library), plan(TINY, Layout.DIFFUSERS, layout)
    want = reference_native(held, TINY, layout)
    blank = {n: (d, s, bytes(len(b))) for n, (d, s, b) in want.items()}
    out = arrays(blank, library)
    result = convert_state_dict(state, mapping, out=out)
    assert all(result[name] is out[name] for name in out)
    assert raw(out) == bytes_of(want)
    short = {n: t for n, t in out.items() if n != QKV}
    with pytest.raises(MissingTensorError, match=r"^out: "):
        convert_state_dict(state, mapping, out=short)


def test_parameters_that_require_grad_are_mapped_without_a_graph():
    state = {n: torch.nn.Parameter(t) for n, t in arrays(random_diffusers(TINY), "torch").items()}
    assert not diffusers_to_native(state, layout="module", config=TINY)[QKV].requires_grad


def test_meta_tensors_map_to_meta_tensors():
    state = {
        s.name: torch.empty(
            s.shape, dtype=torch.float32 if s.dtype == "F32" else torch.bfloat16, device="meta"
        )
        for s in tensors(TINY, Layout.DIFFUSERS)
    }
    native = diffusers_to_native(state, layout="release", config=TINY)
    assert {t.device.type for t in native.values()} == {"meta"}
    assert {n: tuple(t.shape) for n, t in native.items()} == {
        s.name: s.shape for s in tensors(TINY, Layout.RELEASE)
    }
    assert len(native_to_diffusers(native, layout="release", config=TINY)) == 62


def test_the_config_may_be_config_jsons_object():
    state = arrays(random_diffusers(TINY), "torch")
    spelled = [TINY, TINY.to_json(native=False), json.loads(json.dumps(TINY.to_json(native=True)))]
    assert len({raw(diffusers_to_native(state, layout="release", config=c))[QKV] for c in spelled}) == 1


REFUSALS = {
    "unknown name": (UnknownNameError, {"extra": "norm_out.norm.weight"}, ()),
    "missing": (MissingTensorError, {}, ("proj_in.bias",)),
    "incomplete": (IncompleteGroupError, {}, ("transformer_blocks.0.attn.to_v.weight",)),
    "mixed": (MixedLayoutsError, {"blocks.0.norm1.weight": "norm_out.norm.weight"}, ()),
    "pruned": (PrunedVariantError, {"adaln_t_table": "norm_out.norm.weight"}, ()),
    "shape": (ShapeError, {"proj_in.bias": "proj_out.bias"}, ()),
    "dtype": (DtypeError, {"proj_in.bias": "norm_out.norm.weight"}, ()),
}


@BOTH
@pytest.mark.parametrize("case", REFUSALS)
def test_a_wrong_state_dict_is_refused(library, case):
    error, added, removed = REFUSALS[case]
    state = arrays(random_diffusers(TINY), library)
    state.update({name: state[like] for name, like in added.items()})
    for name in removed:
        del state[name]
    with pytest.raises(MapperError) as caught:
        diffusers_to_native(state, layout="release", config=TINY)
    assert type(caught.value) is error
    with pytest.raises(error):
        list(diffusers_to_native_groups(state, layout="release", config=TINY))


def test_native_names_are_not_mapped_twice():
    """radixark/miles_diffusion#226"""
    native = diffusers_to_native(arrays(random_diffusers(TINY), "torch"), layout="release", config=TINY)
    with pytest.raises(AlreadyConvertedError, match="native names already"):
        diffusers_to_native(native, layout="release", config=TINY)
    state = arrays(random_diffusers(TINY), "torch")
    with pytest.raises(AlreadyConvertedError, match="Diffusers names already"):
        native_to_diffusers(state, layout="module", config=TINY)
    with pytest.raises(LayoutError, match="release or module"):
        diffusers_to_native(state, layout="diffusers", config=TINY)


def test_inv_freq_of_other_bits_is_refused():
    native = diffusers_to_native(arrays(random_diffusers(TINY), "torch"), layout="release", config=TINY)
    native["rope.inv_freq"] = torch.nextafter(native["rope.inv_freq"], torch.ones(4))
    with pytest.raises(DerivedTensorError):
        native_to_diffusers(native, layout="release", config=TINY)


def test_tensors_without_rows_of_their_own_are_refused():
    state = arrays(random_diffusers(TINY), "torch")
    sparse = state | {"proj_in.weight": state["proj_in.weight"].to_sparse()}
    int8 = state | {"transformer_blocks.0.ff.net.2.weight": torch.zeros(48, 80, dtype=torch.int8)}
    for changed, error, match in (
        (sparse, UnsupportedTensorError, r"proj_in\.weight.*dense"),
        (int8, QuantisedVariantError, "quantised"),
        (state | {"proj_in.weight": [[0.0]]}, UnsupportedTensorError, "neither"),
    ):
        with pytest.raises(error, match=match):
            diffusers_to_native(changed, layout="release", config=TINY)


def test_a_dtensor_is_refused_with_what_to_do(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        state = arrays(random_diffusers(TINY), "torch")
        mesh = init_device_mesh("cpu", (1,))
        state["proj_in.weight"] = distribute_tensor(state["proj_in.weight"], mesh, [Replicate()])
        with pytest.raises(UnsupportedTensorError, match=r"proj_in\.weight.*full_tensor"):
            diffusers_to_native(state, layout="release", config=TINY)
    finally:
        dist.destroy_process_group()


@given(config=configs(), pair=st.permutations(list(Layout)))
def test_runs_are_the_blocks(config, pair):
    """Strided runs, unrolled, give each target row the source row its blocks give."""
    for target in plan(config, pair[0], pair[1]).targets:
        want, row = {}, 0
        for block in target.rows:
            for at in range(block.start, block.stop):
                want[row] = (block.name, at)
                row += 1
        got = {
            run.row + i * run.row_step + j: (run.name, run.start + i * run.step + j)
            for run in runs(target.rows)
            for i in range(run.count)
            for j in range(run.length)
        }
        assert got == want


def test_per_head_qkv_is_three_runs():
    fused = next(t for t in plan(TINY, Layout.DIFFUSERS, Layout.RELEASE).targets if t.name == QKV)
    assert len(runs(fused.rows)) == 3
