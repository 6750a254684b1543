"""The hardware the project knows: one table, read by nox, the evidence writer and the docs.

Standard library only; torch is imported by `detect` alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PROJECTION = "h3-projection-gemm-v1"
PARALLEL = "h3-parallel-v1"


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU: how to recognise it, the oldest software that serves it, the contracts it may run."""

    key: str
    name_pattern: str
    capability: tuple[int, int]
    min_torch: tuple[int, int]
    min_triton: tuple[int, int]
    min_cuda: tuple[int, int]
    contracts: tuple[str, ...]
    providers: tuple[str, ...]


PORTABLE_PROVIDERS = ("triton", "cublaslt", "bmm-tree")
COMPILED_PROVIDERS = (*PORTABLE_PROVIDERS, "fma")
HOPPER_PROVIDERS = (*COMPILED_PROVIDERS, "fused-sm90")

HARDWARE = (
    Hardware("h100", r"H100", (9, 0), (2, 11), (3, 6), (12, 8), (PROJECTION, PARALLEL), HOPPER_PROVIDERS),
    Hardware("h200", r"H200", (9, 0), (2, 11), (3, 6), (12, 8), (PROJECTION, PARALLEL), HOPPER_PROVIDERS),
    Hardware(
        "b200", r"\bG?B200", (10, 0), (2, 11), (3, 6), (12, 8), (PROJECTION, PARALLEL), COMPILED_PROVIDERS
    ),
    Hardware("a100", r"A100", (8, 0), (2, 11), (3, 6), (12, 8), (PROJECTION, PARALLEL), PORTABLE_PROVIDERS),
)


class WrongHardware(RuntimeError):
    """The device or its software is not what the session is for; the message says what was found and expected."""


@dataclass(frozen=True)
class Device:
    """What this process sees: device name, compute capability, count, software versions."""

    name: str
    capability: tuple[int, int]
    count: int
    torch: str
    triton: str
    cuda: str


def by_key(key: str) -> Hardware:
    """The table's row `key`; raises `WrongHardware` with the known keys."""
    for row in HARDWARE:
        if row.key == key:
            return row
    raise WrongHardware(f"unknown hardware {key!r}; known: {', '.join(row.key for row in HARDWARE)}")


def detect() -> Device:
    """The first CUDA device of this process; raises `WrongHardware` when there is none."""
    try:
        import torch
    except ImportError as error:
        raise WrongHardware(
            f"torch does not import ({error}); a GPU session uses the environment's own torch"
        ) from error
    if not torch.cuda.is_available():
        raise WrongHardware(
            f"no CUDA device is visible to torch {torch.__version__}; a GPU session needs one"
        )
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "0.0"
    return Device(
        name=torch.cuda.get_device_name(0),
        capability=torch.cuda.get_device_capability(0),
        count=torch.cuda.device_count(),
        torch=torch.__version__,
        triton=triton,
        cuda=torch.version.cuda or "0.0",
    )


def release(version: str) -> tuple[int, int]:
    """The first two numbers of a version string."""
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    return (numbers[0], numbers[1] if len(numbers) > 1 else 0)


def mismatches(row: Hardware, device: Device, gpus: int = 1) -> list[str]:
    """Why `device` cannot serve the session of `row`; empty when it can."""
    wrong = []
    if not re.search(row.name_pattern, device.name):
        wrong.append(f"device is {device.name!r}, expected a name matching {row.name_pattern!r}")
    if device.capability != row.capability:
        wrong.append(f"compute capability is {device.capability}, expected {row.capability}")
    if device.count < gpus:
        wrong.append(f"{device.count} device(s) visible, expected {gpus}")
    found = {"torch": device.torch, "triton": device.triton, "cuda": device.cuda}
    for name, lowest in (("torch", row.min_torch), ("triton", row.min_triton), ("cuda", row.min_cuda)):
        if release(found[name]) < lowest:
            wrong.append(f"{name} is {found[name]}, expected {lowest[0]}.{lowest[1]} or newer")
    return wrong


def require(key: str, gpus: int = 1) -> Device:
    """The device, when it is what `key` names; else `WrongHardware` naming every difference in one line."""
    device = detect()
    wrong = mismatches(by_key(key), device, gpus)
    if wrong:
        raise WrongHardware(f"gpu-{key} cannot run here: {'; '.join(wrong)}")
    return device
