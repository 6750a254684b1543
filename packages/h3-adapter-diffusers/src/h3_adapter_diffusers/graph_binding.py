"""Scope `model`: the graph of h3-kernels runs in the place of Diffusers' forward, through Diffusers' own
modules.

The model's and the blocks' `forward` are replaced on the instances, and blocks are still called as modules,
so FSDP2 gathers their parameters and Diffusers' gradient checkpointing wraps them as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from h3_kernels import graph
from h3_kernels.attention_providers import requested
from h3_kernels.audit import Auditor, AuditRow
from h3_kernels.binding import Binding, Bound, External, Refused, served
from h3_kernels.graph import (
    DiTConfig,
    ModuleWeights,
    Node,
    PackedDiT,
    PackedInputs,
    Replays,
    Session,
    Stage,
    StepGraphs,
    Tracer,
    TrainingStep,
    diffusers_inputs,
)
from h3_kernels.graph.settings import replacement_name, requested_operator
from h3_kernels.modes import Mode, capturing, eager
from h3_kernels.trace import fingerprint
from h3_mapper.apply import diffusers_to_native
from torch import Tensor, nn

from h3_adapter_diffusers import provider_ops, step_capture
from h3_adapter_diffusers.bindings import BLOCK_LISTS
from h3_adapter_diffusers.errors import BoundModelError, InstallError
from h3_adapter_diffusers.graph_lora import diffusers_terms, strict_terms, with_terms, wrapped_sites
from h3_adapter_diffusers.linear_binding import fused_flags, gemm_call, provider_obstacles, restore
from h3_adapter_diffusers.overlays import Outputs, Replacement, audited, diffusers_arithmetic, expand
from h3_adapter_diffusers.record import Record
from h3_adapter_diffusers.settings import Settings
from h3_adapter_diffusers.survey import Site, find_sites, obstacles, wrapper_obstacles
from h3_adapter_diffusers.weights import DiffusersTensors, base_state, native_names

_STAGES = {"token_refiner.refiner_blocks": "token_refiner.blocks", "transformer_blocks": "blocks"}


class GraphBinding:
    """The graph in the place of one model's forward.

    `overlay` maps node names, or patterns of names, to replacements, or to None for Diffusers' own
    arithmetic. Raises InstallError, with nothing changed, if the model can not be bound or a pattern names no
    node.
    """

    def __init__(
        self, model: nn.Module, settings: Settings, overlay: Mapping[str, Replacement | None]
    ) -> None:
        self._model: Any = model
        self._settings = settings
        sites = find_sites(model)
        config: Any = model.config
        self._dit = PackedDiT(DiTConfig.from_mapping(dict(config)))
        self._overlay, unmatched = expand(overlay, self._dit.nodes)
        reasons = obstacles(model, sites, contract=settings.contract, tp=settings.tp)
        reasons += wrapper_obstacles(sites)
        reasons += [
            f"overlay {pattern!r} names no node of the graph; report() lists them" for pattern in unmatched
        ]
        reasons += [
            f"{name or 'the model'}: its forward is already replaced on the instance (offload, context parallel or"
            " another install); install the contracts first, hooks after"
            for name, module in [("", model), *_blocks(model)]
            if "forward" in vars(module)
        ]
        reasons = reasons or provider_obstacles(sites, settings)
        if reasons:
            raise InstallError(reasons)
        self._draws = settings.mode is not Mode.STRICT or bool(self._overlay)  # maybe random numbers
        self._auditors = {n.name: Auditor() for n in self._dit.nodes} if settings.mode is Mode.AUDIT else {}
        self._record = Record(self._dit.nodes[-1].name)
        self._replays = Replays()
        self.steps: StepGraphs | None = None
        """Where training steps are captured, if they are (`captured.capture_steps`)."""
        self._replaced: dict[str, tuple[nn.Module, object]] = {}
        self._fused: tuple[bool, ...] | None = None
        self._signature = inspect.signature(type(model).forward)

    def bind(self) -> None:
        """Put the graph in place, and follow `fuse_qkv_projections` and LoRA added since."""
        if fused_flags(self._model) != self._fused:
            self._fused = fused_flags(self._model)
            self._tensors = DiffusersTensors(self._model)
            self._weights = ModuleWeights(self._tensors)
            self._linears: dict[str, list[Site]] = {}
            names = native_names(self._model)
            for site in find_sites(self._model):
                self._linears.setdefault(names[site.name], []).append(site)
        if not self._replaced:
            self._places = {
                f"{native}.{i}": (self._model.get_submodule(name), i)
                for name, native in _STAGES.items()
                for i in range(len(self._model.get_submodule(name)))
            }
            for name, (blocks, i) in self._places.items():
                self._replace(name, blocks[i], _StageForward(self._dit.stage(name)))
            self._replace("the model", self._model, self._forward)

    def nodes(self) -> Iterator[tuple[str, Binding]]:
        """What served each node, read back from the last forward; LoRA terms have lines of their own."""
        settings = self._graph_settings({})
        for node in self._dit.nodes:
            contract = requested_operator(node, settings)
            yield node.name, self._node(node, contract)
            if node.name in self._record.tuned and self._settings.mode is Mode.STRICT:
                yield f"{node.name}.lora", Bound(contract, "the linear's")

    def _node(self, node: Node, contract: str) -> Binding:
        if node.name in self._auditors:
            row = self._auditors[node.name].row(node.name)
            return External(f"Diffusers; {row.differing} of {row.compared} values differ from {contract}")
        if node.name in self._overlay:
            given = self._overlay[node.name][1]
            return External(
                f"{'Diffusers' if given is None else replacement_name(given)}, kept by the overlay"
            )
        ran = self._record.ran.get(node.name)
        if ran is None:
            return Refused("has not run since the install: run a forward first")
        if node.name in self._record.tuned:  # the trace names the LoRA term there, not what serves the linear
            call = gemm_call(self._linears[node.name][0], self._settings, ran)
            return served(contract, call, ran.device, self._settings.provider)
        return Bound(contract, self._record.actual[node.name].partition(" by ")[2])

    def audit(self) -> list[AuditRow]:
        """What audit mode has seen, per node that computes something."""
        rows = (auditor.row(name) for name, auditor in self._auditors.items())
        return [row for row in rows if row.compared]

    def fingerprint(self, *, weights: bool, **facts: str | int | float) -> dict[str, Any]:
        """See `Handle.fingerprint`."""
        config: Any = self._model.config
        tensors = (
            diffusers_to_native(base_state(self._model), layout="module", config=dict(config))
            if weights
            else None
        )
        return fingerprint(self._dit, self._graph_settings({}), weights=tensors, **facts)

    @contextmanager
    def tracing(self, tracer: Tracer) -> Iterator[None]:
        """Let `tracer` see the forwards in the block."""
        self._record.watcher = tracer
        try:
            yield
        finally:
            self._record.watcher = None

    def remove(self) -> list[str]:
        """Restore Diffusers' forwards; the names of those that something else has taken since."""
        self._replays = Replays()
        if self.steps is not None:
            self.steps.release()
            self.steps = None
        return [name for name, (module, ours) in self._replaced.items() if not restore(module, ours)]

    def _replace(self, name: str, module: nn.Module, ours: object) -> None:
        vars(module)["forward"] = ours
        self._replaced[name] = module, ours

    def _graph_settings(self, overlay: Mapping[str, Replacement], *, traced: bool = True) -> graph.Settings:
        s = self._settings
        return graph.Settings(
            tp=s.tp,
            rank=s.rank,
            collective=s.collective,
            contract=s.contract,
            provider=s.provider,
            attention=s.attention,
            overlay=overlay,
            tracer=self._record if traced else None,
        )

    @eager
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Diffusers' forward by the graph; the same arguments and results."""
        call = self._signature.bind(self._model, *args, **kwargs).arguments
        scale = (call.get("attention_kwargs") or {}).get("scale", 1.0)
        if scale != 1.0:
            raise BoundModelError(
                f"attention_kwargs scale={scale}: a scale of one call is lost when checkpointing recomputes it; set"
                " it on the adapter (set_adapters(weights=...))"
            )
        inputs = diffusers_inputs(call, self._settings.ring.keys.get("packed")).canonical()
        steps = self._steps_for(inputs)
        if steps is None:
            video, audio = self._launched(inputs)
        else:
            video, audio = steps.run(self._step(), inputs)
        batch = call["hidden_states"].shape[0]
        outputs = tuple(rows.view(batch, -1, rows.shape[1]) for rows in (video, audio))
        if not call.get("return_dict", True):
            return outputs
        from diffusers.models.transformers.transformer_minimax_h3 import (
            MiniMaxH3TransformerOutput,
        )

        return MiniMaxH3TransformerOutput(sample=outputs[0], audio_sample=outputs[1])

    def _launched(self, inputs: PackedInputs) -> tuple[Tensor, Tensor]:
        overlay = self._replacements(inputs)
        known = self._record.knows(inputs.shapes(), requested(self._settings.attention))
        settings = self._graph_settings(overlay, traced=self._draws or not known)
        served = self._replays.serves(inputs, settings, terms_only=not self._overlay and not self._auditors)
        if served and self._record.watcher is None and not self._hooked():
            state, terms = step_capture.adapters(wrapped_sites(self._linears))
            weights = [*self._tensors.held(), *terms]
            places = tuple(weight.data_ptr() for weight in weights), state
            return self._replays.run(self._dit, self._weights, inputs, settings, places)
        return self._run(self._dit.begin(self._weights, inputs, settings))

    def capture_obstacles(self) -> list[str]:
        """Why steps of this model cannot be captured, one line each; empty if they can."""
        captured = ["steps are captured already; release() them first"] if self.steps is not None else []
        return captured + step_capture.obstacles(self._model, self._settings, self._overlay)

    def _steps_for(self, inputs: PackedInputs) -> StepGraphs | None:
        """The captured steps, if this forward is one: with something to train, not watched, not inside a capture."""
        if self.steps is None or self._record.watcher is not None or not torch.is_grad_enabled():
            return None
        return None if capturing(inputs.positions.device) else self.steps

    def _step(self) -> TrainingStep:
        step_capture.refuse_surroundings(self._model, hooked=self._hooked())
        fixed = requested(self._settings.attention), self._fused
        wrapped = wrapped_sites(self._linears)
        return step_capture.step_of(self._model, self._launched, wrapped, self._tensors.held(), fixed)

    def _hooked(self) -> bool:
        """Whether something surrounds the blocks (FSDP2, offload, a wrapper), so that they must be called."""
        return any(
            blocks[i] is not self._replaced[name][0]
            or blocks[i]._forward_pre_hooks
            or blocks[i]._forward_hooks
            for name, (blocks, i) in self._places.items()
        )

    def _run(self, session: Session) -> tuple[Tensor, Tensor]:
        slots = session.slots()
        for stage in self._dit.stages:
            if stage.name not in self._places:
                slots.update(session.run(stage, slots))
                continue
            blocks, i = self._places[stage.name]
            block = blocks[i]  # looked up now: a wrapper may have taken its place
            reads = (session, *(slots[name] for name in stage.reads))
            owner = self._model.token_refiner if stage.name.startswith("token_refiner") else self._model
            recompute = torch.is_grad_enabled() and owner.gradient_checkpointing
            outputs = (
                step_capture.recompute(owner, self._draws)(block, *reads) if recompute else block(*reads)
            )
            slots.update(zip(stage.writes, outputs, strict=True))
        video, audio = graph.table.OUTPUT_SLOTS
        return slots[video], slots[audio]

    def _replacements(self, inputs: PackedInputs) -> dict[str, Replacement]:
        """The overlay of one forward: kept, audited and replaced nodes, each with its LoRA terms."""
        context = provider_ops.Context(
            self._dit.config,
            self._weights,
            {"packed": inputs.cu_seqlens.tolist(), "text": inputs.text_cu_seqlens.tolist()}
            if self._overlay or self._auditors
            else {},
        )
        wrapped = wrapped_sites(self._linears)
        self._record.tuned = set(wrapped)
        strict = strict_terms(self._settings, inputs)

        def kept(node: Node) -> Replacement:
            base = diffusers_arithmetic(context, node)
            sites = wrapped.get(node.name)
            return with_terms(sites, base, diffusers_terms) if sites else base

        if self._auditors:
            audited_nodes = [n for n in self._dit.nodes if n.op in provider_ops.OPERATIONS]
            beside = {node: with_terms(sites, None, strict) for node, sites in wrapped.items()}
            return {
                n.name: audited(kept(n), self._auditors[n.name], beside.get(n.name)) for n in audited_nodes
            }
        chosen = {node: with_terms(sites, None, strict) for node, sites in wrapped.items()}
        for name, (node, given) in self._overlay.items():
            if given is None:
                chosen[name] = kept(node)
            else:
                chosen[name] = with_terms(wrapped[name], given, strict) if name in wrapped else given
        return chosen


class _StageForward:
    """A block's forward: its stage of the session that its model began."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    @eager
    def __call__(self, session: Session, *reads: Tensor) -> Outputs:
        if not isinstance(session, Session):
            raise BoundModelError(f"{self.stage.name}: called outside its model's forward; call the model")
        written = session.run(self.stage, dict(zip(self.stage.reads, reads, strict=True)))
        return tuple(written[name] for name in self.stage.writes)


def _blocks(model: Any) -> Iterator[tuple[str, nn.Module]]:
    for name in BLOCK_LISTS:
        for index, block in enumerate(model.get_submodule(name)):
            yield f"{name}.{index}", block
