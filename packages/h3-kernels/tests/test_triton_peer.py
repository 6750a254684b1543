"""The peer form's kernels without a GPU: interpreted in a child process, compiled ahead of time for Hopper."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from h3_kernels.collectives.peer import PeerExchange
from h3_kernels.errors import CollectiveError
from interpreter import assert_passes_interpreted

pytest.importorskip("triton")
SUITE = Path(__file__).with_name("triton_peer_interpreted.py")


def test_in_the_interpreter() -> None:
    assert_passes_interpreted(SUITE)


def compiled(name: str, kind: str, aligned: bool) -> str:
    from h3_kernels.triton import peer
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(peer, f"{name}_kernel")
    types = {"source": kind, "target": kind, "pointers": "*i64", "BLOCK": "constexpr"}
    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
    whole = ("source", "target", "pointers", *(("block", "total", "step") if aligned else ()))
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={"BLOCK": peer.BLOCK},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n in whole},
    )
    code: str = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    return code


@pytest.mark.parametrize(("name", "kind"), [("push", "*fp32"), ("pull", "*i16"), ("pull", "*i32")])
def test_values_travel_16_bytes_at_a_time_and_nothing_is_added(name: str, kind: str) -> None:
    code = compiled(name, kind, aligned=True)
    assert re.search(r"ld\.global\S*\.v4\.b32", code)
    assert re.search(r"st\.global\S*\.v4\.b32", code)
    assert not re.search(r"\b(add|fma|atom|red)\.\S*f32", code)


def test_twin_blocks_that_start_anywhere_are_not_read_in_vectors() -> None:
    assert not re.search(r"st\.global\S*\.v4\.b32", compiled("push", "*fp32", aligned=False))


def test_a_tensor_of_the_host_is_refused() -> None:
    exchange = PeerExchange.__new__(PeerExchange)
    exchange.world_size, exchange.rank = 2, 0
    with pytest.raises(CollectiveError, match="got a tensor on cpu"):
        exchange.all_reduce(torch.zeros(2, 8), None, torch.float32)
