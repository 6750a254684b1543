"""Shared by the adapter tests: random factors as file bytes, and what an adapter does to each atom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from h3_mapper import H3Config
from h3_mapper.lora import Adapter, Raw, Statement
from h3_mapper.lora.floats import narrow, widen
from h3_mapper.lora.formats import Naming
from h3_mapper.lora.modules import places
from mapper_testkit import TINY, write_file

SCALE_ONE = Statement(assume_alpha="rank")

ATTENTION = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
FEED_FORWARD = ("ff.net.0.proj", "ff.net.2")
BLOCKS = (*ATTENTION, *FEED_FORWARD)


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "BF16") -> Raw:
    """Random normal values, rounded once to `dtype`."""
    return narrow(rng.standard_normal(shape, np.float32), dtype)


def block_modules(config: H3Config = TINY, suffixes: Iterable[str] = BLOCKS) -> list[str]:
    """Diffusers module names of every block and refiner block."""
    heads = [f"transformer_blocks.{n}" for n in range(config.num_layers)]
    heads += [f"token_refiner.refiner_blocks.{n}" for n in range(config.num_refiner_layers)]
    return [f"{head}.{suffix}" for head in heads for suffix in suffixes]


def diffusers_lora(
    modules: Iterable[str] | None = None,
    *,
    rank: int | Mapping[str, int] = 3,
    dtype: str = "BF16",
    seed: int = 0,
    prefix: str = "transformer.",
    infix: str = "",
    config: H3Config = TINY,
) -> dict[str, Raw]:
    """A Diffusers-named adapter with a factor pair for each module."""
    rng = np.random.default_rng(seed)
    known = places(config, Naming.DIFFUSERS)
    tensors = {}
    for module in block_modules(config) if modules is None else modules:
        out, inner = known[f"{module}.weight"].shape
        r = rank if isinstance(rank, int) else next((v for k, v in rank.items() if module.endswith(k)), 3)
        tensors[f"{prefix}{module}.lora_A{infix}.weight"] = values(rng, (r, inner), dtype)
        tensors[f"{prefix}{module}.lora_B{infix}.weight"] = values(rng, (out, r), dtype)
    return tensors


def products(adapter: Adapter) -> dict[str, np.ndarray]:
    """scale * B @ A by atom, fp64, summed over the rank in ascending order: equal factors give equal bits."""
    result = {}
    for name, term in adapter.low_rank.items():
        a, b = widen(term.a).astype("f8"), widen(term.b).astype("f8")
        total = np.zeros((b.shape[0], a.shape[1]))
        for r in range(term.rank):
            total += b[:, r : r + 1] * a[r : r + 1]
        result[name] = float(term.scale) * total
    return result


def assert_same_products(one: Adapter, two: Adapter) -> None:
    """Every atom gets the same product, bit for bit; an absent atom counts as exact zeros."""
    left, right = products(one), products(two)
    for name in left.keys() | right.keys():
        if name in left and name in right:
            np.testing.assert_array_equal(left[name], right[name], err_msg=name)
        else:
            assert not (left.get(name, right.get(name))).any(), f"{name} is adapted on one side only"


def write_lora(path: str, rows: int = TINY.inner_size, columns: int = TINY.hidden_size) -> None:
    """An adapter of rank 2 on one linear, all zeros."""
    name = "transformer.transformer_blocks.0.attn.to_q.lora_{}.weight"
    factors = {"A": ("BF16", [2, columns], bytes(4 * columns)), "B": ("BF16", [rows, 2], bytes(4 * rows))}
    write_file(Path(path), {name.format(side): factor for side, factor in factors.items()})
