"""The h3 contracts behind a vLLM-Omni MiniMax-H3."""

__version__ = "0.1.0"
