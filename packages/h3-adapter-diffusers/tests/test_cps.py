"""The transition: equal to the scheduler and to verl-omni's formula, and a density that no layout can
change."""

import math

import pytest
import torch
import torch.distributed as dist
from diffusers import MiniMaxH3Scheduler
from h3_adapter_diffusers.cps import joint_log_prob, log_prob, transition, tree_sum
from h3_adapter_diffusers.errors import InputError
from h3_adapter_diffusers.testing.ranks import run_ranks
from h3_adapter_diffusers.training import AUDIO_SHIFT, VIDEO_SHIFT, sigma_grid
from hypothesis import given, settings
from hypothesis import strategies as st


def rows(n=13, c=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, c, generator=generator) for _ in range(3))


def bits(tensor):
    return tensor.detach().contiguous().view(torch.int32)


def same_bits(a, b):
    return torch.equal(bits(a), bits(b))


def verl_omni(sample, velocity, sigma, sigma_next, noise_level, noise):
    """The public formula, with the model output in its convention: the negated velocity."""
    m = -velocity
    std = sigma_next * math.sin(noise_level * math.pi / 2)
    x0 = sample - sigma * m
    estimate = sample + m * (1 - sigma)
    mean = x0 * (1 - sigma_next) + estimate * torch.sqrt(sigma_next**2 - std**2)
    following = mean + std * noise
    return following, mean, (-((following - mean) ** 2)).mean()


@pytest.mark.parametrize("shift", [VIDEO_SHIFT, AUDIO_SHIFT])
@pytest.mark.parametrize("points", [2, 5, 21])
def test_noise_level_zero_is_the_scheduler_step_bit_for_bit(shift, points):
    scheduler = MiniMaxH3Scheduler(shift=shift)
    scheduler.set_timesteps(points)
    sigmas = sigma_grid(points, shift)
    assert same_bits(sigmas, scheduler.sigmas)
    sample, velocity, _ = rows()
    for i, t in enumerate(scheduler.timesteps):
        ours = transition(sample, velocity, sigmas[i], sigmas[i + 1], noise_level=0.0)
        theirs = scheduler.step(velocity, t, sample).prev_sample
        assert same_bits(ours.next_sample, theirs)
        assert ours.log_prob is None
        sample = theirs


def test_a_reassociated_euler_step_is_caught():
    """Negative twin: `x + (sigma - sigma_next) v` is the same step on paper and other bits before the last
    step."""
    sample, velocity, _ = rows()
    sigmas = sigma_grid(6, VIDEO_SHIFT)
    ours = transition(sample, velocity, sigmas[2], sigmas[3], noise_level=0.0).next_sample
    other = sample + (sigmas[2] - sigmas[3]) * velocity
    torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-5)
    assert not same_bits(ours, other)


@pytest.mark.parametrize("noise_level", [0.05, 0.5, 0.8, 1.0])
def test_agrees_with_the_verl_omni_formula(noise_level):
    """Next sample and mean: the same bits. Log-probability: at most 2e-6 relative, the error of torch's fp32
    mean."""
    sample, velocity, noise = rows(n=300, c=96)
    sigmas = sigma_grid(9, AUDIO_SHIFT)
    for i in range(len(sigmas) - 2):
        ours = transition(sample, velocity, sigmas[i], sigmas[i + 1], noise_level=noise_level, noise=noise)
        following, mean, density = verl_omni(sample, velocity, sigmas[i], sigmas[i + 1], noise_level, noise)
        assert same_bits(ours.next_sample, following)
        assert same_bits(ours.mean, mean)
        torch.testing.assert_close(ours.log_prob, density, rtol=2e-6, atol=0)


def test_log_prob_is_the_correctly_rounded_mean():
    following, mean, _ = rows(n=999, c=32)
    exact = -math.fsum(((following - mean).double() ** 2).flatten().tolist()) / following.numel()
    assert float(log_prob(following, mean)) == float(torch.tensor(exact, dtype=torch.float32))


def test_replay_of_a_sampled_step_gives_its_log_prob_bit_for_bit():
    sample, velocity, noise = rows()
    taken = transition(sample, velocity, 0.9, 0.6, noise=noise)
    replayed = transition(sample, velocity, 0.9, 0.6, next_sample=taken.next_sample)
    assert same_bits(taken.log_prob, replayed.log_prob)
    ulp = velocity.clone()
    ulp[4, 2] = torch.nextafter(ulp[4, 2], torch.tensor(10.0))
    changed = transition(sample, ulp, 0.9, 0.6, next_sample=taken.next_sample)
    assert not same_bits(taken.mean, changed.mean)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 40), padding=st.integers(0, 9), seed=st.integers(0, 2**16))
