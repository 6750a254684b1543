"""Weight sync: any order, any buckets, one exact set of names; what the caller may reuse is copied."""

import numpy as np
import pytest
import torch
from h3_mapper import H3Config
from h3_mapper.errors import (
    AlreadyConvertedError,
    DtypeError,
    DuplicateTensorError,
    LayoutError,
    MapperError,
    MissingTensorError,
    ShapeError,
    UnsupportedTensorError,
)
from h3_mapper.lora.engine import map_lora_update_to_engine
from h3_mapper.plan import plan, tensors
from h3_mapper.spec import Layout
from h3_mapper.sync import IncompleteSyncError, WeightSync
from h3_mapper.tp import shard
from hypothesis import given
from hypothesis import strategies as st
from mapper_testkit import TINY
from test_tp import run

QKV = "transformer.blocks.0.attn.qkv_proj.weight"


def state(layout=Layout.DIFFUSERS, config=TINY, seed=0):
    """Random bits in the model's dtypes; numpy has no bfloat16, so uint16 holds its bits."""
    rng = np.random.default_rng(seed)
    made = {}
    for spec in tensors(config, layout):
        if spec.name == "rope.inv_freq":
            made[spec.name] = np.frombuffer(config.inv_freq(), "<f4").copy()
        elif spec.dtype == "BF16":
            made[spec.name] = rng.integers(0, 2**16, spec.shape, np.uint16)
        else:
            made[spec.name] = rng.standard_normal(spec.shape).astype(np.float32)
    return made


def expected(source, layout, target, tp=1, rank=0, config=TINY):
    mapped = run(shard(plan(config, layout, target), tp, rank), source)
    return mapped | {"rope.inv_freq": np.frombuffer(config.inv_freq(), "<f4")}


def collect(sync, buckets):
    """Consume every bucket, then overwrite it, as a trainer that reuses its memory does."""
    got = {}
    for bucket in buckets:
        memory = {name: value.copy() for name, value in bucket}
        for name, value in sync.push(memory.items()):
            assert name not in got, f"{name} twice"
            got[name] = (
                value if not any(np.shares_memory(value, m) for m in memory.values()) else value.copy()
            )
        for value in memory.values():
            value[...] = 7
    return got


def assert_bits(got, wanted, prefix="transformer."):
    assert got.keys() == {prefix + name for name in wanted}
    for name, value in wanted.items():
        found = got[prefix + name]
        assert (found.shape, found.dtype) == (value.shape, value.dtype), name
        assert found.tobytes() == value.tobytes(), name


@given(
    data=st.data(),
    source=st.sampled_from([Layout.DIFFUSERS, Layout.RELEASE, Layout.MODULE]),
    target=st.sampled_from([Layout.RELEASE, Layout.MODULE, Layout.DIFFUSERS]),
)
def test_any_order_and_buckets_give_the_plan_s_result(data, source, target):
    if source is target is Layout.DIFFUSERS:
        with pytest.raises(LayoutError, match=r"both diffusers: .* release .* or module"):
            WeightSync(TINY, target, source=source)
        return
    values = state(source)
    names = data.draw(st.permutations(sorted(values)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(names)), max_size=5)))
    buckets = [
        [(f"transformer.{n}", values[n]) for n in names[a:b]]
        for a, b in zip([0, *cuts], [*cuts, len(names)], strict=True)
    ]
    sync = WeightSync(TINY, target, source=source)
    got = collect(sync, buckets)
    wanted = expected(values, source, target)
    if target is Layout.DIFFUSERS:
        wanted.pop("rope.inv_freq")
    assert_bits(got, wanted)
    assert sync.finish() == got.keys()


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_module_shards_by_push_and_by_load_into(tp, rank):
    values = state()
    wanted = expected(values, Layout.DIFFUSERS, Layout.MODULE, tp, rank)
    named = [(f"transformer.{name}", value) for name, value in values.items()]
    pushed = WeightSync(TINY, Layout.MODULE, tp=tp, rank=rank)
    assert_bits(collect(pushed, [named]), wanted)
    live = {f"transformer.{name}": np.zeros_like(value) for name, value in wanted.items()}
    copied = WeightSync(TINY, Layout.MODULE, tp=tp, rank=rank)
    for pair in reversed(named):
        copied.load_into([pair], live)
    assert_bits(live, wanted)
    assert copied.finish() == live.keys() == pushed.finish()


