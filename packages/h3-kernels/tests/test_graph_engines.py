"""The graph computes what both real engines compute, nearer to fp64 than they do, and the same bits from either one.

T2VA, FL2VA and Ref2VA requests, laid out by each engine's own packing code; over one forward and over a trajectory.
"""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("vllm_omni")
pytest.importorskip("diffusers")

import graph_engines as engines
from h3_kernels.graph import DiTConfig, ModuleWeights, PackedDiT, Settings, diffusers_inputs, vllm_inputs
from h3_kernels.testing import assert_bitwise_equal, count_differing
from h3_kernels.trace import Recorder, first_divergence
from vllm_omni.diffusion.models.minimax_h3.batched_packing import minimax_h3_batched_forward_kwargs

pytestmark = pytest.mark.engine
GRAPH = PackedDiT(DiTConfig.from_mapping(engines.SIZES))
TIMES = (0.7, 0.31)
TASKS = {task.__name__: task for task in (engines.t2va, engines.fl2va, engines.ref2va)}


@pytest.fixture(scope="module")
def diffusers_model():
    return engines.diffusers_model()


@pytest.fixture(scope="module")
def vllm_model(diffusers_model):
    with engines.vllm_model(diffusers_model.state_dict()) as model:
        yield model


@pytest.fixture(scope="module")
def views(diffusers_model, vllm_model):
    """Each engine's own tensors, as the graph reads them."""
    return {
        "diffusers": ModuleWeights(engines.graph_names(diffusers_model.state_dict())),
        "vllm": ModuleWeights(vllm_model.state_dict()),
    }


@pytest.fixture(scope="module", params=TASKS)
def task(request):
    return TASKS[request.param]()


def from_engine(name, task, model, video, audio):
    """Velocities of the stock engine, condition rows included."""
    with torch.no_grad():
        if name == "diffusers":
            output = model(**task.diffusers(video, audio, *TIMES))
            return output.sample[0], output.audio_sample[0]
        return model(**{**task.vllm(video, audio, *TIMES), "skip_mask_out_condition": True})


def packed(name, task, video, audio, times=TIMES):
    if name == "diffusers":
        return diffusers_inputs(task.diffusers(video, audio, *times))
    return vllm_inputs(task.vllm(video, audio, *times))


def strict(name, task, views, video, audio, times=TIMES, settings=None):
    with torch.no_grad():
        return GRAPH.run(views[name], packed(name, task, video, audio, times), settings)


def in_float64(model, task, video, audio):
    wide = copy.deepcopy(model).double()
    wide.rope.inv_freq = model.rope.inv_freq.double()
    inputs = task.diffusers(video, audio, *TIMES)
    inputs = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    with torch.no_grad():
        output = wide(**inputs)
    return output.sample[0], output.audio_sample[0]


def test_error_to_fp64_is_not_above_either_engines(task, diffusers_model, vllm_model, views):
    noise = task.noise()
    truth = in_float64(diffusers_model, task, *noise)

    def error(found):
        return torch.tensor(
            [((f.double() - t).norm() / t.norm()).item() for f, t in zip(found, truth, strict=True)]
        )

    ours = error(strict("diffusers", task, views, *noise))
    theirs = {
        "diffusers": error(from_engine("diffusers", task, diffusers_model, *noise)),
        "vllm": error(from_engine("vllm", task, vllm_model, *noise)),
    }
    assert (ours < 0.01).all()
    for name, other in theirs.items():
        assert (ours.mean() <= 1.05 * other.mean()).item(), f"{name}: ours {ours}, theirs {other}"


def test_both_engines_give_the_same_bits(task, views):
    noise = task.noise()
    found = [strict(name, task, views, *noise) for name in views]
    for stream, a, b in zip(("video", "audio"), *found, strict=True):
        assert_bitwise_equal(a, b, f"{task.name} {stream}")