def test_row_order_and_padding_change_no_bit(n, padding, seed):
    """Any permutation of the rows, with any padding rows in between: same density, same gradient on each
    row."""
    generator = torch.Generator().manual_seed(seed)
    following, mean, _ = rows(n=n, c=5, seed=seed)
    mean.requires_grad_()
    reference = log_prob(following, mean)
    (grad,) = torch.autograd.grad(reference, mean)
    place = torch.randperm(n + padding, generator=generator)
    logical = torch.full((n + padding,), -1)
    logical[place[:n]] = torch.arange(n)
    big = torch.randn(2, n + padding, 5, generator=generator) * 1e3
    big[0, place[:n]], big[1, place[:n]] = following, mean.detach()
    moved = big[1].requires_grad_()
    density = log_prob(big[0], moved, rows=logical)
    (moved_grad,) = torch.autograd.grad(density, moved)
    assert same_bits(reference, density)
    assert same_bits(moved_grad[place[:n]], grad)
    assert not moved_grad[place[n:]].any()


def test_torch_mean_is_not_layout_invariant():
    """Negative twin: the same squares, permuted, through torch's own fp32 mean."""
    following, mean, _ = rows(n=4001, c=96)
    squares = (following - mean) ** 6  # a wide range, so that the order shows in fp32
    generator = torch.Generator().manual_seed(5)
    means = {float(squares[torch.randperm(4001, generator=generator)].mean()) for _ in range(8)}
    assert len(means) > 1


def test_tree_sum_adds_neighbours_level_by_level():
    a, b, c, d, e = (torch.tensor(x) for x in (1e8, 1.0, -1e8, 3.0, 0.25))
    assert tree_sum(torch.stack((a, b, c, d, e))) == ((a + b) + (c + d)) + e
    assert float(tree_sum(torch.stack((a, b, c, d, e)))) != float(sum((a, b, c, d, e), torch.tensor(0.0)))


def test_gradient_is_that_of_the_mean_square():
    following, mean, _ = rows()
    mean.requires_grad_()
    (ours,) = torch.autograd.grad(log_prob(following, mean), mean)
    (theirs,) = torch.autograd.grad(-((following - mean) ** 2).mean(), mean)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_condition_rows_are_reinjected_and_excluded():
    sample, velocity, noise = rows()
    logical = torch.cat((torch.full((4,), -1), torch.arange(9)))
    whole = transition(sample, velocity, 0.9, 0.5, noise=noise, rows=logical)
    alone = transition(sample[4:], velocity[4:], 0.9, 0.5, noise=noise[4:])
    assert same_bits(whole.next_sample[:4], sample[:4])
    assert same_bits(whole.next_sample[4:], alone.next_sample)
    assert same_bits(whole.log_prob, alone.log_prob)


def test_joint_weights_are_halves_by_default():
    sample, velocity, noise = rows()
    video = transition(sample, velocity, 0.9, 0.5, noise=noise)
    audio = transition(sample, velocity, 0.8, 0.3, noise=noise)
    assert float(joint_log_prob(video, audio)) == float(0.5 * video.log_prob + 0.5 * audio.log_prob)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sigma": 0.2}, "sigma_next < sigma"),
        ({"noise_level": 1.5}, "noise_level"),
        ({"noise": None}, "exactly one"),
        ({"velocity": torch.zeros(13, 6, dtype=torch.bfloat16)}, "fp32"),
        ({"velocity": torch.zeros(12, 6)}, r"equal \[N, C\]"),
        ({"rows": torch.zeros(13, dtype=torch.int64)}, "repeated or missing"),
        ({"rows": torch.full((13,), -1)}, "no generated row"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    sample, velocity, noise = rows()
    arguments = {"sample": sample, "velocity": velocity, "sigma": 0.9, "sigma_next": 0.5, "noise": noise}
    with pytest.raises(InputError, match=message):
        transition(**{**arguments, **change})


def test_a_deterministic_step_has_no_joint_density():
    sample, velocity, noise = rows()
    video = transition(sample, velocity, 0.9, 0.0, noise=noise)
    with pytest.raises(InputError, match="video transition is deterministic"):
        joint_log_prob(video, video)


def sequence_parallel_rank():
    """This rank's 5 or 8 of 13 rows, two of them conditions: density, and gradient of its velocities."""
    mine = slice(0, 5) if dist.get_rank() == 0 else slice(5, 13)
    sample, velocity, noise = rows()
    logical = torch.cat((torch.full((2,), -1), torch.arange(11)))
    v = velocity[mine].clone().requires_grad_()
    step = transition(
        sample[mine], v, 0.9, 0.5, noise=noise[mine], rows=logical[mine], group=dist.group.WORLD
    )
    step.log_prob.backward()
    return step.log_prob.detach(), v.grad


def test_sequence_parallel_ranks_of_unequal_length_give_the_same_bits():
    parts = run_ranks(sequence_parallel_rank, 2)
    sample, velocity, noise = rows()
    velocity.requires_grad_()
    logical = torch.cat((torch.full((2,), -1), torch.arange(11)))
    step = transition(sample, velocity, 0.9, 0.5, noise=noise, rows=logical)
    step.log_prob.backward()
    assert all(same_bits(density, step.log_prob) for density, _ in parts)
    assert same_bits(torch.cat([grad for _, grad in parts]), velocity.grad)