def test_the_wrong_target_is_caught_by_the_bits():
    """The twin: release rows have module's names and shapes, and are not module's rows."""
    values = state()
    sync = WeightSync(TINY, Layout.RELEASE)
    got = collect(sync, [[(f"transformer.{n}", v) for n, v in values.items()]])
    with pytest.raises(AssertionError, match="qkv_proj"):
        assert_bits(got, expected(values, Layout.DIFFUSERS, Layout.MODULE))


def test_only_incomplete_sets_are_held_and_one_block_at_most_for_ordered_streams():
    values = state()
    sync = WeightSync(TINY)
    for name, value in values.items():  # the trainer's own order: q, k and v follow each other
        list(sync.push([(f"transformer.{name}", value)]))
        assert len(sync.pending) <= 1
    assert not sync.pending
    shuffled = WeightSync(TINY)
    for part in ("to_q", "to_k", "to_v"):
        names = [name for name in values if f".{part}." in name]
        list(shuffled.push((f"transformer.{name}", values[name]) for name in names))
        held = shuffled.pending
        assert len(held) == (0 if part == "to_v" else TINY.num_layers + TINY.num_refiner_layers)
    list(
        shuffled.push(
            (f"transformer.{n}", v) for n, v in values.items() if "attn.to_" not in n or "to_out" in n
        )
    )
    shuffled.finish()


@pytest.mark.parametrize(
    "wrap",
    [
        "transformer.{}",
        "{}",
        "base_model.model.transformer.{}",
        "_fsdp_wrapped_module.transformer._fsdp_wrapped_module.{}",
        "module._orig_mod.transformer.{}",
        "model.diffusion_model.{}",
    ],
)
def test_wrapper_prefixes_come_off_by_rule(wrap):
    values = state()
    sync = WeightSync(TINY)
    got = collect(sync, [[(wrap.format(name), value) for name, value in values.items()]])
    assert_bits(got, expected(values, Layout.DIFFUSERS, Layout.RELEASE))
    sync.finish()


def test_base_layer_and_inner_fsdp_segments_come_off_and_lora_is_routed():
    values = state()
    named = []
    for name, value in values.items():
        if ".attn.to_q." in name:
            stem = name.removesuffix(".weight")
            named.append((f"transformer._fsdp_wrapped_module.{stem}.base_layer.weight", value))
            named.append((f"transformer.{stem}.lora_A.default.weight", value[:2]))
            named.append((f"transformer.{stem}.lora_B.default.weight", value[:, :2]))
        else:
            named.append((f"transformer.{name}", value))
    sync = WeightSync(TINY)
    got = collect(sync, [named])
    assert_bits(got, expected(values, Layout.DIFFUSERS, Layout.RELEASE))
    sync.finish()
    blocks = TINY.num_layers + TINY.num_refiner_layers
    assert len(sync.lora) == 2 * blocks
    kept = sync.lora["transformer.transformer_blocks.0.attn.to_q.lora_A.default.weight"]
    np.testing.assert_array_equal(
        kept, values["transformer_blocks.0.attn.to_q.weight"][:2]
    )  # not the reused memory


