"""The sync against the real engine: vLLM-Omni's load_weights and weight_loader on CPU, at tp 1 and 2."""

import pytest
import torch
from h3_mapper import H3Config
from h3_mapper.plan import plan, tensors
from h3_mapper.spec import Layout
from h3_mapper.sync_proof import DifferentWeightsError, LiveDigest, assert_same, combine
from h3_mapper.tp import shard
from sync_engines import pipeline_worker, run_ranks, sync_worker, trainer_state

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("h3-mapper-engines")]

CONFIG = H3Config(
    num_attention_heads=4,
    attention_head_dim=16,
    hidden_size=48,
    num_layers=2,
    num_refiner_layers=1,
    ffn_dim=64,
    in_channels=4,
    audio_in_channels=6,
    text_dim=40,
    freq_dim=16,
    time_embed_hidden_dim=56,
    time_embed_dim=24,
    rope_freq_dim=2,
)


@pytest.fixture(scope="module", params=[1, 2])
def reports(request):
    return request.param, run_ranks(request.param, sync_worker, CONFIG)


def expected(tp, rank, seed=0):
    source = trainer_state(CONFIG, seed)
    made = {}
    for target in shard(plan(CONFIG, Layout.DIFFUSERS, Layout.MODULE), tp, rank).targets:
        if target.data is not None:
            made[target.name] = torch.frombuffer(bytearray(target.data), dtype=torch.float32)
            continue
        rows = torch.cat([source[block.name][block.start : block.stop] for block in target.rows])
        made[target.name] = rows[:, slice(*target.columns)] if target.columns else rows
    return made


@pytest.mark.parametrize("way", ["load_weights", "weight_loader", "load_into"])
def test_engine_holds_the_trainer_s_bits_whichever_way_they_came(reports, way):
    tp, ranks = reports
    for rank, report in enumerate(ranks):
        wanted, found = expected(tp, rank), report[way]["state"]
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name].view(torch.uint8), value.contiguous().view(torch.uint8)), name


def test_returned_names_are_exactly_the_engine_s(reports):
    """R02: a loader that reports source names fails the strict check of a good load."""
    for report in reports[1]:
        for way, found in report.items():
            assert found["finished"] == found["expected_names"], way
        assert report["load_weights"]["returned"] == report["load_weights"]["expected_names"]


def test_digests_of_the_engine_equal_the_trainer_s_and_one_ulp_is_named(reports):
    tp, ranks = reports
    trainer = LiveDigest(CONFIG, Layout.DIFFUSERS)
    for name, value in trainer_state(CONFIG).items():
        trainer.add(name, value)
    truth = combine(CONFIG, [trainer.partials()])
    for way in ranks[0]:
        assert_same(truth, combine(CONFIG, [report[way]["partials"] for report in ranks]))
    spoiled = []
    for rank, report in enumerate(ranks):
        digest = LiveDigest(CONFIG, Layout.MODULE, tp=tp, rank=rank)
        for name, value in report["load_weights"]["state"].items():
            changed = value.clone()
            if name == "blocks.1.mlp.fc2.weight" and rank == tp - 1:
                changed.view(torch.int16)[3, 5] += 1
            digest.add(name, changed)
        spoiled.append(digest.partials())
    with pytest.raises(DifferentWeightsError, match=r"^blocks\.1\.mlp\.fc2\.weight: .*1 of"):
        assert_same(truth, combine(CONFIG, spoiled))


def test_pipeline_takes_both_partitions_in_one_stream_with_dropped_memory_used_again():
    """verl-omni's entry: prefix groups must be contiguous, and the returned set is the strict loader's."""
    (report,) = run_ranks(1, pipeline_worker, CONFIG)
    assert report["returned"] == report["finished"]
    assert len(report["finished"]) == 2 * len(tensors(CONFIG, Layout.MODULE))
    for seed, found in enumerate(report["states"]):
        for name, value in expected(1, 0, seed).items():
            assert torch.equal(found[name], value), (seed, name)


def test_the_inventory_of_the_released_model():
    """638 trainer tensors; 534 parameters and one buffer in the engine (verl-omni #396)."""
    assert len(tensors(H3Config(), Layout.DIFFUSERS)) == 638
    assert len(tensors(H3Config(), Layout.MODULE)) == 535
