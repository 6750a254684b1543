"""How vLLM-Omni finds the CPU platform of ``h3_adapter_vllm.testing.cpu_platform``: as any hardware plugin, by an entry
point of the group ``vllm_omni.platform_plugins``. Importing this imports no engine."""

from __future__ import annotations

from pathlib import Path

PLATFORM = "h3_adapter_vllm.testing.cpu_platform.CpuOmniPlatform"
ENTRY_POINTS = f"[vllm_omni.platform_plugins]\nh3-cpu = {__name__}:register\n"


def register() -> str:
    """What the entry point calls: the platform's qualified name."""
    return PLATFORM


def announce(folder: Path) -> None:
    """Write a distribution that has nothing but the entry point into ``folder``, for ``PYTHONPATH``."""
    metadata = folder / "h3_cpu_platform-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: h3-cpu-platform\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
