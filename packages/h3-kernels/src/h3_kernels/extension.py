"""The CUDA extension: ``csrc`` built once by nvcc into a keyed cache, loaded through its C ABI (csrc/abi.h).

No torch header is compiled in: operands cross as pointers and the stream as an integer, so one library serves every
torch version and a wheel stays pure Python. Built on first use; without nvcc ``load`` raises ``ExtensionError`` and the
Triton provider serves with the same bits.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from h3_kernels.cpu_chain import cache_directory
from h3_kernels.errors import H3KernelsError

SOURCES = Path(__file__).with_name("csrc")
NVCC = "H3_NVCC"
_FLAGS = ("-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC", "--threads", "0")
_FILES = {
    (9, 0): ("tree_gemm_sm90.cu", "tree_reduce.cu", "fma_gemm.cu"),
    (10, 0): ("tree_reduce.cu", "fma_gemm.cu"),
}
"""What each compute capability builds, as its architecture-specific target (sm_90a, sm_100a)."""


class ExtensionError(H3KernelsError, RuntimeError):
    """The extension cannot be built or loaded here; the message says why, with the compiler's last lines."""


class Gemm(ctypes.Structure):
    """H3Gemm of csrc/abi.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "y", "bias")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "a_stride", "b_stride", "y_stride")),
        *(
            (name, ctypes.c_int32)
            for name in (
                "a_transposed",
                "b_transposed",
                "y_is_float",
                "bias_is_float",
                "units",
                "config",
                "split",
                "band",
            )
        ),
        ("scratch", ctypes.c_void_p),
        ("flags", ctypes.c_void_p),
    )


class Fma(ctypes.Structure):
    """H3Fma of csrc/abi.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "y", "bias")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "a_stride", "b_stride", "y_stride")),
        ("tile", ctypes.c_int32),
    )


class Config(ctypes.Structure):
    """H3Config of csrc/abi.h: one compiled tile of the fused GEMM."""

    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in (
            *("tile_m", "tile_n", "leaf", "cluster", "a_transposed", "b_transposed", "swap", "halves"),
            *("stages", "shared_bytes", "kept_bytes"),
        )
    )


class Library:
    """The loaded extension; every method raises ExtensionError with the library's own text if a call fails."""

    def __init__(self, path: Path) -> None:
        try:
            self._c = ctypes.CDLL(str(path))
        except OSError as error:
            raise ExtensionError(f"{path} does not load: {error}") from error
        self._c.h3_error_text.restype = ctypes.c_char_p
        pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self._c.h3_tree_reduce.argtypes = [pointer] * 3 + [i64] * 3 + [i32] * 3 + [pointer]
        self._c.h3_fma_gemm.argtypes = [ctypes.POINTER(Fma), pointer]
        self._c.h3_capture_id.argtypes = [pointer, ctypes.POINTER(ctypes.c_ulonglong)]
        self.has_gemm = hasattr(self._c, "h3_sm90_gemm")
        if self.has_gemm:
            self._c.h3_sm90_gemm.argtypes = [ctypes.POINTER(Gemm), pointer]
            self._c.h3_sm90_flag_bytes.restype = i64
            self.flag_bytes = int(self._c.h3_sm90_flag_bytes())
            self.configs = tuple(self._config(i) for i in range(self._c.h3_sm90_config_count()))

    def _config(self, index: int) -> Config:
        config = Config()
        self._check(self._c.h3_sm90_config(index, ctypes.byref(config)), "config")
        return config

    def _check(self, code: int, what: str) -> None:
        if code != 0:
            raise ExtensionError(f"{what}: {self._c.h3_error_text(code).decode()} (code {code})")

    def gemm(self, call: Gemm, stream: int) -> None:
        """Launch the fused GEMM of ``call`` on ``stream``."""
        self._check(self._c.h3_sm90_gemm(ctypes.byref(call), stream), "fused GEMM")

    def clusters(self, config: int) -> int:
        """Clusters of configuration ``config`` that the current device holds at once."""
        count = ctypes.c_int()
        self._check(self._c.h3_sm90_clusters(config, ctypes.byref(count)), "occupancy")
        return count.value

    def scratch(self, call: Gemm, clusters: int) -> tuple[int, int]:
        """Bytes of scratch ``call`` needs on ``clusters`` resident clusters, and how many subtree roots it sends."""
        size, nodes = ctypes.c_int64(), ctypes.c_int32()
        code = self._c.h3_sm90_scratch(ctypes.byref(call), clusters, ctypes.byref(size), ctypes.byref(nodes))
        self._check(code, "scratch")
        return size.value, nodes.value

    def tree_reduce(self, partials: int, y: int, bias: int | None, sizes: tuple[int, int, int], units: int,
                    y_is_float: bool, bias_is_float: bool, stream: int) -> None:  # fmt: skip
        """Tree over fp32 ``partials`` [units, rows, n]; ``sizes`` is (rows, n, elements between rows of y)."""
        code = self._c.h3_tree_reduce(partials, y, bias, *sizes, units, y_is_float, bias_is_float, stream)
        self._check(code, "tree reduction")

    def fma(self, call: Fma, stream: int) -> None:
        """Launch the fp32 GEMM of ``call`` on ``stream``."""
        self._check(self._c.h3_fma_gemm(ctypes.byref(call), stream), "fp32 GEMM")

    def capture_id(self, stream: int) -> int:
        """Identity of the CUDA graph capture ``stream`` is part of, 0 outside one."""
        identity = ctypes.c_ulonglong()
        self._check(self._c.h3_capture_id(stream, ctypes.byref(identity)), "capture state")
        return identity.value


