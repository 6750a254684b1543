"""Traces of runs: digests of every node's output, the trajectory, and the first place where two runs part."""

from h3_kernels.trace.compare import (
    Divergence,
    NotComparableError,
    divergences,
    first_divergence,
    velocity_drift,
)
from h3_kernels.trace.digest import row_digests
from h3_kernels.trace.fingerprint import fingerprint
from h3_kernels.trace.record import Output, Parallel, Recorder, Step, Trace, merge_ranks
from h3_kernels.trace.store import load, save

__all__ = [
    "Divergence",
    "NotComparableError",
    "Output",
    "Parallel",
    "Recorder",
    "Step",
    "Trace",
    "divergences",
    "fingerprint",
    "first_divergence",
    "load",
    "merge_ranks",
    "row_digests",
    "save",
    "velocity_drift",
]