def test_a_diffusers_batch_is_its_items(task, views):
    """Diffusers' batch axis replicates one layout; the graph packs the items as documents."""
    noise = task.noise()
    kwargs = task.diffusers(*noise, *TIMES)
    batch = {n: torch.cat([t, t.flip(1)]) if n.endswith("hidden_states") else t for n, t in kwargs.items()}
    with torch.no_grad():
        video, audio = GRAPH.run(views["diffusers"], diffusers_inputs(batch))
    for stream, a, b in zip(
        ("video", "audio"), (video, audio), strict("vllm", task, views, *noise), strict=True
    ):
        assert_bitwise_equal(a[: len(b)], b, f"{task.name} {stream}")
        assert count_differing(a[len(b) :], b) > 0


def test_requests_batched_by_vllm_are_themselves(task, views):
    """vLLM-Omni's own batched packing of three requests, each padded, at noise levels of their own."""
    others = [engines.t2va(), engines.ref2va()]
    tasks = [others[0], task, others[1]]
    times = [(0.2, 0.1), TIMES, (0.9, 0.8)]
    noise = [t.noise() for t in tasks]
    kwargs = minimax_h3_batched_forward_kwargs(
        branches=[t.branch for t in tasks],
        video_rows=[video for video, _ in noise],
        audio_rows=[audio for _, audio in noise],
        t_video=[video for video, _ in times],
        t_audio=[audio for _, audio in times],
        imgvid_cond_timesteps=[max(video, engines.CONDITION_TIMES["video"]) for video, _ in times],
        audio_ref_cond_timesteps=[engines.CONDITION_TIMES["audio"]] * 3,
    )
    with torch.no_grad():
        found = GRAPH.run(views["vllm"], vllm_inputs(kwargs))
    for which, t in enumerate(tasks):
        alone = strict("diffusers", t, views, *noise[which], times[which])
        for stream, whole, rows, b in zip(
            ("video", "audio"), found, zip(*noise, strict=True), alone, strict=True
        ):
            start = sum(len(r) for r in rows[:which])
            assert_bitwise_equal(whole[start : start + len(b)], b, f"request {which} {stream}")


def test_the_stock_engines_do_not(task, diffusers_model, vllm_model):
    """Negative twin: the same comparison on what the engines compute by themselves, padding included, fails."""
    noise = task.noise()
    a = from_engine("diffusers", task, diffusers_model, *noise)
    b = from_engine("vllm", task, vllm_model, *noise)
    assert sum(count_differing(x, y) for x, y in zip(a, b, strict=True)) > 0


def shifted(shift, steps):
    sigma = torch.linspace(1, 0, steps, dtype=torch.float32)
    return shift * sigma / (1 + (shift - 1) * sigma)


def trajectory(name, task, views):
    """Rectified-flow Euler over both streams, condition rows pinned; a trace of it."""
    streams = list(task.noise())
    generated = (task.video_generated, task.audio_generated)
    grids = (shifted(12.0, 4), shifted(3.0, 4))
    recorder = Recorder(name)
    recorder.noise(video=streams[0], audio=streams[1])
    recorder.sigmas(video=grids[0], audio=grids[1])
    for step in range(len(grids[0]) - 1):
        times = [float(1 - grid[step]) for grid in grids]
        velocity = strict(name, task, views, *streams, times, Settings(tracer=recorder))
        for i, (grid, rows) in enumerate(zip(grids, generated, strict=True)):
            ratio = grid[step + 1] / grid[step]
            clean = streams[i] + grid[step] * velocity[i]
            streams[i] = torch.where(rows[:, None], ratio * streams[i] + (1 - ratio) * clean, streams[i])
        recorder.velocity(video=velocity[0], audio=velocity[1])
        recorder.latents(video=streams[0], audio=streams[1])
    return recorder.trace


def test_both_engines_leave_one_trace_of_a_trajectory(task, views):
    a, b = (trajectory(name, task, views) for name in views)
    assert len(a.steps) == 3
    assert a.steps[0].outputs.keys() == b.steps[0].outputs.keys()
    assert len(a.steps[0].outputs) > len(GRAPH.nodes) - 5
    assert first_divergence(a, b) is None