@functools.cache
def load(capability: tuple[int, int]) -> Library:
    """The library for one compute capability, built now unless cached. Raises ExtensionError."""
    return Library(build(capability))


def nvcc() -> str:
    """Path of nvcc: ``H3_NVCC``, then CUDA_HOME, PATH and /usr/local/cuda. Raises ExtensionError without one."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    candidates = (
        os.environ.get(NVCC),
        str(Path(home) / "bin" / "nvcc"),
        shutil.which("nvcc"),
        "/usr/local/cuda/bin/nvcc",
    )
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise ExtensionError(
        f"nvcc not found: install the CUDA toolkit (12.3 or newer), or point {NVCC} at its nvcc"
    )


def command(
    compiler: str, capability: tuple[int, int], output: Path, extra: tuple[str, ...] = ()
) -> list[str]:
    """The nvcc call that builds the library for ``capability``. Raises ExtensionError if none is written for it."""
    files = _FILES.get(capability)
    if files is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in _FILES)
        raise ExtensionError(
            f"no CUDA kernels for compute capability {capability[0]}.{capability[1]}; there are for {known}"
        )
    target = f"{capability[0]}{capability[1]}a"
    return [
        compiler,
        *_FLAGS,
        "-gencode",
        f"arch=compute_{target},code=sm_{target}",
        *extra,
        *(str(SOURCES / name) for name in files),
        "-o",
        str(output),
    ]


def build(capability: tuple[int, int]) -> Path:
    """Path of the library for ``capability``, compiled now unless the cache holds these sources, flags and nvcc.

    Takes about 20 s. Concurrent processes build once (file lock). Raises ExtensionError.
    """
    compiler = nvcc()
    template = command(compiler, capability, Path("out"))
    target = cache_directory() / f"h3-sm{capability[0]}{capability[1]}a-{_key(compiler, template)}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                _compile(compiler, capability, target)
    except OSError as error:
        raise ExtensionError(f"the extension cannot be built in {target.parent}: {error}") from error
    return target


def _key(compiler: str, template: list[str]) -> str:
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ExtensionError(f"{compiler} --version failed: {error}") from error
    digest = hashlib.sha256(version)
    digest.update(" ".join(word for word in template if not word.startswith(str(SOURCES))).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, capability: tuple[int, int], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        try:
            done = subprocess.run(
                command(compiler, capability, built), capture_output=True, text=True, check=False, timeout=900
            )
        except subprocess.TimeoutExpired as error:
            raise ExtensionError(f"{compiler} did not finish in {error.timeout:.0f} s") from error
        if done.returncode != 0:
            lines = (done.stderr + done.stdout).strip().splitlines()[-8:]
            raise ExtensionError(f"{compiler} failed with code {done.returncode}: " + " | ".join(lines))
        built.replace(target)  # atomic: readers see a whole file or none


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