def test_inv_freq_is_emitted_once_with_the_released_bits_and_beside_its_component():
    values = state()
    sync = WeightSync(TINY)
    order = [name for pair in values.items() for name, _ in sync.push([(f"transformer.{pair[0]}", pair[1])])]
    assert order.count("transformer.rope.inv_freq") == 1
    assert order.index("transformer.rope.inv_freq") == 0
    theta, n = TINY.rope_theta, TINY.rope_freq_dim
    wanted = 1.0 / (np.float32(theta) ** (np.arange(0, 2 * n, 2, dtype=np.float32) / np.float32(2 * n)))
    got = dict(WeightSync(TINY).push([("proj_in.bias", values["proj_in.bias"])]))["transformer.rope.inv_freq"]
    assert got.tobytes() == wanted.astype(np.float32).tobytes()
    full = np.frombuffer(H3Config().inv_freq(), "<f4")
    other = np.float32(10000.0) ** (-(np.arange(0, 32, 2, dtype=np.float32) / np.float32(32)))
    assert (full != other).any(), "theta**-x is the peer's formula and differs in some of 16 values"


def test_finish_names_every_missing_and_every_extra_tensor():
    values = state()
    dropped = {"proj_in.bias", "transformer_blocks.1.attn.to_k.weight", "norm_out.norm.weight"}
    sync = WeightSync(TINY)
    bucket = [(f"transformer.{name}", value) for name, value in values.items() if name not in dropped]
    bucket += [("transformer.transformer_blocks.9.norm1.weight", values["norm_out.norm.weight"])]
    bucket += [("vae.decoder.weight", values["norm_out.norm.weight"])]
    list(sync.push(bucket))
    with pytest.raises(IncompleteSyncError) as caught:
        sync.finish()
    for name in (*dropped, "transformer_blocks.9.norm1.weight", "vae.decoder.weight"):
        assert name in str(caught.value)
    assert caught.value.missing == tuple(sorted(f"transformer.{name}" for name in dropped))
    assert caught.value.extra == ("transformer.transformer_blocks.9.norm1.weight", "vae.decoder.weight")


def test_an_incomplete_sync_says_only_what_is_wrong_and_what_to_do():
    """An empty side is left out, a long one is cut and kept whole on the error, an unread push is named."""
    values, late = state(), "proj_in.bias"
    sync = WeightSync(TINY)
    list(sync.push((n, v) for n, v in values.items() if n != late))
    with pytest.raises(IncompleteSyncError) as caught:
        sync.finish()
    assert str(caught.value) == (
        "sync is not the whole model: 1 missing (transformer.proj_in.bias): send them before finish(), or "
        "finish(partial=True)"
    )
    sync.push([(late, values[late])])  # a generator that nobody reads
    with pytest.raises(IncompleteSyncError, match="1 missing"):
        sync.finish()
    list(sync.push([(late, values[late])]))
    sync.finish()
    unread = WeightSync(TINY)
    unread.push(values.items())
    with pytest.raises(IncompleteSyncError) as caught:
        unread.finish()
    assert f"{len(values)} missing (" in str(caught.value)
    assert f"and {len(values) - 6} more): nothing has arrived: push() and push_shards() work while" in str(
        caught.value
    )
    assert "extra" not in str(caught.value)
    assert len(caught.value.missing) == len(values)


@pytest.mark.parametrize(
    ("bucket", "way"),
    [
        ({"proj_in.bias": 0}, "a bucket is dict; .*its .items()"),
        (torch.nn.Linear(1, 1), "a bucket is Linear; .*state_dict"),
    ],
)
def test_what_is_no_bucket_is_refused_and_its_pairs_are_taken(bucket, way):
    for method, others in (("push", ()), ("push_shards", ()), ("load_into", ({},))):
        with pytest.raises(UnsupportedTensorError, match=way):
            list(getattr(WeightSync(TINY), method)(bucket, *others))
    values = state()
    sync = WeightSync(TINY)
    assert len(list(sync.push(values.items()))) == len(sync.finish())


