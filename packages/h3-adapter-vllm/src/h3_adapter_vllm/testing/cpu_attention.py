"""vLLM-Omni's SDPA attention on a CPU. A module of its own: the engine imports it once its platform is known."""

from __future__ import annotations

from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuSdpaImpl(SDPAImpl):  # type: ignore[misc]
    """The engine's SDPA, whose dispatcher knows no platform with a CPU."""

    forward = SDPAImpl.forward_cuda


class CpuSdpaBackend(SDPABackend):  # type: ignore[misc]
    """The engine's SDPA backend."""

    @staticmethod
    def get_impl_cls() -> type:
        """The implementation."""
        return CpuSdpaImpl
