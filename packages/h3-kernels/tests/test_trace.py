"""A trace holds enough to name the first node, step and row where two runs part, and nothing that differs otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import graph_tiny as tiny
import pytest
import torch
from h3_kernels.errors import InputError
from h3_kernels.graph import Settings
from h3_kernels.trace import (
    NotComparableError,
    Parallel,
    Recorder,
    divergences,
    fingerprint,
    first_divergence,
    load,
    merge_ranks,
    row_digests,
    save,
    velocity_drift,
)
from h3_kernels.trace.cli import main
from hypothesis import given, settings
from hypothesis import strategies as st

STEPS = 3


def record(label="run", *, module=None, inputs=None, steps=STEPS, plant=None, rows_per_digest=1, **changes):
    """A trace of ``steps`` forwards; ``plant`` = (step, overlay) deviates from that step on."""
    recorder = Recorder(
        label,
        fingerprint=fingerprint(tiny.GRAPH, weights=tiny.weights()),
        rows_per_digest=rows_per_digest,
        parallel=Parallel("tensor", changes["tp"], changes["rank"]) if "tp" in changes else None,
    )
    inputs, module = inputs or tiny.request(), module or tiny.weights()
    recorder.noise(video=inputs.video, audio=inputs.audio)
    recorder.sigmas(video=[1.0, 0.7, 0.3, 0.0])
    for step in range(steps):
        overlay = plant[1] if plant and step >= plant[0] else {}
        video, audio = tiny.run(module, inputs, Settings(tracer=recorder, overlay=overlay, **changes))
        inputs = replace(inputs, video=inputs.video + 0.3 * video)
        recorder.velocity(video=video, audio=audio)
        recorder.latents(video=inputs.video)
    return recorder.trace


def nudge(row):
    """An overlay that changes the last bit of one element of one row of the first output."""

    def replacement(strict, *slots):
        outputs = [t.clone() for t in strict(*slots)]
        first = outputs[0].view(outputs[0].shape[0], -1)
        first[row, 1] = torch.nextafter(first[row, 1].float(), torch.tensor(1e9)).to(first.dtype) * 1.01
        return tuple(outputs)

    return replacement


def double(strict, *slots):
    """An overlay whose effect no later rounding can hide."""
    return tuple(2 * t for t in strict(*slots))


PLANTED = [
    node.name for node in tiny.GRAPH.nodes if node.name.startswith("blocks.1.") and node.rows == "packed"
]


@pytest.mark.parametrize("node", PLANTED)
def test_a_planted_deviation_is_found_where_it_was_planted(node):
    found = first_divergence(record(), record(plant=(1, {node: nudge(7)})))
    assert found is not None
    assert (found.step, found.node, found.row, found.differing) == (1, node, 7, 1)
    assert found.operators[1].startswith("overlay:nudge")


def test_equal_runs_have_no_divergence():
    assert first_divergence(record(), record()) is None


@pytest.mark.parametrize("changes", [{"checkpoint": True}, {"fuse": False}])
def test_how_a_run_is_computed_leaves_no_mark(changes):
    assert first_divergence(record(), record(**changes)) is None


def test_padding_and_piecewise_weights_leave_no_mark():
    found = record(inputs=tiny.padded(tiny.request(), 12), module=tiny.pieces(tiny.weights()))
    assert first_divergence(record(), found) is None


def test_ranks_merge_into_the_trace_of_one_process():
    def work(rank, collective):
        return record(module=tiny.shard(tiny.weights(), 4, rank), tp=4, rank=rank, collective=collective)

    ranks = tiny.on_threads(4, work)
    with pytest.raises(NotComparableError, match=r"rank 0 of 4; call merge_ranks first"):
        first_divergence(record(), ranks[0])
    assert first_divergence(record(), merge_ranks(ranks)) is None
    with pytest.raises(InputError, match=r"ranks 0\.\.3"):
        merge_ranks(ranks[1:])


def test_a_rank_that_differs_in_a_replicated_output_is_named():
    """Negative twin of the merge: one rank's residual stream drifts."""

    def work(rank, collective):
        plant = (0, {"blocks.0.norm1": nudge(2)}) if rank == 1 else None
        return record(
            module=tiny.shard(tiny.weights(), 2, rank), plant=plant, tp=2, rank=rank, collective=collective
        )

    with pytest.raises(InputError, match=r"step 0: blocks\.0\.norm1 h differs between ranks"):
        merge_ranks(tiny.on_threads(2, work))


def test_differences_come_in_the_order_they_were_computed():
    a, b = record(), record(plant=(2, {"blocks.0.mlp.fc2": double}))
    found = list(divergences(a, b))
    assert found[0].node == "blocks.0.mlp.fc2"
    assert [d.node for d in found[-4:-1]] == ["velocity", "velocity", "latents"] or found[
        -1
    ].node == "latents"
    assert {d.step for d in found} == {2}
    drift = velocity_drift(a, b)
    assert drift[0]["video"] == drift[1]["video"] == 0.0 < drift[2]["video"]