def test_a_half_sent_fused_tensor_is_named_even_in_a_partial_sync():
    values = state()
    name = "transformer_blocks.1.attn.to_{}.weight".format
    for method in ("push", "push_shards"):
        sync = WeightSync(TINY)
        list(getattr(sync, method)([(name("q"), values[name("q")]), (name("v"), values[name("v")])]))
        with pytest.raises(IncompleteSyncError, match=r"blocks\.1\.attn\.qkv_proj\.weight lacks .*to_k"):
            sync.finish(partial=True)
    part = WeightSync(TINY)
    done = dict(part.push((name(p), values[name(p)]) for p in "kqv"))
    assert part.finish(partial=True) == done.keys() == {
        "transformer.blocks.1.attn.qkv_proj.weight", "transformer.rope.inv_freq"
    }  # fmt: skip


def test_tensors_that_are_native_already_are_refused_not_mapped_twice():
    """R07: the half swap moved from trainer to server; both doing it cancels."""
    native = state(Layout.MODULE)
    with pytest.raises(AlreadyConvertedError, match="swaps halves back"):
        list(
            WeightSync(TINY).push(
                [("transformer.blocks.0.mlp.fc1.weight", native["blocks.0.mlp.fc1.weight"])]
            )
        )
    with pytest.raises(AlreadyConvertedError):
        list(
            WeightSync(TINY, source=Layout.MODULE).push(
                [("transformer.transformer_blocks.0.norm1.weight", 0)]
            )
        )


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("transformer.proj_in.bias", np.zeros(TINY.hidden_size + 1, np.float32), ShapeError),
        ("transformer.proj_in.bias", np.zeros(TINY.hidden_size, np.uint16), DtypeError),
        ("transformer.norm_out.norm.weight", np.zeros(TINY.hidden_size, np.float32), DtypeError),
        ("transformer.transformer.norm_out.norm.weight", np.zeros(TINY.hidden_size, np.uint16), MapperError),
    ],
)
def test_wrong_tensors_are_refused_by_kind(name, value, error):
    with pytest.raises(error):
        list(WeightSync(TINY).push([(name, value)]))


def test_a_tensor_sent_twice_and_an_impossible_target_are_refused():
    values = state()
    sync = WeightSync(TINY)
    list(sync.push([("norm_out.norm.weight", values["norm_out.norm.weight"])]))
    with pytest.raises(DuplicateTensorError):
        list(sync.push([("transformer.norm_out.norm.weight", values["norm_out.norm.weight"])]))
    with pytest.raises(LayoutError, match="load_weights cuts by itself"):
        WeightSync(TINY, Layout.RELEASE, tp=2)


def test_fp32_masters_are_rounded_once_only_if_asked_and_fp32_parameters_never_come_as_bf16():
    """UniRL #347: casting H3's fp32 tensors to bf16 is a 40% error near t = 1."""
    name, value = "transformer_blocks.0.ff.net.0.proj.weight", torch.randn(2 * TINY.ffn_dim, TINY.hidden_size)
    with pytest.raises(DtypeError, match="allow it with round_to_bf16"):
        list(WeightSync(TINY).push([(name, value)]))
    sync = WeightSync(TINY, round_to_bf16=True)
    norm = torch.randn(TINY.hidden_size)
    got = dict(sync.push([(name, torch.nn.Parameter(value)), ("norm_out.norm.weight", norm)]))
    swapped = torch.cat(value.chunk(2)[::-1]).to(torch.bfloat16)
    assert torch.equal(got["transformer.blocks.0.mlp.fc1.weight"], swapped)
    assert torch.equal(got["transformer.final_layer.norm.weight"], norm.to(torch.bfloat16))
    assert not any(tensor.requires_grad for tensor in got.values())
    for lossy in (torch.zeros(TINY.hidden_size, dtype=torch.bfloat16), np.zeros(TINY.hidden_size, np.uint16)):
        with pytest.raises(DtypeError, match="F32 and a sync does not cast"):
            list(WeightSync(TINY, round_to_bf16=True).push([("proj_in.bias", lossy)]))
    with pytest.raises(DtypeError):
        list(WeightSync(TINY, round_to_bf16=True).push([("norm_out.norm.weight", norm.numpy())]))


