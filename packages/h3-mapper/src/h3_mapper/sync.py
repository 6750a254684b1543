"""Weight sync, trainer to rollout: buckets of (name, tensor) in, the engine's tensors out as soon as they are whole.

Three ways out, one set of accounts:

* `push` gives (name, tensor) pairs for `load_weights` (target `release`) or `load_state_dict` (`module`);
* `push_shards` gives (parameter, tensor, shard id) for `param.weight_loader`, views only, nothing held;
* `load_into` copies straight into live parameters, of any tensor-parallel rank, nothing held or allocated.

Buckets may come in any order and number. Only fused targets that still lack a part are held, already in their final
memory, so the caller may reuse a bucket's memory as soon as it has consumed what that bucket yielded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from h3_mapper.backends import Array, backend
from h3_mapper.config import H3Config
from h3_mapper.errors import LayoutError, MissingTensorError, ShapeError, listed
from h3_mapper.slabs import Slabs
from h3_mapper.spec import Layout
from h3_mapper.sync_intake import IncompleteSyncError, Intake, pairs
from h3_mapper.sync_routes import Route, logical, routes

__all__ = ["IncompleteSyncError", "WeightSync", "through_loaders"]

Bucket = Iterable[tuple[str, Array]]
TRANSFORMER: Mapping[str, str] = {"transformer": "transformer."}


@dataclass(slots=True)
class _Pending:
    """A fused target under construction: its memory and the sources still to come."""

    out: Array
    waiting: set[str]


class WeightSync:
    """One sync of one or more transformers. Make a new one for each training step.

    config: the model's dimensions. source, target: layouts; `release` for `load_weights`, `module` for a loaded
    module's own rows. components: trainer component -> prefix of its target names ("" for none); names without a
    component belong to the only one. tp, rank: shards, for `module`. round_to_bf16: take fp32 tensors for bf16
    parameters, rounding once; otherwise a dtype that differs is an error. passthrough: first segments of names that
    belong to other models (`text_encoder`), handed on untouched.
    """

    def __init__(
        self,
        config: H3Config,
        target: Layout = Layout.RELEASE,
        *,
        source: Layout = Layout.DIFFUSERS,
        components: Mapping[str, str] = TRANSFORMER,
        tp: int = 1,
        rank: int = 0,
        round_to_bf16: bool = False,
        passthrough: Collection[str] = (),
    ):
        if tp > 1 and target is not Layout.MODULE:
            raise LayoutError(
                f"tp {tp} with target {target}: load_weights cuts by itself; shards are of `module` rows"
            )
        if source is target is Layout.DIFFUSERS:
            raise LayoutError(
                "source and target are both diffusers: there is nothing to map; target is what the rollout takes: "
                "release (for load_weights) or module (a loaded module's own rows)"
            )
        self.config, self.source, self.target = config, source, target
        self._routes = routes(config, source, target, tp, rank)
        self._intake = Intake(config, source, tuple(components), round_to_bf16, passthrough)
        self._prefix = dict(components)
        self._pending: dict[str, _Pending] = {}
        self._memory = Slabs()
        self._begun: set[str] = set()
        self._done: set[str] = set()

    @property
    def lora(self) -> Mapping[str, Array]:
        """Adapter tensors (names with a `lora_` segment) sent so far, copied; for `map_lora_update_to_engine`."""
        return self._intake.lora

    @property
    def pending(self) -> Mapping[str, frozenset[str]]:
        """Fused targets held: name -> source names still missing."""
        return {name: frozenset(held.waiting) for name, held in self._pending.items()}

    def push(self, bucket: Bucket) -> Iterator[tuple[str, Array]]:
        """Yield (target name, tensor) for everything this bucket completes.

        A renamed tensor is the caller's own memory, valid until the bucket's is reused; a fused one belongs to the
        consumer, and its memory is used again only after the consumer has dropped it. Raises as `Intake.accept`.
        """
        for name, given in pairs(bucket):
            tensor = _detached(given)
            if self._intake.passes(name):
                self._done.add(name)
                yield name, tensor
                continue
            accepted = self._intake.accept(name, tensor)
            if accepted is None:
                continue
            component, source = accepted
            prefix = self._prefix[component]
            if component not in self._begun:
                yield from self._opening(component, tensor)
            for route in self._routes.by_source[source]:
                full = prefix + route.target.name
                if (whole := self._route(full, source, route, tensor)) is not None:
                    self._done.add(full)
                    yield full, whole
                    del whole  # the consumer's now: do not keep a block alive while the next is made

    def _opening(self, component: str, like: Array) -> Iterator[tuple[str, Array]]:
        """Derived tensors, once, beside the component's first tensor: engines want one prefix's names together."""
        self._begun.add(component)
        for name, (shape, data) in self._routes.derived.items():
            full = self._prefix[component] + name
            self._done.add(full)
            yield full, backend(like).from_bytes(data, shape, like)

    def _route(self, full: str, source: str, route: Route, tensor: Array) -> Array | None:
        """Copy one source into its target; the target if that was its last part."""
        tensor = _columns(route, tensor)
        spec, library = route.target, backend(tensor)
        rounds = library.describe(tensor)[1] != spec.dtype
        if route.view and not rounds:
            first = route.runs[0].start
            return tensor[first : first + spec.shape[0]]
        held = self._pending.get(full)
        if held is None:
            like = _bf16_like(tensor) if rounds else tensor
            out = self._memory.empty(spec.shape, like)
            held = self._pending[full] = _Pending(out, set(self._routes.needs[spec.name]))
        for run in route.runs:
            library.copy(held.out, tensor, run)
        held.waiting.discard(source)
        return None if held.waiting else self._pending.pop(full).out

    def push_shards(self, bucket: Bucket) -> Iterator[tuple[str, Array, str | int | None]]:
        """Yield (native parameter name, rows, loader shard id) for every tensor: views, never held.

        Shard ids are vLLM's: "q", "k", "v" for qkv_proj, 0 (gate) and 1 (value) for fc1, None elsewhere. Loaders cut
        for tensor parallelism themselves.
        """
        parts = logical(self.config, self.source)
        for name, given in pairs(bucket):
            tensor = _detached(given)
            if self._intake.passes(name):
                self._done.add(name)
                yield name, tensor, None
                continue
            accepted = self._intake.accept(name, tensor)
            if accepted is None:
                continue
            component, source = accepted
            prefix = self._prefix[component]
            if component not in self._begun:
                for full, made in self._opening(component, tensor):
                    yield full, made, None
            for parameter, start, stop, shard_id in parts[source]:
                self._done.add(prefix + parameter)
                yield prefix + parameter, tensor[start:stop], shard_id

    def load_into(self, bucket: Bucket, parameters: Mapping[str, Array]) -> None:
        """Copy a bucket's rows into live tensors, by target name: parameters and the inv_freq buffer.

        Raises MissingTensorError or ShapeError, naming the target, before that tensor is touched.
        """
        for name, tensor in pairs(bucket):
            if self._intake.passes(name):
                _target(parameters, name, tuple(tensor.shape))[...] = _detached(tensor)
                self._done.add(name)
                continue
            accepted = self._intake.accept(name, tensor)
            if accepted is None:
                continue
            component, source = accepted
            prefix, library = self._prefix[component], backend(tensor)
            if component not in self._begun:
                for full, made in self._opening(component, tensor):
                    _target(parameters, full, tuple(made.shape))[...] = made
            for route in self._routes.by_source[source]:
                full = prefix + route.target.name
                out = _target(parameters, full, route.target.shape)
                rows = _columns(route, tensor)
                for run in route.runs:
                    library.copy(out, rows, run)
                self._done.add(full)

    def finish(self, *, partial: bool = False) -> frozenset[str]:
        """Close the sync; return the target names delivered, exactly the set that strict loaders compare.

        Raises IncompleteSyncError, which has every missing and every extra name. partial: missing tensors are allowed
        (a sync of some layers), half-sent fused ones are not.
        """
        self._intake.close(partial)
        half = [
            f"{component}: {target} lacks {listed(needed - seen)}"
            for component, seen in self._intake.seen.items()
            if len(seen) < len(self._routes.by_source)
            for target, needed in self._routes.needs.items()
            if seen & needed and needed - seen
        ]
        if half:
            raise IncompleteSyncError(
                f"fused tensors are half sent: {listed(half)}; send the parts that are lacking before finish()"
            )
        return frozenset(self._done)


def through_loaders(
    parameters: Mapping[str, Array], shards: Iterable[tuple[str, Array, str | int | None]]
) -> None:
    """Feed `push_shards` to the parameters' own `weight_loader`, which cuts for tensor parallelism and quantises.

    A parameter or buffer without one is copied into. Raises MissingTensorError for a name the engine does not have.
    """
    for name, tensor, shard_id in shards:
        if name not in parameters:
            raise MissingTensorError(f"{name}: the engine has no such parameter")
        parameter = parameters[name]
        loader = getattr(parameter, "weight_loader", None)
        if loader is None:
            parameter.data.copy_(tensor)
        elif shard_id is None:
            loader(parameter, tensor)
        else:
            loader(parameter, tensor, shard_id)


def _columns(route: Route, tensor: Array) -> Array:
    return tensor if route.target.columns is None else tensor[:, slice(*route.target.columns)]


def _target(parameters: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    found = parameters.get(name)
    if found is None:
        raise MissingTensorError(
            f"{name}: not among the engine's {len(parameters)} tensors; pass buffers too"
        )
    if found.shape != shape:
        raise ShapeError(f"{name}: the engine holds {list(found.shape)}; this rank's shard is {list(shape)}")
    return _detached(found)


def _detached(tensor: Array) -> Array:
    return tensor.detach() if getattr(tensor, "requires_grad", False) else tensor


def _bf16_like(tensor: Array) -> Array:
    """An empty bf16 tensor on the same device (torch only: numpy has no bfloat16 to round to)."""
    import torch

    return tensor.new_empty(0, dtype=torch.bfloat16)
