"""A small, real Diffusers MiniMax-H3 on CPU, and packed requests built by Diffusers' own layout code."""

from h3_adapter_diffusers.testing.packings import fl2va, packings, ref2va, t2va
from h3_adapter_diffusers.testing.tiny import TINY, Request, build, randomise, velocities

__all__ = ["TINY", "Request", "build", "fl2va", "packings", "randomise", "ref2va", "t2va", "velocities"]
