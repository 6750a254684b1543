"""A CPU platform for vLLM-Omni, which ships none: enough to run its servers, executors and workers in tests.

``h3_adapter_vllm.testing.cpu`` announces it; nothing of the engine is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


class CpuOmniPlatform(OmniPlatform, CpuPlatform):  # type: ignore[misc]
    """vLLM's CPU platform with the additions vLLM-Omni asks a platform for."""

    _omni_enum = OmniPlatformEnum.OOT
    device_control_env_var = "CPU_VISIBLE_MEMORY_NODES"

    @classmethod
    def get_diffusion_attn_backend_cls(cls, *_: Any, **__: Any) -> str:
        """SDPA for every role."""
        return "h3_adapter_vllm.testing.cpu_attention.CpuSdpaBackend"

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        """The CPU, whatever the rank."""
        return torch.device("cpu")

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Nothing to set."""

    @classmethod
    def get_device_count(cls) -> int:
        """As many ranks as a test asks for."""
        return 8

    @classmethod
    def get_device_version(cls) -> str | None:
        """None: no driver."""
        return None

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        """The engine's own."""
        return "vllm_omni/deploy"

    @classmethod
    def synchronize(cls) -> None:
        """Nothing runs behind the host's back."""

    @classmethod
    def empty_cache(cls) -> None:
        """Nothing is kept."""

    @classmethod
    def reset_peak_memory_stats(cls, *_: Any) -> None:
        """Nothing is counted."""

    @classmethod
    def max_memory_reserved(cls, *_: Any) -> int:
        """Nothing is counted."""
        return 0

    max_memory_allocated = max_memory_reserved

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        """Enough."""
        return 1 << 34

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        """Free and total."""
        return 1 << 34, 1 << 35

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        """Eager only."""
        return False

    @classmethod
    def supports_cpu_offload(cls) -> bool:
        """There is no device to offload from."""
        return False
