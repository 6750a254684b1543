"""vLLM-Omni plugin: bind every MiniMax-H3 that a served engine's workers load, without a change to any source.

vLLM-Omni calls :func:`register` in every process (entry point group ``vllm_omni.general_plugins``) before it loads a
model. The environment decides:

==============  ====================================================================================================
H3_MODE         strict or audit; unset, empty or off: nothing happens
H3_SCOPE        model (default), projections or linears
H3_CONTRACT     row-parallel contract id (default h3-parallel-v1-u8)
H3_ATTENTION    provider of attention in scope model (default auto)
H3_CUDA_GRAPHS  1 replays forwards of few rows from CUDA graphs (h3_kernels.graph.replay)
H3_REPORT       a folder: after its first forward each transformer's report is written there as JSON, one file a rank
==============  ====================================================================================================

A model that cannot be bound stops the server from starting, with the reasons. Importing this module imports no engine.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h3_kernels.modes import Mode, resolve_mode

if TYPE_CHECKING:
    from torch import nn

ARGUMENTS = {"H3_SCOPE": "scope", "H3_CONTRACT": "contract", "H3_ATTENTION": "attention"}
REPORT = "H3_REPORT"
_WRAPPED = "_h3_wrapped"


def register() -> None:
    """Make vLLM-Omni's model loader install the contracts, if ``H3_MODE`` asks for them. Called again, does nothing.

    Raises ModeError for a word that is not a mode.
    """
    if not os.environ.get("H3_MODE") or resolve_mode() is Mode.OFF:
        return
    from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader

    # Before the engine's own post-processing, which packs weights away on a CPU; and after any other way of loading.
    _wrap(DiffusersPipelineLoader, "_process_weights_after_loading", _install_first)
    _wrap(DiffusersPipelineLoader, "load_model", _install_last)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    if getattr(original, _WRAPPED, False):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapped, _WRAPPED, True)
    setattr(owner, name, wrapped)


def _install_first(
    original: Callable[..., Any], loader: Any, model: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    install_all(model)
    return original(loader, model, *args, **kwargs)


def _install_last(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    model = original(*args, **kwargs)
    install_all(model)
    return model


def install_all(pipeline: nn.Module) -> None:
    """Install on every ``MiniMaxH3DiTModel`` of a pipeline, as the environment says. Raises InstallError."""
    from h3_adapter_vllm.install import handle_of, install_h3_rollout

    arguments: dict[str, Any] = {
        name: os.environ[key] for key, name in ARGUMENTS.items() if os.environ.get(key)
    }
    for name, model in _transformers(pipeline):
        fresh = handle_of(model) is None
        handle = install_h3_rollout(model, **arguments)
        if fresh and os.environ.get(REPORT):
            _write_after_first_forward(model, handle, Path(os.environ[REPORT]), name)


def _transformers(pipeline: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3DiTModel

    return (
        (name, module) for name, module in pipeline.named_modules() if isinstance(module, MiniMaxH3DiTModel)
    )


def _write_after_first_forward(model: nn.Module, handle: Any, folder: Path, name: str) -> None:
    def write(*_: Any) -> None:
        hook.remove()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name or 'transformer'}.rank{handle.settings.rank}.json"
        path.write_text(handle.report().to_json() + "\n")

    hook = model.register_forward_hook(write)
