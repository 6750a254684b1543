"""Scope ``model``: the packed graph of h3-kernels in the place of the engine's forward.

The graph reads the engine's live parameters, takes the engine's keyword arguments, and runs over its tp and Ulysses
groups. The engine's modules are not called, so their hooks, caches and compiled regions take no part. Forwards of few
rows are replayed from CUDA graphs where H3_CUDA_GRAPHS=1 asks for it (``h3_kernels.graph.replay``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from h3_kernels import graph
from h3_kernels.audit import Auditor, AuditRow, sampled_rows
from h3_kernels.binding import Binding, Bound, External, Ran, Refused
from h3_kernels.fc1_swiglu import NAME as FC1_SWIGLU
from h3_kernels.graph import (
    DiTConfig,
    ModuleWeights,
    Node,
    PackedDiT,
    PackedInputs,
    Replays,
    Ulysses,
    vllm_inputs,
)
from h3_kernels.lora import LoraSlice, lora_slices
from h3_kernels.modes import Mode, Scope, eager
from torch import Tensor, nn

from h3_adapter_vllm.errors import BoundModelError
from h3_adapter_vllm.graph_call import attention_provider, check_call, masked
from h3_adapter_vllm.lora import active_slices, lora_style
from h3_adapter_vllm.report import bound_linear, bound_lora
from h3_adapter_vllm.settings import Settings, plain
from h3_adapter_vllm.survey import Site, find_sites

Outputs = tuple[Tensor, ...]
VELOCITIES = ("video_velocity", "audio_velocity")


class GraphBinding:
    """The graph in the place of one model's forward (strict), or beside it (audit)."""

    def __init__(self, model: Any, settings: Settings) -> None:
        self._model = model
        self._settings = settings
        self._dit = PackedDiT(DiTConfig.from_mapping({**asdict(model.arch), "rope_theta": model._rope_theta}))
        self._linears = {site.name: site for site in find_sites(model, Scope.PROJECTIONS)}
        self._places = {name: place_of(model, name) for name in self._linears}
        self._tensors = LiveTensors(model)
        self._weights = ModuleWeights(self._tensors)
        self._replays = Replays()
        self._record = Record()
        self._auditors = {name: Auditor() for name in VELOCITIES} if settings.mode is Mode.AUDIT else {}
        self._audited = False

    def bind(self) -> None:
        """Replace the model's forward on the instance."""
        vars(self._model)["forward"] = self._forward

    def restore(self) -> list[str]:
        """Undo :meth:`bind`; ``["forward"]`` if something else sits there now, which is left alone."""
        self._replays = Replays()
        lost = self.lost()
        if not lost:
            del vars(self._model)["forward"]
        return lost

    def lost(self) -> list[str]:
        """``["forward"]`` if the model's forward is no longer ours."""
        return [] if vars(self._model).get("forward") == self._forward else ["forward"]

    def nodes(self) -> Iterator[tuple[str, Binding]]:
        """What served each node of the last forward; in audit, how far the engine's velocities are from the graph's."""
        for name, auditor in self._auditors.items():
            row = auditor.row(name)
            yield name, External(f"engine; {row.differing} of {row.compared} values differ from the graph")
        if self._settings.mode is not Mode.STRICT:
            return
        for node in self._dit.nodes:
            yield node.name, self._binding(node)
            if node.name in self._record.tuned:
                slices = self._record.tuned[node.name]
                yield (
                    f"{node.name}.lora",
                    bound_lora(self._linears[node.name], slices, self._settings, self._ran(node)),
                )

    def audit(self) -> list[AuditRow]:
        """Audit of the two velocities, over the first forward after the install."""
        return [auditor.row(name) for name, auditor in self._auditors.items()]

    def _binding(self, node: Node) -> Binding:
        seen = self._record.seen.get(node.name)
        if seen is None:
            return Refused("has not run since the install: run a forward first")
        if node.name in self._record.together:
            return Bound(seen[0], FC1_SWIGLU)
        if node.name in self._linears:
            return bound_linear(self._linears[node.name], self._settings, self._ran(node))
        return Bound(seen[0], self._provider(node))

    def _ran(self, node: Node) -> Ran:
        _, rows = self._record.seen[node.name]
        return Ran(self._settings.clock.forwards, rows, self._record.device, k_contiguous=True)

    def _provider(self, node: Node) -> str:
        if node.op == "attention":
            return attention_provider(self._model, self._settings, self._record.device)
        return "written order" if self._record.device.type == "cpu" else "h3_kernels.nodes"

    @eager
    def _forward(self, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The engine's forward: the same keyword arguments and results."""
        if self._settings.mode is Mode.AUDIT:
            return self._beside(kwargs)
        return self._graph(kwargs)

    def _beside(self, kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The engine's own result; the first one is compared with the graph's."""
        outputs: tuple[Tensor, Tensor] = type(self._model).forward(self._model, **kwargs)
        if not self._audited:
            self._audited = True
            for auditor, theirs, ours in zip(
                self._auditors.values(), outputs, self._graph(kwargs), strict=True
            ):
                rows = sampled_rows(theirs)
                auditor.compare(theirs[rows], ours[rows], rows)
        return outputs

    def _graph(self, kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        check_call(kwargs)
        self._check_hooks()
        inputs = vllm_inputs(kwargs)
        s = self._settings
        self._record.tuned = {}
        settings = graph.Settings(
            tp=s.tp,
            rank=s.rank,
            collective=s.collective,
            contract=s.contract,
            provider=s.provider,
            attention=s.attention,
            sequence=self._sequence(),
            overlay=dict(self._lora_terms()),
            tracer=self._record,
        )
        if self._replays.serves(inputs, settings):
            places = self._tensors.places()
            video, audio = self._replays.run(self._dit, self._weights, inputs, settings, places)
        else:
            video, audio = self._dit.run(self._weights, inputs, settings)
        return masked(video, audio, kwargs)

    def _sequence(self) -> Any:
        """Ulysses over the engine's own group, or None."""
        if int(self._model.parallel_config.ulysses_degree) == 1:
            return None
        from vllm_omni.diffusion.distributed.parallel_state import get_sp_group

        return Ulysses(get_sp_group().ulysses_group)

    def _check_hooks(self) -> None:
        for blocks in (self._model.token_refiner.blocks, self._model.blocks):
            for index, block in enumerate(blocks):
                if getattr(block, "_hook_registry", None) is not None:
                    raise BoundModelError(
                        f"block {index} has engine hooks (weight offload or step caching) that scope='model' would "
                        "bypass: switch them off, or install with scope='projections'"
                    )

    def _lora_terms(self) -> Iterator[tuple[str, Callable[..., Outputs]]]:
        for name, (parent, leaf) in self._places.items():
            site, module = self._linears[name], getattr(parent, leaf)
            slices = [] if module is site.layer else active_slices(module)
            if slices:
                self._record.tuned[name] = slices
                yield name, self._with_lora(site, slices)

    def _with_lora(self, site: Site, slices: list[LoraSlice]) -> Callable[..., Outputs]:
        def lora(strict: Callable[..., Outputs], x: Tensor) -> Outputs:
            outputs = strict(x)
            widths = [y.shape[1] for y in outputs]
            if sum(widths) != site.layer.output_size_per_partition:
                raise BoundModelError(
                    f"{site.name}: LoRA on a gathered linear at tp > 1; use scope='projections'"
                )
            y = lora_slices(
                x.flatten(1).to(site.layer.weight.dtype),
                torch.cat(outputs, dim=1),
                slices,
                style=lora_style(site.rule, self._settings),
                provider=self._settings.provider,
            )
            return tuple(torch.split(y, widths, dim=1))

        return lora


def place_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The parent of a submodule and its attribute there: a LoRA wrapper may come to sit in that place."""
    parent, _, leaf = name.rpartition(".")
    return model.get_submodule(parent), leaf


class LiveTensors(Mapping[str, Tensor]):
    """The engine's parameters by their names in the bare model, read when asked for: loading and LoRA may go on."""

    def __init__(self, model: nn.Module) -> None:
        modules = {name.replace(".base_layer", ""): module for name, module in model.named_modules()}
        self._owners = {
            f"{name}.{leaf}": (module, leaf)
            for name, module in modules.items()
            for leaf, parameter in module._parameters.items()
            if parameter is not None
        }

    def __getitem__(self, name: str) -> Tensor:
        owner, leaf = self._owners[name]
        return plain(getattr(owner, leaf))

    def places(self) -> tuple[int, ...]:
        """Where every parameter lies now."""
        with torch._C.DisableTorchFunctionSubclass():  # vLLM's parameter class intercepts every attribute
            return tuple(owner._parameters[leaf].data_ptr() for owner, leaf in self._owners.values())

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)


class Record:
    """Tracer of the last forward: each node's contract and how many rows it gave; LoRA terms by node; which fc1s and
    SwiGLUs were one launch."""

    reads_values = False

    def __init__(self) -> None:
        self.seen: dict[str, tuple[str, int]] = {}
        self.together: set[str] = set()
        self.device = torch.device("cpu")
        self.tuned: dict[str, list[LoraSlice]] = {}

    def begin(self, inputs: PackedInputs) -> None:
        """Forget the forward before."""
        self.seen, self.together = {}, set()
        self.device = inputs.positions.device

    def record(self, node: Node, requested: str, actual: str, outputs: Mapping[str, Tensor]) -> None:
        """Keep what served ``node``."""
        self.seen[node.name] = requested, next(iter(outputs.values())).shape[0]
        if actual.endswith(f" by {FC1_SWIGLU}"):
            self.together.add(node.name)
