"""The layout of a request: read back from a rollout's padded fields, timesteps as both engines assign them,
keys."""

from dataclasses import replace

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3ModularPipeline
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3SetTimestepsStep
from h3_adapter_diffusers import packing
from h3_adapter_diffusers.errors import ReplayError
from h3_adapter_diffusers.packing import PackedSequence, flatten_joint, split_joint
from h3_adapter_diffusers.testing.packings import packings
from h3_adapter_diffusers.training import sigma_grid


def rollout_fields(request, pad=3):
    """What verl-omni's H3 rollout returns for one sample: batched, padded at the end."""
    packed = request.packed

    def padded(tensor):
        return torch.nn.functional.pad(tensor, (*[0, 0] * (tensor.dim() - 1), 0, pad))[None]

    return {
        "h3_seq_len": torch.tensor([len(packed)]),
        "h3_video_rows": torch.tensor([len(packed.video_indices)]),
        "h3_audio_rows": torch.tensor([len(packed.audio_indices)]),
        "h3_position_ids": padded(packed.position_ids),
        "h3_token_tags": padded(packed.token_tags),
        "h3_text_indices": padded(packed.text_indices),
        "h3_video_indices": packed.video_indices[None],
        "h3_audio_indices": packed.audio_indices[None],
        "h3_video_update_mask": packed.video_generated[None],
        "h3_audio_update_mask": packed.audio_generated[None],
    }


@pytest.mark.parametrize("request_", packings(), ids=lambda r: r.name)
def test_a_rollouts_fields_give_the_layout_back(request_):
    read = PackedSequence.from_rollout(rollout_fields(request_))
    assert read.order is None, "the rollout's own layout"
    for name in set(read.__dataclass_fields__) - {"order"}:
        assert torch.equal(getattr(read, name), getattr(request_.packed, name)), name


def test_missing_rollout_fields_are_all_named():
    fields = rollout_fields(packings()[0])
    del fields["h3_token_tags"], fields["h3_seq_len"]
    with pytest.raises(ReplayError, match="lacks h3_seq_len, h3_token_tags"):
        PackedSequence.from_rollout(fields)


def test_a_ref2va_rollout_is_told_how_its_layout_is_built():
    with pytest.raises(ReplayError, match=r"PackedSequence\.from_layout"):
        PackedSequence.from_rollout({"ref_block_meta": torch.zeros(1, 12, 5)})


def test_padding_left_in_is_refused():
    packed = packings()[0].packed
    with pytest.raises(ReplayError, match="strip padding"):
        PackedSequence(
            **{
                **{name: getattr(packed, name) for name in packed.__dataclass_fields__},
                "text_indices": torch.cat((packed.text_indices, torch.tensor([0]))),
            }
        )


@pytest.mark.parametrize("request_", packings(), ids=lambda r: r.name)
@pytest.mark.parametrize(("video_t", "audio_t"), [(0.0, 0.0), (0.25, 0.7), (0.9995, 0.3)])
def test_row_timesteps_equal_diffusers_own(request_, video_t, audio_t):
    packed = request_.packed
    theirs = MiniMaxH3SetTimestepsStep.build_row_timesteps(
        packed.video_indices,
        packed.audio_indices,
        int((~packed.video_generated).sum()),
        int((~packed.audio_generated).sum()),
        len(packed.text_indices),
        video_t,
        audio_t,
        max(video_t, packing.VIDEO_CONDITION_TIMESTEP),
        packing.AUDIO_CONDITION_TIMESTEP,
    )
    for ours, other in zip(packed.row_timesteps(video_t, audio_t), theirs, strict=True):
        assert torch.equal(ours, other)


def test_condition_timesteps_are_upstreams():
    assert MiniMaxH3ModularPipeline.keyframe_noise_aug.fget(None) == packing.VIDEO_CONDITION_TIMESTEP


def test_a_timestep_that_went_through_a_scale_of_1000_is_another_timestep():
    """Why `row_timesteps` takes t and not `sigma * 1000`: the round trip changes bits, hence modulation,
    hence all."""
    sigmas = sigma_grid(41, 12.0)[:-1]
    assert not torch.equal(1.0 - (sigmas * 1000) / 1000, 1.0 - sigmas)


@pytest.mark.parametrize("request_", packings(), ids=lambda r: r.name)
def test_keys_are_unique_and_name_the_row_not_its_place(request_):
    packed = request_.packed
    keys = packed.keys(7, timesteps=3)
    assert len(torch.unique(keys["packed"], dim=0)) == len(packed)
    for stream in ("text", "video", "audio"):
        assert torch.equal(keys["packed"][getattr(packed, f"{stream}_indices")], keys[stream])
    place = torch.randperm(len(packed), generator=torch.Generator().manual_seed(0))
    moved = packed.permuted(place)
    assert torch.equal(moved.keys(7, timesteps=3)["packed"][place], keys["packed"])
    for stream in ("text", "video", "audio", "time"):
        assert torch.equal(moved.keys(7, timesteps=3)[stream], keys[stream])


def test_keys_ascend_in_the_rollouts_layout():
    """Attention reduces in key order under keys, and in packed order in a rollout without: they must be
    one."""
    for request in packings():
        keys = request.packed.keys(0, timesteps=2)["packed"]
        assert torch.equal(keys[:, 2], torch.arange(len(keys)))


def test_an_order_that_is_no_permutation_is_refused():
    packed = packings()[0].packed
    with pytest.raises(ReplayError, match="order must be a permutation"):
        replace(packed, order=torch.zeros(len(packed), dtype=torch.int64))


def test_generated_rows_skip_conditions():
    packed = next(r for r in packings() if r.name == "ref2va").packed
    rows = packed.generated_rows("video")
    assert (rows[~packed.video_generated] == -1).all()
    assert torch.equal(rows[packed.video_generated], torch.arange(int(packed.video_generated.sum())))


def test_joint_latents_round_trip():
    video, audio = torch.randn(5, 96), torch.randn(3, 32)
    read = split_joint(flatten_joint(video, audio), (5, 96), (3, 32))
    assert torch.equal(read[0], video)
    assert torch.equal(read[1], audio)
    with pytest.raises(ReplayError, match="do not hold"):
        split_joint(torch.zeros(10), (5, 96), (3, 32))
