"""A small, real vLLM-Omni MiniMax-H3 on CPU (`engine`), worker processes that hold one at any tp (`pool`), and what its
own server needs there: a release in miniature (`release`) and a platform (`cpu`).

Importing :mod:`h3_adapter_vllm.testing.engine` imports vLLM and vLLM-Omni (about ten seconds).
"""