def test_noise_and_grids_are_compared_first():
    a, b = record(steps=1), record(steps=1)
    b.noise["video"] = b.noise["video"].clone()
    b.noise["video"][4, 2] += 1
    b.sigmas["video"] = b.sigmas["video"] * 2
    found = list(divergences(a, b))
    assert [(d.step, d.node, d.slot, d.row) for d in found] == [
        (None, "noise", "video", 4),
        (None, "sigmas", "video", 0),
    ]
    assert str(found[0]).startswith("before the first step: noise [video], row 4 first, 1 of 9 differ")


def test_a_shorter_run_differs_at_its_end():
    found = first_divergence(record(), record(steps=2))
    assert found is not None
    assert (found.step, found.node, found.operators) == (2, "steps", ("3 steps", "2 steps"))


def test_rows_that_share_a_digest_are_named_by_their_run():
    a, b = (record(steps=1, plant=p, rows_per_digest=4) for p in (None, (0, {"blocks.0.norm1": nudge(10)})))
    found = first_divergence(a, b)
    assert found is not None
    assert (found.node, found.row) == ("blocks.0.norm1", 8)
    with pytest.raises(NotComparableError, match="4 rows share a digest in 'run', 1 in 'run'"):
        first_divergence(a, record(steps=1))


def test_runs_of_other_weights_or_contracts_are_not_comparable():
    a, b = record(steps=1), record(steps=1)
    other = tiny.weights() | {"blocks.1.norm1.weight": tiny.weights(1)["blocks.1.norm1.weight"]}
    b.fingerprint = fingerprint(tiny.GRAPH, weights=other)
    with pytest.raises(NotComparableError, match=r"differ in weights: blocks\.1$"):
        first_divergence(a, b)
    b.fingerprint = fingerprint(tiny.GRAPH, Settings(contract="h3-parallel-v1-u4"), weights=tiny.weights())
    with pytest.raises(NotComparableError, match=r"differ in contract, nodes$"):
        first_divergence(a, b)


def test_fingerprint_is_json_and_follows_every_weight_and_fact():
    made = fingerprint(tiny.GRAPH, weights=tiny.weights(), variant="FL2VA", video_shift=12.0)
    assert json.loads(json.dumps(made)) == made
    assert made == fingerprint(tiny.GRAPH, weights=tiny.weights(), video_shift=12.0, variant="FL2VA")
    other = tiny.weights()
    other["blocks.1.norm2.weight"][5] *= 1.01
    changed = [
        fingerprint(tiny.GRAPH, weights=other),
        fingerprint(tiny.GRAPH, weights=tiny.weights(), variant="Ref2VA"),
    ]
    assert len({made["id"], *(c["id"] for c in changed)}) == 3


def test_a_fingerprint_names_the_attention_the_environment_asks_for(monkeypatch):
    """Every provider has its own bits, however it was asked for."""
    auto, named = fingerprint(tiny.GRAPH), fingerprint(tiny.GRAPH, Settings(attention="fa3"))
    monkeypatch.setenv("H3_ATTENTION", "fa3")
    assert auto != named
    assert fingerprint(tiny.GRAPH) == named
    assert fingerprint(tiny.GRAPH, Settings(attention="triton"))["attention"] == "triton"


def test_a_trace_survives_the_disk(tmp_path):
    trace = record()
    save(trace, tmp_path / "a")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "a.safetensors"]
    found = load(tmp_path / "a.json")
    assert first_divergence(trace, found) is None
    assert (found.label, found.fingerprint) == (trace.label, trace.fingerprint)
    for mine, theirs in zip(trace.steps, found.steps, strict=True):
        assert list(mine.outputs) == list(theirs.outputs)
        for key, output in mine.outputs.items():
            assert theirs.outputs[key].digest == output.digest
            assert (theirs.outputs[key].requested, theirs.outputs[key].actual) == (
                output.requested,
                output.actual,
            )
        assert mine.latents.keys() == theirs.latents.keys()
    # 8 bytes for a row of an output, and a table of names that does not grow with the steps.
    per_step = sum(o.rows.numel() for o in trace.steps[0].outputs.values()) * 8
    assert (tmp_path / "a.safetensors").stat().st_size < STEPS * (per_step + 8192) + 8192


def test_another_file_is_not_a_trace(tmp_path):
    (tmp_path / "a.json").write_text('{"version": 99}')
    with pytest.raises(InputError, match="not a trace of version 1; it says 99"):
        load(tmp_path / "a")


