"""Replay of a rollout on the trainer's model: the velocity, the transition and its log-probability.

The rollout engine recorded which rows it denoised, at which sigmas, and what it sampled. Replay packs the
same rows, asks the Diffusers model for the velocity and evaluates the recorded transition. With both engines
bound to the contracts and holding the same weights, the log-probability equals the rollout's bit for bit;
`Replay.difference` is then exactly 0, and a policy ratio of 1 means 1.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from h3_adapter_diffusers.cps import NOISE_LEVEL, STREAM_WEIGHTS, Transition, joint_log_prob, transition
from h3_adapter_diffusers.errors import ReplayError
from h3_adapter_diffusers.packing import PackedSequence

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from h3_adapter_diffusers.install import Handle

VIDEO_SHIFT, AUDIO_SHIFT = 12.0, 3.0
"""Sigma shifts of the released checkpoints (Diffusers `MiniMaxH3Scheduler`, vLLM-Omni
`pipeline_minimax_h3`)."""


@dataclass(frozen=True)
class Step:
    """One recorded step of one request.

    `video` [Nv, C] and `audio` [Na, A] are all rows of the streams before the step, condition rows included,
    fp32; `next_video` and `next_audio` what the rollout sampled (condition rows are ignored); `sigma` and
    `sigma_next` the levels of the video schedule, `audio_sigma` and `audio_sigma_next` those of the audio
    schedule.
    """

    video: Tensor
    audio: Tensor
    next_video: Tensor
    next_audio: Tensor
    sigma: float | Tensor
    sigma_next: float | Tensor
    audio_sigma: float | Tensor
    audio_sigma_next: float | Tensor
    noise_level: float = NOISE_LEVEL


@dataclass(frozen=True)
class Replay:
    """What the trainer computed for one `Step`: velocities (fp32, data-ward), transitions, joint
    log-probability."""

    video_velocity: Tensor
    audio_velocity: Tensor
    video: Transition
    audio: Transition
    log_prob: Tensor

    def difference(self, rollout_log_prob: float | Tensor) -> float:
        """Trainer's minus rollout's log-probability; exactly 0.0 when both computed the same bits."""
        return float(self.log_prob.detach()) - float(torch.as_tensor(rollout_log_prob, dtype=torch.float32))


def sigma_grid(points: int, shift: float) -> Tensor:
    """The sampler's noise levels, descending from 1 to 0: [<= points] fp32 on the CPU.

    `shift * s / (1 + (shift - 1) * s)` over `linspace(1, 0, points)`, neighbours that collide in fp32
    collapsed (Diffusers `MiniMaxH3Scheduler.set_timesteps`; a test compares the bits). Raises ReplayError if
    points < 2.
    """
    if points < 2:
        raise ReplayError(f"a schedule needs at least 2 points (start and clean), got {points}")
    base = torch.linspace(1.0, 0.0, points, dtype=torch.float32)
    grid: Tensor = torch.unique_consecutive(shift * base / (1 + (shift - 1) * base))
    return grid


def velocity(
    model: nn.Module,
    packed: PackedSequence,
    video: Tensor,
    audio: Tensor,
    text: Tensor,
    video_t: float | Tensor,
    audio_t: float | Tensor,
    *,
    handle: Handle | None = None,
    sample_id: int = 0,
) -> tuple[Tensor, Tensor]:
    """Video [Nv, C] and audio [Na, A] velocities, fp32 and data-ward, of one packed request.

    `video` [Nv, C], `audio` [Na, A] and `text` [Nt, E] are the rows of the streams in the order of `packed`'s
    indices; `video_t`, `audio_t` are `1 - sigma` of the generated rows. With `handle`, the rows carry logical
    keys of `sample_id` (see `PackedSequence.keys`), so gradients do not depend on how samples are batched.
    Raises ReplayError when the rows do not fit the layout.
    """
    for name, rows in (("video", video), ("audio", audio), ("text", text)):
        expected = len(getattr(packed, f"{name}_indices"))
        if rows.dim() != 2 or rows.shape[0] != expected:
            raise ReplayError(
                f"{name} rows must be [{expected}, channels] for this layout, got {tuple(rows.shape)}"
            )
    arguments = packed.arguments(video_t, audio_t, video.device)
    keyed = (
        nullcontext() if handle is None else handle.rows(packed.keys(sample_id, len(arguments["timestep"])))
    )
    with keyed:
        video_out, audio_out = model(
            hidden_states=video[None],
            audio_hidden_states=audio[None],
            encoder_hidden_states=text[None],
            **arguments,
            return_dict=False,
        )
    return video_out[0].float(), audio_out[0].float()


def replay(
    model: nn.Module,
    packed: PackedSequence,
    text: Tensor,
    step: Step,
    *,
    handle: Handle | None = None,
    sample_id: int = 0,
    weights: tuple[float, float] = STREAM_WEIGHTS,
    group: ProcessGroup | None = None,
) -> Replay:
    """Evaluate one recorded step on `model`, differentiably.

    `text` is [Nt, E]. `group` is the sequence-parallel group whose ranks hold disjoint rows, if any. Raises
    InputError or ReplayError when the record does not fit, and for a deterministic step (it has no density).
    """
    t_video = 1.0 - torch.as_tensor(step.sigma, dtype=torch.float32)
    t_audio = 1.0 - torch.as_tensor(step.audio_sigma, dtype=torch.float32)
    v_video, v_audio = velocity(
        model, packed, step.video, step.audio, text, t_video, t_audio, handle=handle, sample_id=sample_id
    )
    moves = (
        (step.video, v_video, step.sigma, step.sigma_next, step.next_video, "video"),
        (step.audio, v_audio, step.audio_sigma, step.audio_sigma_next, step.next_audio, "audio"),
    )
    video, audio = (
        transition(
            sample,
            v,
            sigma,
            sigma_next,
            noise_level=step.noise_level,
            next_sample=following,
            rows=packed.generated_rows(stream).to(sample.device),
            group=group,
        )
        for sample, v, sigma, sigma_next, following, stream in moves
    )
    return Replay(v_video, v_audio, video, audio, joint_log_prob(video, audio, weights=weights))
