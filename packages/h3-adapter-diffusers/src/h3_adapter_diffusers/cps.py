"""The stochastic transition of the H3 sampler and its layout-invariant log-probability.

Coefficients-preserving sampling (CPS) is what verl-omni's FlowGRPO samples MiniMax-H3 with
(`flow_match_sde.py`, `sde_type="cps"`): with a data-ward velocity `v` and `t = 1 - sigma`,

    x0    = x + sigma * v                     (predicted clean sample)
    noise = x - (1 - sigma) * v               (predicted noise)
    std   = sigma_next * sin(noise_level * pi / 2)
    mean  = x0 * (1 - sigma_next) + noise * sqrt(sigma_next^2 - std^2)
    next  = mean + std * eps
    log_prob = -mean over generated elements of (next - mean)^2

all in fp32, every operation rounded on its own. When `std` is zero there is nothing random and no density, so
the transition is the sampler's own Euler step (Diffusers `MiniMaxH3Scheduler.step`, same operations in the
same order, same bits) and `log_prob` is None.

The mean is where layouts leak into bits: torch reduces in an order that depends on shape and device. Here the
squares are exact in fp64, channels of a row and then rows in ascending logical index are added by one fixed
pairwise tree in fp64, and the result is rounded once to fp32. Row order, padding, batching and
sequence-parallel degree change nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from h3_adapter_diffusers.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NOISE_LEVEL = 0.8
"""Default of verl-omni's H3 FlowGRPO rollout."""
STREAM_WEIGHTS = (0.5, 0.5)
"""Weights of the video and the audio log-probability in the joint one (verl-omni, H3 FlowGRPO)."""


@dataclass(frozen=True)
class Transition:
    """One sampler step of one stream (video or audio rows).

    `next_sample` and `mean` are `[N, C]` fp32 in the row order of the input; excluded rows hold the input
    sample. `std` is a 0-d fp32 CPU tensor. `log_prob` is a 0-d fp32 tensor, or None when the step is
    deterministic.
    """

    next_sample: Tensor
    mean: Tensor
    std: Tensor
    log_prob: Tensor | None


def transition(
    sample: Tensor,
    velocity: Tensor,
    sigma: float | Tensor,
    sigma_next: float | Tensor,
    *,
    noise_level: float = NOISE_LEVEL,
    noise: Tensor | None = None,
    next_sample: Tensor | None = None,
    rows: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> Transition:
    """Take (`noise`) or replay (`next_sample`) one transition of the rows of one stream.

    `sample`, `velocity`, `noise` and `next_sample` are `[N, C]`; `sample`, `noise` and `next_sample` fp32,
    `velocity` fp32 and data-ward (what H3 predicts). `sigma` and `sigma_next` are the noise levels before and
    after the step, `0 <= sigma_next < sigma <= 1`. `rows` is `[N]` int64, the logical index of each row
    within its stream; a negative index excludes the row (condition or padding): it is re-injected unchanged
    and takes no part in the density. None means rows arrive in order and all are generated. With `group`, the
    density runs over the rows of all ranks.

    Raises InputError when shapes, dtypes, sigmas or `rows` do not fit, or when neither or both of `noise` and
    `next_sample` are given for a stochastic step.
    """
    s, s_next = _scalar(sigma), _scalar(sigma_next)
    _check(sample, velocity, s, s_next, noise_level)
    std = s_next * math.sin(noise_level * math.pi / 2)
    if float(std) == 0.0:
        following = _keep_excluded(_euler(sample, velocity, s, s_next), sample, rows)
        return Transition(following, following, std, None)
    mean = _cps_mean(sample, velocity, s, s_next, std)
    following = _following(mean, std, noise, next_sample)
    following = _keep_excluded(following, sample, rows)
    return Transition(
        following, _keep_excluded(mean, sample, rows), std, log_prob(following, mean, rows=rows, group=group)
    )


def joint_log_prob(
    video: Transition, audio: Transition, *, weights: tuple[float, float] = STREAM_WEIGHTS
) -> Tensor:
    """`weights[0] * video + weights[1] * audio` as a 0-d fp32 tensor.

    Raises InputError when either transition is deterministic: there is no density to combine.
    """
    if video.log_prob is None or audio.log_prob is None:
        name = "video" if video.log_prob is None else "audio"
        raise InputError(
            f"{name} transition is deterministic (std 0) and has no log-probability; leave the terminal step"
            " and noise_level 0 out of the training window"
        )
    return weights[0] * video.log_prob + weights[1] * audio.log_prob


def log_prob(
    next_sample: Tensor, mean: Tensor, *, rows: Tensor | None = None, group: ProcessGroup | None = None
) -> Tensor:
    """`-mean((next_sample - mean)^2)` over the generated rows, 0-d fp32, in the fixed order of this module.

    `next_sample` and `mean` are `[N, C]` fp32, `rows` and `group` as in `transition`. Differentiable in
    `mean` only: each element receives `2 * (next - mean) / count`, which depends on no other element. Raises
    InputError when no row is generated, when a logical index repeats, or when one is missing from `0 .. count
    - 1`.
    """
    if next_sample.shape != mean.shape or mean.dim() != 2:
        raise InputError(
            f"next_sample {tuple(next_sample.shape)} and mean {tuple(mean.shape)} must be equal [N, C] shapes"
        )
    if rows is None:
        rows = torch.arange(mean.shape[0], device=mean.device)
    elif rows.shape != mean.shape[:1] or rows.dtype != torch.int64:
        raise InputError(f"rows must be int64 [{mean.shape[0]}], got {rows.dtype} {tuple(rows.shape)}")
    result: Tensor = _LogProb.apply(mean, next_sample.detach(), rows, group)  # type: ignore[no-untyped-call]
    return result


def tree_sum(values: Tensor) -> Tensor:
    """Sum over the first dimension by the fixed pairwise tree: neighbours `2i` and `2i + 1` are added, level
    by level.

    A level of odd length is extended by +0.0. The order depends on the length alone.
    """
    while values.shape[0] > 1:
        if values.shape[0] % 2:
            values = torch.cat((values, values.new_zeros((1, *values.shape[1:]))))
        values = values[0::2] + values[1::2]
    return values[0]


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, next_sample: Tensor, rows: Tensor, group: ProcessGroup | None
    ) -> Tensor:
        difference = next_sample - mean
        active = rows >= 0
        sums = tree_sum(difference[active].double().square().t().contiguous())
        index = rows[active]
        if group is not None:
            sums, index = _gather_rows(sums, index, group)
        order = _logical_order(index)
        count = index.shape[0] * mean.shape[1]
        ctx.save_for_backward(difference, active)
        ctx.count = count
        return (-(tree_sum(sums[order]) / count)).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        difference, active = ctx.saved_tensors
        scale = grad * (2.0 / ctx.count)
        return (
            torch.where(active[:, None], difference * scale, torch.zeros_like(difference)),
            None,
            None,
            None,
        )


