"""Component on disk -> its layout and configuration, checked tensor by tensor. Headers only, plus rope.inv_freq."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from h3_mapper.check import Origin, Seen, check, check_derived, layout_of
from h3_mapper.config import H3Config, refuse_other_model
from h3_mapper.errors import MixedLayoutsError, ShapeError
from h3_mapper.infer import infer_config
from h3_mapper.pieces import opened
from h3_mapper.plan import derived
from h3_mapper.source import LAYOUT_KEY, Component, open_source
from h3_mapper.spec import Layout
from h3_mapper.variants import ADAPTER, named


@dataclass(frozen=True, slots=True)
class Identified:
    """A component that passed every check."""

    component: Component
    layout: Layout
    config: H3Config


def seen(component: Component) -> Seen:
    """The component's tensors as `check` wants them."""
    return {name: (entry.shape, entry.dtype) for name, (_, entry) in component.tensors.items()}


def configuration(component: Component, layout: Layout) -> H3Config:
    """From config.json, or from shapes where there is none; gates as the names say."""
    tensors = seen(component)
    if component.config is not None:
        config = H3Config.from_mapping(component.config, config_path(component))
    else:
        config = infer_config(tensors, layout, str(component.given))
    return config.with_gates(any(name.endswith("to_gate_compress.weight") for name in tensors))


def config_path(component: Component) -> str:
    """The component's config.json, for messages."""
    return str(component.path / "config.json")


def identified(component: Component, stated: Layout | None = None) -> Identified:
    """Layout, configuration and every check. Raises the MapperError kind that says what is wrong."""
    tensors, where = seen(component), str(component.given)
    if component.config is not None and named(tensors) != ADAPTER:
        refuse_other_model(component.config, config_path(component))
    if shards := [header for header in component.headers if "h3.tp" in header.metadata]:
        part = f"rank {shards[0].metadata.get('h3.rank')} of tp {shards[0].metadata['h3.tp']}"
        raise ShapeError(f"{where}: is {part} of a checkpoint; convert and verify the whole one")
    if component.declared and not all(LAYOUT_KEY in header.metadata for header in component.headers):
        raise MixedLayoutsError(
            f"{where}: some shards declare a layout and some do not; they are not one checkpoint: copy them again, "
            "together"
        )
    layout = layout_of(tensors, component.declared, stated, where)
    config = configuration(component, layout)
    check(tensors, config, layout, where, Origin.SHAPES if component.config is None else Origin.FILE)
    with opened(component) as files:
        for name, expected in derived(config, layout).items():
            if name in tensors:
                check_derived(name, files.read(name), expected, where)
    return Identified(component, layout, config)


def identified_all(path: Path, stated: Layout | None = None) -> dict[str, Identified]:
    """Every component under `path`, by relative folder."""
    return {name: identified(component, stated) for name, component in open_source(path).items()}
