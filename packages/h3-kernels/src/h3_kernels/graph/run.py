"""Running the stages of the packed DiT."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from h3_kernels import nodes
from h3_kernels.errors import InputError
from h3_kernels.fc1_swiglu import NAME as FC1_SWIGLU
from h3_kernels.graph.checks import check_rows
from h3_kernels.graph.config import DiTConfig
from h3_kernels.graph.inputs import PackedInputs
from h3_kernels.graph.operations import (
    OPERATIONS,
    Constants,
    Run,
    actual_operator,
    fc1_swiglu,
    gated_residual_norm,
)
from h3_kernels.graph.settings import Results, Settings, replacement_name, requested_operator
from h3_kernels.graph.table import INPUT_SLOTS, OUTPUT_SLOTS, Node, Stage, Step, build_stages
from h3_kernels.graph.weights import WeightsView

Slots = dict[str, Tensor]


class PackedDiT:
    """The packed DiT of one configuration: its ``stages`` and ``nodes`` in order."""

    def __init__(self, config: DiTConfig) -> None:
        self.config = config
        self.stages = build_stages(config)
        self.nodes = tuple(node for stage in self.stages for node in stage.nodes)
        self._names = frozenset(node.name for node in self.nodes)
        self._by_name = {stage.name: stage for stage in self.stages}
        self._named: dict[tuple[object, ...], str] = {}
        self._constants = Constants(
            nodes.inverse_frequencies(config.rope_freqs, config.rope_theta),
            nodes.sinusoid_frequencies(config.freq_dim),
        )

    def stage(self, name: str) -> Stage:
        """The stage called ``name``, e.g. ``blocks.3``. Raises InputError if there is none."""
        if name not in self._by_name:
            raise InputError(f"no stage {name!r}; stages are {', '.join(self._by_name)}")
        return self._by_name[name]

    def run(
        self, weights: WeightsView, inputs: PackedInputs, settings: Settings | None = None
    ) -> tuple[Tensor, Tensor]:
        """One forward: (video velocity [Nv, channels * patch], audio velocity [Na, channels]), both float32.

        Rows come in the order of ``inputs.video`` and ``inputs.audio``, condition rows included.
        Differentiable in the weights and in the latent and text rows. Raises InputError for an overlay of a
        node that does not exist, and what the nodes raise.
        """
        session = self.begin(weights, inputs, settings)
        slots = session.slots()
        for stage in self.stages:
            slots.update(session.run(stage, slots))
        return slots[OUTPUT_SLOTS[0]], slots[OUTPUT_SLOTS[1]]

    def begin(self, weights: WeightsView, inputs: PackedInputs, settings: Settings | None = None) -> Session:
        """A forward to be run stage by stage, for an engine whose own module hooks surround each block.

        Raises InputError for an overlay of a node that does not exist and for rows that ``checks`` refuses (on CUDA
        an asynchronous error).
        """
        settings = settings or Settings()
        unknown = sorted(settings.overlay.keys() - self._names)
        if unknown:
            raise InputError(f"overlay names nodes that do not exist: {', '.join(unknown)}")
        device = inputs.positions.device
        if self._constants.inv_freq.device != device:
            self._constants = self._constants.to(device)
        check_rows(inputs)
        inputs = inputs.canonical()
        if settings.tracer is not None:
            settings.tracer.begin(inputs)
        return Session(Run(self.config, weights, inputs, settings, self._constants), self._named)


class Session:
    """One forward under way: the slots it starts from, and stages to run on slots."""

    def __init__(self, run: Run, named: dict[tuple[object, ...], str]) -> None:
        self._run = run
        self._named = named

    @property
    def inputs(self) -> PackedInputs:
        """The rows in the order the nodes see them."""
        return self._run.inputs

    def slots(self) -> Slots:
        """The input slots."""
        return {name: getattr(self._run.inputs, name) for name in INPUT_SLOTS}

    def run(self, stage: Stage, slots: Mapping[str, Tensor]) -> Slots:
        """Run ``stage`` on the slots it reads; returns the slots it writes for later stages."""
        reads = tuple(slots[name] for name in stage.reads)
        if self._run.settings.checkpoint and torch.is_grad_enabled():
            # No node draws random numbers; an overlay may (a LoRA term with dropout).
            random = bool(self._run.settings.overlay)
            results = checkpoint(self._stage, stage, *reads, use_reentrant=False, preserve_rng_state=random)
        else:
            results = self._stage(stage, *reads)
        return dict(zip(stage.writes, results, strict=True))

    def _stage(self, stage: Stage, *reads: Tensor) -> Results:
        slots = dict(zip(stage.reads, reads, strict=True))
        for step in stage.steps:
            if self._fused(step, slots):
                for _, unused in step:
                    for slot in unused:
                        slots.pop(slot, None)  # what stayed inside the launch never was one
            else:
                for node, unused in step:
                    self._single(node, slots)
                    for slot in unused:
                        del slots[slot]
        return tuple(slots[name] for name in stage.writes)

    def _fused(self, step: Step, slots: Slots) -> bool:
        """Run both nodes of ``step`` in one launch, if it has two and there is a launch for them as they are now."""
        settings = self._run.settings
        if len(step) != 2 or not settings.fuse:
            return False
        (first, _), (second, _) = step
        if first.name in settings.overlay or second.name in settings.overlay:
            return False
        if second.op == "swiglu":
            return self._fc1_swiglu(first, second, slots)
        names = (*first.reads, *second.reads[1:3])
        outputs = gated_residual_norm(self._run, first, second, *(slots[name] for name in names))
        for node, output in zip((first, second), outputs, strict=True):
            self._store(node, (output,), slots)
        return True

    def _single(self, node: Node, slots: Slots) -> None:
        run, operation = self._run, OPERATIONS[node.op]
        reads = tuple(slots[name] for name in node.reads)
        replacement = run.settings.overlay.get(node.name)
        if replacement is None:
            outputs, planted = operation(run, node, *reads), ""
        else:
            outputs = replacement(lambda *x: operation(run, node, *x), *reads)
            planted = f"overlay:{replacement_name(replacement)}"
        self._store(node, outputs, slots, planted)

    def _fc1_swiglu(self, first: Node, second: Node, slots: Slots) -> bool:
        tracer = self._run.settings.tracer
        if tracer is not None and getattr(tracer, "reads_values", True):
            return False
        f = fc1_swiglu(self._run, first, slots[first.reads[0]])
        if f is None:
            return False
        slots[second.writes[0]] = f
        for node in (first, second):
            requested = requested_operator(node, self._run.settings)
            self._record(node, {second.writes[0]: f}, f"{requested} by {FC1_SWIGLU}")
        return True

    def _store(self, node: Node, outputs: Results, slots: Slots, planted: str = "") -> None:
        written = dict(zip(node.writes, outputs, strict=True))
        slots.update(written)
        self._record(node, written, planted)

    def _record(self, node: Node, written: Mapping[str, Tensor], actual: str) -> None:
        run = self._run
        if run.settings.tracer is not None and node.name not in run.traced:
            run.traced.add(node.name)
            requested = requested_operator(node, run.settings)
            actual = actual or self._actual_operator(node, next(iter(written.values())))
            run.settings.tracer.record(node, requested, actual, written)

    def _actual_operator(self, node: Node, output: Tensor) -> str:
        # Naming a provider asks for it again; a tracer that watches every forward must not pay for that.
        s = self._run.settings
        key = (node.name, output.shape, output.device, s.tp, s.contract, s.provider, s.attention)
        if key not in self._named:
            self._named[key] = actual_operator(self._run, node, output)
        return self._named[key]
