"""Bitwise arithmetic contracts of MiniMax-H3."""

__version__ = "0.1.0"
