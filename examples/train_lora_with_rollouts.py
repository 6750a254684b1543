"""Train by policy gradient: rollouts from vLLM-Omni, gradients in Diffusers, tiny random weights, on a CPU.

    python -W ignore examples/train_lora_with_rollouts.py           # a LoRA
    python -W ignore examples/train_lora_with_rollouts.py --full    # every parameter

Each step samples a group of trajectories with the rollout engine, scores them, replays every recorded
transition in the trainer and takes one optimizer step. The policy ratio is exp(train - rollout
log-probability): before the step it ought to be exactly 1. It is with the adapters installed in both engines,
and is not without them.
"""

import logging
import sys
from dataclasses import replace

import torch
from h3_adapter_diffusers.cps import joint_log_prob, transition
from h3_adapter_diffusers.install import install_h3_training
from h3_adapter_diffusers.testing.native import engine_lora, native_adapters, native_inputs
from h3_adapter_diffusers.testing.packings import fl2va
from h3_adapter_diffusers.testing.tiny import build
from h3_adapter_diffusers.training import AUDIO_SHIFT, VIDEO_SHIFT, Step, replay, sigma_grid
from h3_adapter_diffusers.weights import base_state
from h3_adapter_vllm import install_h3_rollout, load_h3_weights
from h3_adapter_vllm.testing import engine
from h3_mapper.apply import diffusers_to_native
from peft import LoraConfig

STEPS, GROUP, RANK, PADDING = 4, 3, 8, 13
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]
SIGMAS = sigma_grid(5, VIDEO_SHIFT), sigma_grid(5, AUDIO_SHIFT)


def trainer(full):
    """Diffusers' model, all of it trained, or a LoRA with fp32 masters."""
    model = build().requires_grad_(full).train()
    if full:
        return model
    torch.manual_seed(0)
    model.add_adapter(
        LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, init_lora_weights=False)
    )
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        parameter.data = parameter.data.float()
    return model


def rollout_engine(model):
    """vLLM-Omni's model with the trainer's weights."""
    rollout = engine.build()
    state = diffusers_to_native(base_state(model), layout="release", config=dict(model.config))
    rollout.load_weights(state.items())
    return rollout


def sync(model, rollout, full):
    """The trainer's weights of this step into the engine."""
    if full:
        load_h3_weights(rollout, base_state(model).items(), layout="diffusers")
    else:
        engine_lora(rollout, native_adapters(model), rank=RANK)


def sample(rollout, request, generator):
    """One trajectory: its recorded steps with the rollout's log-probabilities, and the last latents."""
    recorded = []
    for i in range(len(SIGMAS[0]) - 2):  # the terminal step is deterministic and has no density
        (s, s_next), (a, a_next) = (grid[i : i + 2] for grid in SIGMAS)
        with torch.no_grad():
            inputs = native_inputs([request], video_t=float(1 - s), audio_t=float(1 - a), padding=PADDING)
            video_v, audio_v = rollout(**inputs)
        moves = []
        for name, x, v, levels in (
            ("video", request.video, video_v, (s, s_next)),
            ("audio", request.audio, audio_v, (a, a_next)),
        ):
            noise, rows = torch.randn(x.shape, generator=generator), request.packed.generated_rows(name)
            moves.append(transition(x, v, *levels, noise=noise, rows=rows))
        following = [move.next_sample for move in moves]
        step = Step(request.video, request.audio, *following, s, s_next, a, a_next)
        recorded.append((step, joint_log_prob(*moves)))
        request = replace(request, video=following[0], audio=following[1])
    return recorded, request


def train(adapters, full=False):
    model, request = trainer(full), fl2va()
    rollout = rollout_engine(model)
    handle = install_h3_training(model) if adapters else None
    if adapters:
        install_h3_rollout(rollout)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        sync(model, rollout, full)
        group = [sample(rollout, request, generator) for _ in range(GROUP)]
        rewards = torch.stack([-last.video.square().mean() for _, last in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        largest = 0.0
        for i, ((recorded, _), advantage) in enumerate(zip(group, advantages, strict=True)):
            for j, (step, log_prob) in enumerate(recorded):
                result = replay(
                    model, request.packed, request.text, step, handle=handle, sample_id=i * len(recorded) + j
                )
                (-advantage * torch.exp(result.log_prob - log_prob)).backward()
                largest = max(largest, abs(result.difference(log_prob)))
        optimizer.step()
        optimizer.zero_grad()
        print(f"  step {number}: reward {rewards.mean():.4f}, train/rollout log-prob difference: {largest:g}")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with engine.engine():
        for adapters in (True, False):
            print("with the h3 adapters:" if adapters else "without:")
            train(adapters, full="--full" in sys.argv)
