"""What trainers and engines put around a parameter's name, and how it is taken off: one rule for sync and LoRA.

1. A segment that only a wrapper writes is dropped wherever it stands: FSDP, activation checkpointing,
   `torch.compile`, and PEFT's `base_layer`.
2. At the front, each of `base_model.model`, `module`, `model`, `diffusion_model` and one partition component may
   stand once. Twice means somebody prefixed names that already had the prefix, and is an error.

Only whole segments between dots are compared, so `transformer.` never eats into `transformer_blocks.`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from h3_mapper.errors import MapperError

INNER = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "base_layer"})
FRONT = frozenset({"module", "model", "diffusion_model"})
PARTITIONS = {"transformer": "FL2VA", "transformer_ref": "Ref2VA", "transformers_ref": "Ref2VA"}
"""Component name -> partition: Diffusers' two names, and vLLM-Omni's attribute for the second."""


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """A name without its wrappers. `component` is the partition component it named, if any."""

    name: str
    component: str | None


@lru_cache(maxsize=1 << 14)
def unwrap(name: str) -> Unwrapped:
    """Take the wrappers off one name. Raises MapperError for a prefix that stands twice.

    Remembered, as a sync asks for the same names every step.
    """
    segments = [s for s in name.split(".") if s not in INNER]
    seen: set[str] = set()
    component: str | None = None
    while segments:
        head = segments[0]
        if head == "base_model" and segments[1:2] == ["model"]:
            segments.pop(0)
            segments[0] = head = "base_model"
        kind = "partition" if head in PARTITIONS else head
        if head != "base_model" and head not in FRONT and head not in PARTITIONS:
            break
        if kind in seen:
            raise MapperError(f"{name}: prefix '{head}.' stands twice; strip it once where the name was made")
        seen.add(kind)
        component = head if kind == "partition" else component
        segments.pop(0)
    return Unwrapped(".".join(segments), component)
