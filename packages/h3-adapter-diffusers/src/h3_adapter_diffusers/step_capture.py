"""What a captured training step is made of in scope `model`, and what keeps a model's steps from being captured."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from h3_kernels.graph import PackedInputs, TrainingStep
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from h3_adapter_diffusers.errors import BoundModelError
from h3_adapter_diffusers.lora import settle, wrapper_obstacle
from h3_adapter_diffusers.settings import Settings
from h3_adapter_diffusers.survey import Site

_DIFFUSERS_CHECKPOINT = (
    "diffusers.models.modeling_utils",
    "ModelMixin.enable_gradient_checkpointing.<locals>._gradient_checkpointing_func",
)


def obstacles(model: nn.Module, settings: Settings, overlay: Mapping[str, Any]) -> list[str]:
    """Why steps of an installed model cannot be captured, one line each."""
    reasons = []
    if settings.tp > 1:
        reasons.append(
            f"tp={settings.tp}: a captured step has no collectives; launch steps under tensor parallelism"
        )
    if overlay:
        reasons.append("an overlay runs code that a replay would not run again; install without it")
    if {parameter.device.type for parameter in model.parameters()} != {"cuda"}:
        reasons.append("captured steps are CUDA graphs; move the model to a CUDA device before the install")
    return reasons


def refuse_surroundings(model: Any, *, hooked: bool) -> None:
    """Raise BoundModelError if code of the caller's runs around blocks, which a replay would leave out."""
    if hooked:
        raise BoundModelError(
            "hooks or wrappers around blocks (FSDP2, offload) would not run in a captured step; release() the captured"
            " steps"
        )
    for owner in (model, model.token_refiner):
        if owner.gradient_checkpointing and not _as_shipped(owner._gradient_checkpointing_func):
            raise BoundModelError(
                "a checkpointing function of the caller's would not run in a captured step; call"
                " enable_gradient_checkpointing() without one, or release() the captured steps"
            )


def step_of(
    model: Any,
    forward: Callable[[PackedInputs], tuple[Tensor, Tensor]],
    wrapped: Mapping[str, list[Site]],
    base: Sequence[Tensor],
    fixed: Hashable,
) -> TrainingStep:
    """The step of `forward` over the weights `base` and the LoRA sites `wrapped`; `fixed`: what else its kernels depend
    on."""
    switches = model.gradient_checkpointing, model.token_refiner.gradient_checkpointing
    state, terms = adapters(wrapped)
    weights = [*base, *terms]
    trained = [weight for weight in weights if weight.requires_grad]
    which = tuple(weight.requires_grad for weight in weights)
    return TrainingStep(
        forward=forward,
        weights=weights,
        trained=trained,
        leaves=lambda: _aliases(model, trained),
        kind=(switches, fixed, state, which),
    )


def recompute(owner: Any, draws: bool) -> Callable[..., Any]:
    """The checkpointing function of `owner`'s blocks.

    In the place of Diffusers' own, one that does not save and restore the states of random generators, if no node
    `draws` numbers: it is host time for every block, and refused in a graph capture.
    """
    function: Callable[..., Any] = owner._gradient_checkpointing_func
    return function if draws or not _as_shipped(function) else _recomputed


def _recomputed(block: Any, *reads: Any) -> Any:
    return checkpoint(block, *reads, use_reentrant=False, preserve_rng_state=False)


def _as_shipped(function: Any) -> bool:
    """Whether `function` is what Diffusers' `enable_gradient_checkpointing()` puts into a model."""
    return (
        getattr(function, "__module__", ""),
        getattr(function, "__qualname__", ""),
    ) == _DIFFUSERS_CHECKPOINT


@contextmanager
def _aliases(model: nn.Module, trained: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Other leaves of the same memory in the place of `trained`, in their order, until the block ends."""
    found = {id(parameter): nn.Parameter(parameter.detach()) for parameter in trained}
    held = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in found
    ]
    try:
        for module, name, parameter in held:
            module._parameters[name] = found[id(parameter)]
        yield list(found.values())
    finally:
        for module, name, parameter in held:
            module._parameters[name] = parameter


def adapters(wrapped: Mapping[str, list[Site]]) -> tuple[Hashable, list[Tensor]]:
    """What the host reads of PEFT's wrappers in a forward, and the weights of their active terms.

    Raises BoundModelError for a wrapper that no term covers.
    """
    states: list[Hashable] = []
    weights: list[Tensor] = []
    for site in (site for sites in wrapped.values() for site in sites):
        wrapper: Any = site.module
        settle(wrapper)
        reason = wrapper_obstacle(wrapper)
        if reason is not None:
            raise BoundModelError(f"{site.name}: {reason}")
        states.append((site.name, wrapper.disable_adapters, wrapper.merged))
        sides = [wrapper._modules[side]._modules for side in ("lora_A", "lora_B")]
        for name in wrapper.active_adapters:
            if name in sides[0]:
                pair = [_weight(side[name]) for side in sides]
                weights += pair
                states.append((name, wrapper.scaling[name], *((t.shape, t.dtype) for t in pair)))
    return tuple(states), weights


def _weight(linear: Any) -> Tensor:
    weight: Tensor = linear._parameters["weight"]
    return weight
