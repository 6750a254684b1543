"""Compiled CPU chain: ``cpu_chain.cpp`` built once by the system's C++ compiler into a keyed cache, through ctypes.

Optional: without a compiler, or with ``H3_CPU_CHAIN=torch``, ``load`` returns None and reference.py runs the same
order in torch operations, with the same bits. A test compares the two.
"""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

SWITCH = "H3_CPU_CHAIN"
CACHE = "H3_KERNELS_CACHE"
_SOURCE = Path(__file__).with_name("cpu_chain.cpp")
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-fast-math")
# A product this small costs less than starting a thread (about 20 us each on Linux).
_PRODUCTS_PER_THREAD = 1 << 20

Kernel = Callable[[Tensor, Tensor, int], Tensor]


@functools.cache
def load() -> Kernel | None:
    """The compiled ``(a [M, K], b [N, K], units) -> root [M, N] fp32`` of bf16 or fp32 operands, or None."""
    if os.environ.get(SWITCH, "").lower() == "torch":
        return None
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        logger.info("no C++ compiler found: the CPU chain runs in torch operations (same bits, slower)")
        return None
    try:
        library = ctypes.CDLL(str(build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the CPU chain could not be built or loaded, torch operations serve it: %s", error)
        return None
    return _wrap(library.h3_tree_gemm_f32)


def cache_directory() -> Path:
    """Where built libraries are kept: ``H3_KERNELS_CACHE``, else ``h3-kernels`` in the user's cache directory."""
    chosen = os.environ.get(CACHE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "h3-kernels"


def build(compiler: str) -> Path:
    """Path of the library, compiled now unless the cache holds this source, these flags and this compiler's version.

    Raises subprocess.CalledProcessError if the compiler fails, OSError if the cache cannot be written.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
    key = hashlib.sha256(b"\0".join([_SOURCE.read_bytes(), " ".join(_FLAGS).encode(), version])).hexdigest()[
        :16
    ]
    target = cache_directory() / f"cpu_chain-{key}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / target.name
            command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(built)]
            subprocess.run(command, capture_output=True, check=True, timeout=300)
            built.replace(target)  # atomic: concurrent builders end with one whole file
    return target


def _wrap(function: "ctypes._NamedFuncPointer") -> Kernel:
    pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    function.restype = None
    function.argtypes = [pointer, pointer, i64, i64, i32, pointer, i64, i64, i64, i32, i32]

    def kernel(a: Tensor, b: Tensor, units: int) -> Tensor:
        a = a.float().contiguous()
        (m, k), n = a.shape, b.shape[0]
        # Written through a pointer: a default dtype or device of the process must not reach it.
        out = torch.empty(m, n, dtype=torch.float32, device="cpu")
        threads = min(torch.get_num_threads(), 1 + m * n * k // _PRODUCTS_PER_THREAD)
        strides = b.stride(0), b.stride(1), b.dtype == torch.bfloat16
        function(a.data_ptr(), b.data_ptr(), *strides, out.data_ptr(), m, n, k, units, threads)
        return out

    return kernel
