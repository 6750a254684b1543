"""Named tensors -> Adapter: strict about names, pairs and shapes; never guesses a row order or a scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from h3_mapper.config import H3Config
from h3_mapper.errors import listed
from h3_mapper.lora.adapter import Adapter, bad_values, uneven
from h3_mapper.lora.arrays import Tensor
from h3_mapper.lora.assemble import Found, assemble
from h3_mapper.lora.errors import (
    NonFiniteError,
    UnmappedModuleError,
    UnpairedFactorError,
    UnstatedError,
)
from h3_mapper.lora.formats import FORMATS, Alpha, Fc1Rows, Naming, QkvRows
from h3_mapper.lora.modules import Place, RowOrder, places
from h3_mapper.lora.names import Key, Role, parse
from h3_mapper.lora.scale import AlphaChoice, Scales, diffusers_config, scalar
from h3_mapper.wrappers import PARTITIONS

QKV_KEY, FC1_KEY = "h3.qkv_rows", "h3.fc1_rows"
"""Metadata keys that state the row order of fused projections; every native file written here has them."""

SIZES = "the released model's sizes are assumed; for a model of other sizes pass its config.json (--config, config=)"
OTHER_SIZES = "the adapter was made for a model of other sizes"
"""What to do about an adapter that does not fit, where the caller gave no sizes and where they did."""

PARTITION_KEY = "h3.partition"
"""Metadata key that states the partition (FL2VA, Ref2VA), which most formats' names do not."""


@dataclass(frozen=True, slots=True)
class Statement:
    """What a caller states about an adapter because its file does not, or to overrule it.

    alpha overrules whatever is recorded; assume_alpha is used where nothing is. component and adapter choose among
    several in one file.
    """

    qkv: QkvRows | None = None
    fc1: Fc1Rows | None = None
    alpha: AlphaChoice | None = None
    assume_alpha: AlphaChoice | None = None
    component: str | None = None
    adapter: str | None = None

    @classmethod
    def of(cls, name: str, **others: Any) -> Statement:
        """Everything that naming a format states. `others` overrules fields."""
        if name not in FORMATS:
            raise UnstatedError(
                f"unknown adapter format {name!r}; expected one of {listed(FORMATS, len(FORMATS))}"
            )
        format_ = FORMATS[name]
        stated = cls(format_.qkv, format_.fc1, assume_alpha="rank" if format_.alpha is Alpha.ONE else None)
        return replace(stated, **{key: value for key, value in others.items() if value is not None})

    def assumed(self) -> Statement:
        """With something in every gap, to count and describe; never to convert."""
        return replace(
            self,
            qkv=self.qkv or QkvRows.STACKED,
            fc1=self.fc1 or Fc1Rows.GATE_FIRST,
            assume_alpha=self.assume_alpha or "rank",
        )


def read(
    tensors: Mapping[str, Tensor],
    config: H3Config | None = None,
    *,
    metadata: Mapping[str, str] | None = None,
    peft_config: Mapping[str, Any] | None = None,
    statement: Statement | None = None,
) -> Adapter:
    """Read an adapter in any format of `FORMATS`.

    tensors: name -> 2-D factors (3-D [n, rank, in] where q/k/v or gate/value are stacked), scalars, vectors.
    peft_config: the adapter_config.json object. config: the model's dimensions, the release's by default.
    Raises AdapterError of the kind that fits, or MapperError for a doubled prefix.
    """
    sized = SIZES if config is None else OTHER_SIZES
    config = config or H3Config()
    metadata = dict(metadata or {})
    said = _with_metadata(statement or Statement(), metadata)
    keys = _choose([parse(name) for name in tensors], said)
    naming = _naming(keys, config, sized)
    order = RowOrder(said.qkv, said.fc1)
    modules = _collect(keys, tensors, places(config, naming, order), naming, sized)
    _check_order(modules, order)
    alphas = {name: scalar(m.roles[Role.ALPHA]) for name, m in modules.items() if Role.ALPHA in m.roles}
    component = _component(keys, metadata)
    config_ = peft_config or diffusers_config(metadata, component)
    scales = Scales.of(metadata, config_, alphas, said.alpha, said.assume_alpha)
    adapter, sources = assemble(modules, scales, component, metadata, sized)
    broken, idle = bad_values(adapter)
    if broken:
        raise NonFiniteError(
            f"infinity or NaN in {listed(broken)}; the adapter is broken, train or export it again"
        )
    notes = [f"scale of {len(names)} modules: {source}" for source, names in sources.items()]
    if idle:
        what = "every module" if len(idle) == len(adapter.low_rank) else f"{len(idle)} atoms"
        notes.append(f"no-op adapter: B is exactly zero in {what} ({listed(idle, 3)})")
    return replace(adapter, notes=(*notes, *uneven(adapter, config)))


