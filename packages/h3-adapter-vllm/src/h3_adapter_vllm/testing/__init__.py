"""A small, real vLLM-Omni MiniMax-H3 on CPU, and worker processes that hold one at any tp.

Importing :mod:`h3_adapter_vllm.testing.engine` imports vLLM and vLLM-Omni (about ten seconds).
"""
