"""The mapping reference, generated from the table: `python -m h3_mapper.docs > docs/mapping.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from h3_mapper.config import DERIVED_NATIVE_KEYS, NATIVE_KEYS, H3Config
from h3_mapper.plan import groups, tensors
from h3_mapper.spec import Layout
from h3_mapper.table import TABLE, Rule, Section, Slot

_HEAD = """# Mapping reference

Generated from `h3_mapper.table` by `python -m h3_mapper.docs`; a test keeps it current. Do not edit.

A layout says where rows (dim 0) of each tensor lie. No value, dtype or column ever changes between layouts.

| layout | tensors | names | qkv rows | fc1 rows | `rope.inv_freq` |
|---|---|---|---|---|---|
| `diffusers` | {diffusers} | Diffusers | three tensors | [value; gate] | recomputed from config.json |
| `release` | {release} | native | per head [q k v] | [gate; value] | stored |
| `module` | {module} | native | [q; k; v] | [gate; value] | stored (optional when read) |

`release` and `module` have the same names, shapes and dtypes. Nothing in a file tells them apart except the
`h3.layout` entry h3-mapper writes into its safetensors metadata. `release` is what MiniMax publishes and what
vLLM-Omni's `load_weights` expects; `module` is what a loaded vLLM-Omni module's `state_dict()` holds and what
Comfy-style single files store.

## Tensors

Sizes in brackets are the released model's. `tp` is how tensor parallelism cuts the native tensor: `column` cuts
dim 0 of every part, `row` cuts dim 1, `whole` does not cut.
"""

_TAIL = """
## Row orders

- **qkv_proj, `release`**: {heads} turns of [{head} rows of q, {head} of k, {head} of v], one turn a head.
- **qkv_proj, `module`**: all {inner} rows of q, then of k, then of v.
- **fc1**: native rows are the gate's {ffn}, then the value's {ffn}; Diffusers has the value first.

## Derived tensor

`rope.inv_freq` is `1 / theta**(2i / 2n)` for i = 0 .. n - 1, rounded to fp32 after the division of the exponent, the
power and the reciprocal. Writing `theta**-(2i / 2n)` instead gives other bits in 4 of the 16 released values. It is
checked bit for bit where it is stored, and written anew.

## Groups

Streaming works in {groups} groups (released model): `model` (everything outside a block), each
`token_refiner.blocks.N` and each `blocks.N`. No tensor needs rows from two groups.

## config.json

Both spellings are read; the target's is written. Keys not listed keep their name, unrelated keys are kept.

| Diffusers | native |
|---|---|
"""


def mapping_reference() -> str:
    """The whole document."""
    config = H3Config()
    head = _HEAD.format(**{str(layout): len(tensors(config, layout)) for layout in Layout})
    tail = _TAIL.format(
        heads=config.num_attention_heads,
        head=config.attention_head_dim,
        inner=config.inner_size,
        ffn=config.ffn_dim,
        groups=len(groups(config)),
    )
    keys = [f"| `{diffusers}` | `{native}` |" for diffusers, native in NATIVE_KEYS.items()]
    keys += [f"| (derived: {source}) | `{native}` |" for native, source in DERIVED_NATIVE_KEYS.items()]
    return head + "\n".join(_sections(config)) + "\n" + tail + "\n".join(keys) + "\n"


def _sections(config: H3Config) -> Iterator[str]:
    for section in TABLE:
        yield f"\n### {_title(section, config)}\n"
        yield "| native | Diffusers | shape of a part | dtype | parts | tp |"
        yield "|---|---|---|---|---|---|"
        yield from (_row(rule, config) for rule in section.rules)


def _title(section: Section, config: H3Config) -> str:
    if section.count:
        return f"`{section.native}*` = `{section.diffusers}*` ({getattr(config, section.count)} of them)"
    if section.native:
        return f"`{section.native}*`"
    return f"Outside blocks, from `{section.rules[0].name}`"


def _row(rule: Rule, config: H3Config) -> str:
    shape = " x ".join(f"{dim} [{getattr(config, dim)}]" for dim in rule.shape)
    theirs = "<br>".join(_slot(slot, rule) for slot in rule.diffusers) or "-"
    note = f" (with `{rule.flag}`)" if rule.flag else " (derived)" if rule.derived else ""
    parts = " ".join(rule.parts)
    return f"| `{rule.name}`{note} | {theirs} | {shape} | {rule.dtype} | {parts} | {rule.parallel} |"


def _slot(slot: Slot, rule: Rule) -> str:
    """A Diffusers tensor, with its parts where they are not simply the rule's."""
    order = "" if slot.parts == rule.parts else f" [{'; '.join(slot.parts)}]"
    return f"`{slot.name}`{order}"


if __name__ == "__main__":
    sys.stdout.write(mapping_reference())