def _logical_order(index: Tensor) -> Tensor:
    if index.shape[0] == 0:
        raise InputError("no generated row: every logical index is negative, so the mean is empty")
    ordered, order = torch.sort(index, stable=True)
    expected = torch.arange(index.shape[0], device=index.device)
    if not torch.equal(ordered, expected):
        wrong = int((ordered != expected).nonzero()[0])
        raise InputError(
            f"logical rows must be a permutation of 0..{index.shape[0] - 1}; sorted position {wrong} holds"
            f" {int(ordered[wrong])} (repeated or missing row)"
        )
    return order


def _gather_rows(sums: Tensor, index: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """All ranks' row sums and indices. Ranks may hold different counts; only copies are communicated."""
    import torch.distributed as dist

    world = dist.get_world_size(group)
    count = torch.tensor([sums.shape[0]], device=sums.device)
    counts = [torch.empty_like(count) for _ in range(world)]
    dist.all_gather(counts, count, group=group)
    longest = max(int(c) for c in counts)
    padded_sums, padded_index = sums.new_zeros(longest), index.new_full((longest,), -1)
    padded_sums[: sums.shape[0]], padded_index[: index.shape[0]] = sums, index
    all_sums = [torch.empty_like(padded_sums) for _ in range(world)]
    all_index = [torch.empty_like(padded_index) for _ in range(world)]
    dist.all_gather(all_sums, padded_sums, group=group)
    dist.all_gather(all_index, padded_index, group=group)
    gathered = torch.cat(all_index)
    return torch.cat(all_sums)[gathered >= 0], gathered[gathered >= 0]


def _scalar(value: float | Tensor) -> Tensor:
    """0-d fp32 on the CPU: torch takes it as a scalar on any device, and its bits cannot depend on the
    device."""
    return torch.as_tensor(value, dtype=torch.float32, device="cpu").reshape(())


def _check(sample: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, noise_level: float) -> None:
    if sample.dim() != 2 or sample.shape != velocity.shape:
        raise InputError(
            f"sample {tuple(sample.shape)} and velocity {tuple(velocity.shape)} must be equal [N, C] shapes"
        )
    if sample.dtype != torch.float32 or velocity.dtype != torch.float32:
        raise InputError(
            f"the transition is fp32; got sample {sample.dtype}, velocity {velocity.dtype}; near t = 1 a bf16"
            " value has a spacing of 0.008, more than most steps"
        )
    if not 0.0 <= float(sigma_next) < float(sigma) <= 1.0:
        raise InputError(
            f"need 0 <= sigma_next < sigma <= 1, got sigma {float(sigma)}, sigma_next {float(sigma_next)}"
        )
    if not 0.0 <= noise_level <= 1.0:
        raise InputError(f"noise_level must lie in [0, 1], got {noise_level}")


def _euler(sample: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """The scheduler's blend. It recovers the sigma of x0 from the timestep, and the round trip is not exact
    below 0.5."""
    denoised = sample + (1 - (1.0 - sigma)) * velocity
    ratio = sigma_next / sigma
    return ratio * sample + (1.0 - ratio) * denoised


def _cps_mean(sample: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, std: Tensor) -> Tensor:
    clean = sample + sigma * velocity
    noise = sample - velocity * (1 - sigma)
    return clean * (1 - sigma_next) + noise * torch.sqrt(sigma_next**2 - std**2)


def _following(mean: Tensor, std: Tensor, noise: Tensor | None, next_sample: Tensor | None) -> Tensor:
    given = [t for t in (noise, next_sample) if t is not None]
    if len(given) != 1:
        raise InputError(
            "a stochastic step needs exactly one of noise (to sample) and next_sample (to replay),"
            f" got {len(given)}"
        )
    if given[0].shape != mean.shape or given[0].dtype != torch.float32:
        raise InputError(
            f"noise or next_sample must be fp32 {tuple(mean.shape)},"
            f" got {given[0].dtype} {tuple(given[0].shape)}"
        )
    return given[0] if noise is None else (mean + std * noise).detach()


def _keep_excluded(value: Tensor, sample: Tensor, rows: Tensor | None) -> Tensor:
    return value if rows is None else torch.where((rows >= 0)[:, None], value, sample)
