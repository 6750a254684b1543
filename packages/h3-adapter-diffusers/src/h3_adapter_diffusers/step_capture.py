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
    fixed: Hashable,
) -> TrainingStep:
    """The step of `forward`; `wrapped` are its LoRA sites, `fixed` what else its kernels depend on."""
    switches = model.gradient_checkpointing, model.token_refiner.gradient_checkpointing
    return TrainingStep(
        forward=forward,
        trained=[parameter for parameter in model.parameters() if parameter.requires_grad],
        leaves=lambda: _aliases(model),
        places=lambda: _places(model),
        kind=(switches, fixed, adapters(wrapped)),
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
def _aliases(model: nn.Module) -> Iterator[Sequence[Tensor]]:
    """Other leaves of the same memory in the place of the trained parameters, in their order, until the block ends."""
    found: dict[nn.Parameter, nn.Parameter] = {}
    owners = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    held = [(module, name, p) for module, name, p in owners if p.requires_grad]
    try:
        for module, name, parameter in held:
            if parameter not in found:
                found[parameter] = nn.Parameter(parameter.detach())
            module._parameters[name] = found[parameter]
        yield list(found.values())
    finally:
        for module, name, parameter in held:
            module._parameters[name] = parameter


def _places(model: nn.Module) -> Hashable:
    """Where every parameter lies, what it is, and whether it is trained."""
    return tuple(_place(parameter) for parameter in model.parameters())


def adapters(wrapped: Mapping[str, list[Site]]) -> Hashable:
    """What the host reads of PEFT's wrappers in a forward, and where their active weights lie.

    Raises BoundModelError for a wrapper that no term covers.
    """
    states: list[Hashable] = []
    for site in (site for sites in wrapped.values() for site in sites):
        wrapper: Any = site.module
        settle(wrapper)
        reason = wrapper_obstacle(wrapper)
        if reason is not None:
            raise BoundModelError(f"{site.name}: {reason}")
        states.append((site.name, wrapper.disable_adapters, wrapper.merged))
        states += [
            (
                name,
                wrapper.scaling[name],
                *(_place(side[name].weight) for side in (wrapper.lora_A, wrapper.lora_B)),
            )
            for name in wrapper.active_adapters
            if name in wrapper.lora_A
        ]
    return tuple(states)


def _place(tensor: Tensor) -> Hashable:
    return tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.requires_grad
