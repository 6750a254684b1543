"""Start-up of the packed site: stands in for two packages that vLLM imports at module level and H3 never calls.

`av` decodes video files; `vllm.vllm_flash_attn` is 450 MB of kernels for language models. Calling anything of either
raises. Python runs this file by itself when its folder is on PYTHONPATH.
"""

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_HOST_IP": "127.0.0.1",  # vLLM asks the network for an address otherwise
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# Attributes vLLM reads while it decides that its own flash attention is not there.
ABSENT = {
    "FA2_AVAILABLE": False,
    "FA3_AVAILABLE": False,
    "is_fa_version_supported": lambda *_, **__: False,
    "fa_version_unsupported_reason": lambda *_, **__: "not in this site",
}


class _Absent(ModuleType):
    """A module whose every attribute is a function that raises, or what ABSENT says."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ABSENT:
            return ABSENT[name]

        def absent(*_: object, **__: object) -> NoReturn:
            raise RuntimeError(f"{self.__name__}.{name} is not in this site (tools/h200_site)")

        return absent


class _Types(ModuleType):
    """A module whose every attribute is an empty class, for annotations."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _register(kind: type[ModuleType], *names: str) -> None:
    for name in names:
        module = kind(name)
        module.__path__ = []
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module


for _key, _value in QUIET.items():
    os.environ.setdefault(_key, _value)
_register(_Types, "av", "av.audio", "av.video", "av.container")
_register(_Absent, "vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface")
