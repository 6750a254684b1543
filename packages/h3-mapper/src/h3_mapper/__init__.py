"""Mapping of MiniMax-H3 weights between layouts."""

__version__ = "0.1.0"
