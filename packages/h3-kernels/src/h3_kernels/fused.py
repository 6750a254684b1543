"""Runs the extension: picks a configuration, keeps scratch and flags per stream, launches."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from h3_kernels import extension, tuning
from h3_kernels.extension import ExtensionError, Fma, Gemm, Library
from h3_kernels.providers import GemmCall


@dataclass(frozen=True, slots=True)
class Plan:
    """A configuration of the library for one shape: its index, its tile, and the scratch it takes."""

    config: int
    tile: tuning.FusedTile
    scratch_bytes: int
    nodes: int


@dataclass(slots=True)
class Workspace:
    """What one stream's launches share: they run one after the other, and each leaves the flags zero."""

    capture: int
    scratch: Tensor
    flags: Tensor | None = None


class FusedGemm:
    """The fused GEMM on every device of capability 9.0 in this process."""

    def __init__(self) -> None:
        self._workspaces: dict[tuple[torch.device, int], Workspace] = {}

    def refuses(self, call: GemmCall) -> str | None:
        """Why the library has no plan for ``call``, or None."""
        try:
            plan(call.m, call.n, call.k, call.units, call.a_layout != "k", call.b_layout != "k")
        except ExtensionError as error:
            return str(error)
        return None

    def run(
        self,
        a: Tensor,
        b: Tensor,
        *,
        units: int,
        out_dtype: torch.dtype,
        bias: Tensor | None,
        tile: tuning.FusedTile | None = None,
    ) -> Tensor:
        """[M, N] = a [M, K] times b [N, K] transposed; ``tile`` overrides tuning (benchmarks, tests).

        Raises ExtensionError if no configuration covers the call.
        """
        (m, k), n = a.shape, b.shape[0]
        (a_stored, a_transposed), (b_stored, b_transposed) = _stored(a), _stored(b)
        y = torch.empty(m, n, dtype=out_dtype, device=a.device)
        with torch.cuda.device(a.device):
            library = extension.load((9, 0))
            chosen = plan(m, n, k, units, a_transposed, b_transposed, tile)
            call = describe(chosen, (m, n, k), units, a_transposed, b_transposed)
            if chosen.tile.swap:
                a_stored, b_stored = b_stored, a_stored
            call.a, call.a_stride = a_stored.data_ptr(), a_stored.stride(0)
            call.b, call.b_stride = b_stored.data_ptr(), b_stored.stride(0)
            call.y, call.y_stride, call.y_is_float = y.data_ptr(), y.stride(0), out_dtype == torch.float32
            if bias is not None:
                bias = bias.contiguous()
                call.bias, call.bias_is_float = bias.data_ptr(), bias.dtype == torch.float32
            stream = torch.cuda.current_stream().cuda_stream
            if chosen.scratch_bytes:
                space = self._workspace(library, a.device, stream, chosen)
                call.scratch = space.scratch.data_ptr()
                call.flags = None if space.flags is None else space.flags.data_ptr()
            library.gemm(call, stream)
        return y

    def _workspace(self, library: Library, device: torch.device, stream: int, chosen: Plan) -> Workspace:
        """The stream's workspace, grown if need be.

        Memory made while a graph is captured belongs to that graph, and its zeroing is one of its nodes: it serves
        this capture and no other launch.
        """
        capture = library.capture_id(stream)
        space = self._workspaces.get((device, stream))
        if space is None or space.capture != capture:
            space = self._workspaces[device, stream] = Workspace(capture, torch.empty(0, device=device))
        if space.scratch.numel() < chosen.scratch_bytes:
            space.scratch = torch.empty(chosen.scratch_bytes, dtype=torch.uint8, device=device)
        if space.flags is None and chosen.nodes:
            space.flags = torch.zeros(library.flag_bytes // 4, dtype=torch.int32, device=device)
        return space


@functools.lru_cache(maxsize=4096)
def plan(
    m: int,
    n: int,
    k: int,
    units: int,
    a_transposed: bool,
    b_transposed: bool,
    tile: tuning.FusedTile | None = None,
) -> Plan:
    """The cheapest legal configuration on the current device, or ``tile``. Raises ExtensionError with the reasons."""
    library = extension.load((9, 0))
    index = {_key(config): i for i, config in enumerate(library.configs)}
    layouts = {"a_transposed": a_transposed, "b_transposed": b_transposed}
    tiles = [tile] if tile else tuning.fused_candidates(m, units, **layouts)
    legal: list[tuple[float, Plan]] = []
    reasons = []
    for candidate in tiles:
        config = index[candidate.key]
        clusters = library.clusters(config)
        choice = Plan(config, candidate, 0, 0)
        try:
            size, nodes = library.scratch(
                describe(choice, (m, n, k), units, a_transposed, b_transposed), clusters
            )
        except ExtensionError as error:
            reasons.append(f"{candidate.n} columns: {error}")
            continue
        if size > tuning.SCRATCH_LIMIT:
            reasons.append(
                f"{candidate.n} columns: {size} bytes of scratch, the limit is {tuning.SCRATCH_LIMIT}"
            )
            continue
        predicted = tuning.cost(candidate, m, n, k, units, clusters)
        legal.append((predicted, Plan(config, candidate, size, nodes)))
    if not legal:
        raise ExtensionError(f"no configuration for {m} x {n} x {k} in {units} units: " + "; ".join(reasons))
    return min(legal, key=lambda entry: entry[0])[1]


def describe(
    chosen: Plan, sizes: tuple[int, int, int], units: int, a_transposed: bool, b_transposed: bool
) -> Gemm:
    """The C call without its pointers: aligned placeholders stand in, so that the library can judge the shape."""
    m, n, k = sizes
    tile = chosen.tile
    first, second = (n, m) if tile.swap else (m, n)
    if tile.swap:
        a_transposed, b_transposed = b_transposed, a_transposed
    return Gemm(
        a=16, b=16, y=16, m=first, n=second, k=k,
        a_stride=first if a_transposed else k, b_stride=second if b_transposed else k, y_stride=n,
        a_transposed=a_transposed, b_transposed=b_transposed, units=units, config=chosen.config,
        split=tile.split if tile.split < units else 0, band=tile.band,
    )  # fmt: skip


def tree_reduce(partials: Tensor, y: Tensor, bias: Tensor | None) -> None:
    """y [M, N] = the canonical tree over contiguous fp32 partials [units, M, N], bias [N], one rounding.

    By the extension where it is built for the device, else by Triton, with the same bits.
    """
    library = _library(torch.cuda.get_device_capability(y.device))
    if library is None or y.shape[1] % 4 or y.stride(0) % 4:
        from h3_kernels.triton.tree import tree_reduce as portable

        y.copy_(portable(partials, out_dtype=y.dtype, bias=bias))
        return
    bias_pointer = None if bias is None else bias.data_ptr()
    floats = (y.dtype == torch.float32, bias is not None and bias.dtype == torch.float32)
    sizes = (y.shape[0], y.shape[1], y.stride(0))
    stream = torch.cuda.current_stream().cuda_stream
    library.tree_reduce(
        partials.data_ptr(), y.data_ptr(), bias_pointer, sizes, partials.shape[0], *floats, stream
    )


def fma_refuses(capability: tuple[int, int] | None) -> str | None:
    """Why the extension has no fp32 products for a device of ``capability``, or None."""
    if capability is None:
        return "runs on CUDA"
    try:
        extension.load(capability)
    except ExtensionError as error:
        return str(error)
    return None


def fma_gemm(a: Tensor, b: Tensor, bias: Tensor | None, tile: int | None = None) -> Tensor:
    """[M, N] = a [M, K] times b [N, K] transposed plus bias [N], all fp32, rows along K; one chain an element.

    ``tile`` overrides tuning (benchmarks, tests). Raises ExtensionError where the extension cannot be built.
    """
    (m, k), n = a.shape, b.shape[0]
    y = torch.empty(m, n, dtype=torch.float32, device=a.device)
    bias = None if bias is None else bias.contiguous()
    call = Fma(
        a=a.data_ptr(), b=b.data_ptr(), y=y.data_ptr(), bias=None if bias is None else bias.data_ptr(),
        m=m, n=n, k=k, a_stride=a.stride(0), b_stride=b.stride(0), y_stride=n,
        tile=tile or tuning.fma_tile(m, n),
    )  # fmt: skip
    with torch.cuda.device(a.device):
        library = extension.load(torch.cuda.get_device_capability(a.device))
        library.fma(call, torch.cuda.current_stream().cuda_stream)
    return y


@functools.cache
def _library(capability: tuple[int, int]) -> Library | None:
    try:
        return extension.load(capability)
    except ExtensionError:
        return None


def _stored(t: Tensor) -> tuple[Tensor, bool]:
    """The operand as its memory lies, rows contiguous and where the copy engine reads them (16-byte boundaries, copied
    there if need be), and whether that is its transpose."""
    transposed = t.stride(1) != 1
    rows = t.t() if transposed else t
    if rows.data_ptr() % 16 or rows.stride(0) % 8:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows, transposed


def _key(config: extension.Config) -> tuple[int, ...]:
    names = ("tile_n", "leaf", "cluster", "a_transposed", "b_transposed", "swap", "halves", "stages")
    return tuple(getattr(config, name) for name in names)