def _with_metadata(said: Statement, metadata: Mapping[str, str]) -> Statement:
    """Fill row orders and FastH3's scale from what the file itself says; the caller's word wins."""
    rows = metadata.get(QKV_KEY, metadata.get("qkv_layout"))
    halves = metadata.get(FC1_KEY)
    if metadata.get("key_format") == "minimax-h3-native":  # FlashGen's contract, gate first
        halves = halves or Fc1Rows.GATE_FIRST
    scale_one = metadata.get("format") == "fastvideo-lora-v2"
    try:
        return replace(
            said,
            qkv=said.qkv or (QkvRows(rows) if rows else None),
            fc1=said.fc1 or (Fc1Rows(halves) if halves else None),
            assume_alpha=said.assume_alpha or ("rank" if scale_one else None),
        )
    except ValueError as error:
        raise UnstatedError(f"metadata states an unknown row order: {error}") from None


def component_of(names: Iterable[str], metadata: Mapping[str, str]) -> str | None:
    """The component an adapter says it is for, by its names or its metadata; None if it does not say."""
    return _component([parse(name) for name in names], metadata)


def _component(keys: Iterable[Key], metadata: Mapping[str, str]) -> str | None:
    partition = metadata.get(PARTITION_KEY)
    recorded = next((name for name, stated in PARTITIONS.items() if stated == partition), None)
    return next((key.component for key in keys if key.component), recorded)


def _choose(keys: list[Key], said: Statement) -> list[Key]:
    """One partition and one PEFT adapter name; several need a choice."""
    for what, wanted in (("component", said.component), ("adapter", said.adapter)):
        found = {getattr(key, what) for key in keys}
        if wanted is not None:
            keys = [key for key in keys if getattr(key, what) in (wanted, None)]
            if not keys:
                raise UnstatedError(
                    f"no tensor is of {what} {wanted!r}; the file holds {listed(map(str, found))}"
                )
        elif len(found - {None}) > 1:
            raise UnstatedError(f"the file holds {listed(map(str, found))}; choose one with {what}=")
    return keys


def _naming(keys: Iterable[Key], config: H3Config, sized: str) -> Naming:
    """The naming that knows the most module names. Raises UnmappedModuleError if none knows any."""
    modules = {key.module for key in keys}
    if any(key.flat for key in keys):
        return Naming.FLAT
    counts = {
        naming: sum(f"{module}.weight" in places(config, naming) for module in modules)
        for naming in (Naming.NATIVE, Naming.DIFFUSERS, Naming.ENGINE)
    }
    best = max(counts, key=lambda naming: counts[naming])
    if not counts[best]:
        raise UnmappedModuleError(
            f"none of {len(modules)} modules is one of MiniMax-H3's: {listed(modules)}; "
            f"expected names such as transformer_blocks.0.attn.to_q or blocks.0.attn.qkv_proj, and blocks below "
            f"{config.num_layers}; {sized}"
        )
    return best


def _collect(
    keys: Iterable[Key], tensors: Mapping[str, Tensor], known: Mapping[str, Place], naming: Naming, sized: str
) -> dict[str, Found]:
    modules: dict[str, Found] = {}
    unmapped = []
    for key in keys:
        name = f"{key.module}.{'bias' if key.role is Role.DIFF_BIAS else 'weight'}"
        place = known.get(name)
        if place is None or (naming is Naming.FLAT) != key.flat:
            unmapped.append(key.name)
            continue
        module = modules.setdefault(name.removesuffix(".weight"), Found(place))
        if key.role in module.roles:
            raise UnpairedFactorError(f"{key.name}: a second {key.role} for {name}")
        module.roles[key.role] = tensors[key.name]
    if unmapped:
        raise UnmappedModuleError(
            f"{len(unmapped)} of the adapter's tensors name no module of this model ({naming} names): "
            f"{listed(unmapped)}; nothing is dropped in silence: {sized}"
        )
    return modules


def _check_order(modules: Mapping[str, Found], order: RowOrder) -> None:
    hanging = {m.place.hangs_on: name for name, m in modules.items() if m.place.hangs_on}
    for what, choices in (("qkv", QkvRows), ("fc1", Fc1Rows)):
        if what in hanging and getattr(order, what) is None:
            raise UnstatedError(
                f"{hanging[what]}: the row order of a fused {what} cannot be seen; state {what}= "
                f"(--{what}-rows) {' or '.join(choices)}, or the producer's format, --from (kohya, comfy, "
                "vllm-omni: stacked; flashgen, diffsynth: grouped; all of them gate-first)"
            )
