"""The h3 contracts behind a Diffusers MiniMax-H3."""

__version__ = "0.1.0"