@pytest.mark.parametrize(
    "damage",
    [
        lambda json_file, data: json_file.write_text("{"),
        lambda json_file, data: json_file.write_text("[]"),
        lambda json_file, data: json_file.write_text('{"version": 1}'),
        lambda json_file, data: json_file.write_text(json_file.read_text().replace('"steps"', '"stops"')),
        lambda json_file, data: json_file.write_bytes(b"\xff\xfe"),
        lambda json_file, data: data.write_bytes(data.read_bytes()[:-8]),
        lambda json_file, data: data.write_bytes(b""),
    ],
)
def test_a_damaged_trace_is_named(tmp_path, capsys, damage):
    save(record(), tmp_path / "a")
    damage(tmp_path / "a.json", tmp_path / "a.safetensors")
    with pytest.raises(InputError, match=r"a\.json: not a trace, or damaged"):
        load(tmp_path / "a")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 2
    assert capsys.readouterr().out.count("\n") == 1


def test_the_command_prints_where_runs_part(tmp_path, capsys):
    save(record("left"), tmp_path / "a")
    save(record("right", plant=(1, {"blocks.1.mlp.act_fn": double})), tmp_path / "b")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "a.json")]) == 0
    assert "equal: every row" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--limit", "3"]) == 1
    printed = capsys.readouterr().out
    assert "first difference: step 1: blocks.1.mlp.act_fn [f], row 0 first, 20 of 20 differ" in printed
    assert "more" in printed
    assert "step 1: largest velocity difference" in printed
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "missing")]) == 2
    assert "missing.json" in capsys.readouterr().out


def test_a_drawing_needs_matplotlib(tmp_path, capsys, monkeypatch):
    save(record("left", steps=1), tmp_path / "a")
    save(record("right", steps=1, plant=(0, {"blocks.1.mlp.act_fn": double})), tmp_path / "b")
    command = ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--plot", str(tmp_path / "share.png")]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match=r"--plot needs matplotlib: pip install 'h3-kernels\[plot\]'"):
        main(command)
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert main(command) == 1
    assert (tmp_path / "share.png").read_bytes().startswith(b"\x89PNG")
    assert "drawn to" in capsys.readouterr().out


def test_the_module_runs_and_reports_by_its_exit_status(tmp_path):
    save(record(steps=1), tmp_path / "a")
    command = [sys.executable, "-m", "h3_kernels.trace", "compare", str(tmp_path / "a"), str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 33), ranks=st.integers(1, 5), seed=st.integers(0, 99))
def test_digests_of_column_slices_add_up(rows, columns, ranks, seed):
    x = torch.randn(rows, columns * ranks, generator=torch.Generator().manual_seed(seed)).bfloat16()
    parts = [row_digests(part, first_column=i * columns) for i, part in enumerate(x.split(columns, dim=1))]
    assert torch.equal(torch.stack(parts).sum(0), row_digests(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_single_bit_changes_a_digest(dtype):
    x = torch.randn(1, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    seen = {int(row_digests(x))}
    for column in range(7):
        for bit in range(x.element_size() * 8):
            changed = x.clone()
            changed.view(whole)[0, column] ^= (
                torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(whole)
            )
            seen.add(int(row_digests(changed)))
    assert len(seen) == 1 + 7 * x.element_size() * 8


def test_a_step_must_begin_before_outputs_are_observed():
    with pytest.raises(InputError, match="no step has begun"):
        Recorder("x").observe("node", "y", torch.zeros(2, 2), rows="packed")


def test_rows_of_nothing_have_digests_and_compare():
    """A clip without audio has streams of no rows; a node may give no columns."""
    assert row_digests(torch.zeros(0, 5)).shape == (0,)
    assert row_digests(torch.zeros(3, 0)).tolist() == [0, 0, 0]
    traces = [Recorder(label) for label in "ab"]
    for recorder in traces:
        recorder.start_step()
        recorder.observe("audio_patch_proj", "audio_rows", torch.zeros(0, 4), rows="audio")
        recorder.velocity(audio=torch.zeros(0, 4))
    a, b = (recorder.trace for recorder in traces)
    assert first_divergence(a, b) is None
    assert velocity_drift(a, b) == [{"audio": 0.0}]
    b.steps[0].velocity["audio"] = torch.zeros(1, 4)
    assert velocity_drift(a, b) == [{}]
    assert first_divergence(a, b) is not None


def test_two_traces_of_nothing_are_not_equal():
    a, b = Recorder("a").trace, Recorder("b").trace
    with pytest.raises(NotComparableError, match="nothing was recorded in both 'a' and 'b'"):
        first_divergence(a, b)


def test_ranks_that_recorded_different_things_do_not_merge():
    traces = [Recorder(f"rank {r}", parallel=Parallel("tensor", 2, r)) for r in range(2)]
    for recorder in traces:
        recorder.start_step()
    traces[1].observe("blocks.0.norm1", "h", torch.zeros(2, 4), rows="packed")
    with pytest.raises(InputError, match=r"step 0: blocks\.0\.norm1 is missing on some ranks"):
        merge_ranks([recorder.trace for recorder in traces])
    traces[1].start_step()
    with pytest.raises(InputError, match=r"recorded \[1, 2\] steps"):
        merge_ranks([recorder.trace for recorder in traces])
    with pytest.raises(InputError, match="no trace given"):
        merge_ranks([])