def test_two_partitions_have_separate_accounts_and_others_pass_through():
    fl2va, ref2va = state(seed=1), state(seed=2)
    components = {"transformer": "transformer.", "transformers_ref": "transformers_ref."}
    sync = WeightSync(TINY, components=components, passthrough=("text_encoder",))
    encoder = np.ones(3, np.float32)
    got = collect(
        sync,
        [
            [(f"transformer.{n}", v) for n, v in fl2va.items()],
            [(f"transformers_ref.{n}", v) for n, v in ref2va.items()],
            [("text_encoder.layers.0.weight", encoder)],
        ],
    )
    assert (got.pop("text_encoder.layers.0.weight") == encoder).all()
    first = {name: value for name, value in got.items() if name.startswith("transformer.")}
    assert_bits(first, expected(fl2va, Layout.DIFFUSERS, Layout.RELEASE))
    second = {name: value for name, value in got.items() if name.startswith("transformers_ref.")}
    assert_bits(second, expected(ref2va, Layout.DIFFUSERS, Layout.RELEASE), "transformers_ref.")
    assert sync.finish() == got.keys() | {"text_encoder.layers.0.weight"}
    one = WeightSync(TINY)
    list(one.push([("transformers_ref.norm_out.norm.weight", ref2va["norm_out.norm.weight"])]))
    with pytest.raises(IncompleteSyncError, match=r"1 extra \(transformers_ref"):
        one.finish()


def test_load_into_hands_other_models_tensors_on_too():
    live = {"text_encoder.weight": np.zeros(3, np.float32)}
    sync = WeightSync(TINY, Layout.MODULE, passthrough=("text_encoder",))
    sync.load_into([("text_encoder.weight", np.arange(3, dtype=np.float32))], live)
    assert live["text_encoder.weight"].tolist() == [0, 1, 2]
    assert sync.finish(partial=True) == {"text_encoder.weight"}


def test_a_peft_trainer_s_stream_gives_base_weights_and_the_engine_s_adapter():
    """One stream of an FSDP + PEFT trainer: base_layer weights are synced, lora_ tensors become the engine's update."""
    values = state()
    targets = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")
    stream = []
    for name, value in values.items():
        module = name.removesuffix(".weight")
        if name.endswith(tuple(f".{target}.weight" for target in targets)):
            stem = f"transformer._fsdp_wrapped_module.{module}"
            stream.append((f"{stem}.base_layer.weight", value))
            stream.append((f"{stem}.lora_A.default.weight", np.ones((2, value.shape[1]), np.float32)))
            stream.append((f"{stem}.lora_B.default.weight", np.ones((len(value), 2), np.float32)))
        else:
            stream.append((f"transformer._fsdp_wrapped_module.{name}", value))
    sync = WeightSync(TINY)
    assert_bits(collect(sync, [stream]), expected(values, Layout.DIFFUSERS, Layout.RELEASE))
    sync.finish()
    config = {"r": 2, "lora_alpha": 4, "target_modules": list(targets)}
    mapped, engine = map_lora_update_to_engine(sync.lora, config, TINY)
    assert len(mapped) == 2 * 7 * (TINY.num_layers + TINY.num_refiner_layers)
    assert engine["target_modules"][-3:] == ["fc1_0", "fc1_1", "fc2"]


def test_load_into_names_what_the_engine_lacks_or_shapes_otherwise():
    values = state()
    bucket = [("norm_out.norm.weight", values["norm_out.norm.weight"])]
    with pytest.raises(MissingTensorError, match="pass buffers too"):
        WeightSync(TINY, Layout.MODULE).load_into(bucket, {})
    live = {"transformer.final_layer.norm.weight": np.zeros(0, np.uint16)}
    live["transformer.rope.inv_freq"] = np.zeros(TINY.rope_freq_dim, np.float32)
    with pytest.raises(ShapeError, match=r"the engine holds \[0\]"):
        WeightSync(TINY, Layout.MODULE).load_into(bucket, live)
