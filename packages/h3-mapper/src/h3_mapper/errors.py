"""Every refusal of h3-mapper, one class per kind, so callers can tell them apart.

A message is one line: what is wrong, where (tensor, shard, module), what was expected, what to do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager


class MapperError(ValueError):
    """Base of every error this package raises on bad input; the command line turns it into exit code 2."""


# --- what the checkpoint holds -------------------------------------------------------------------------


class ConfigError(MapperError):
    """config.json is absent, malformed, of another model, or its dimensions contradict each other."""


class UnknownNameError(MapperError):
    """A tensor name that no H3 layout has."""


class MissingTensorError(MapperError):
    """A tensor of the layout is absent."""


class IncompleteGroupError(MapperError):
    """Some, not all, of the tensors that make up one fused native tensor (q, k, v) are present."""


class DuplicateTensorError(MapperError):
    """One tensor name occurs twice: in two shards, or twice in a stream."""


class ShapeError(MapperError):
    """A tensor's shape is not what the configuration says, larger or smaller."""


class DtypeError(MapperError):
    """A tensor's dtype is not what the model's precision table says; nothing is ever cast."""


class DerivedTensorError(MapperError):
    """A tensor that follows from the configuration (rope.inv_freq) does not hold the bits it must hold."""


class UnsupportedTensorError(MapperError):
    """An in-memory tensor of a kind that cannot be mapped row by row (DTensor, sparse, ...)."""


# --- which layout, which variant -----------------------------------------------------------------------


class LayoutError(MapperError):
    """Base of the errors about the layout of a whole checkpoint."""


class MixedLayoutsError(LayoutError):
    """Diffusers and native names, or two different declared layouts, in one checkpoint."""


class AmbiguousLayoutError(LayoutError):
    """Native names without a declaration of the row order: release and module look the same."""


class LayoutMismatchError(LayoutError):
    """The stated layout contradicts the names or the metadata."""


class AlreadyConvertedError(LayoutError):
    """The input is in the requested layout already; mapping it again would scramble rows."""


class PrunedVariantError(LayoutError):
    """The checkpoint is a pruned H3 (narrow AdaLN and a lookup table), not the full model."""


class QuantisedVariantError(LayoutError):
    """The checkpoint holds quantised weights or their scales."""


# --- safetensors files and indexes ---------------------------------------------------------------------


class FileFormatError(MapperError):
    """Base of the errors about bytes of a file; also raised for malformed headers of no narrower kind."""


class TruncatedFileError(FileFormatError):
    """The file ends before the last tensor's data."""


class TrailingBytesError(FileFormatError):
    """Bytes follow the last tensor's data."""


class GapError(FileFormatError):
    """Bytes between two tensors, or before the first, belong to no tensor."""


class OverlapError(FileFormatError):
    """Two tensors claim the same bytes."""


class HugeHeaderError(FileFormatError):
    """The header's declared length is beyond what any H3 file needs; refused before it is read."""


class DuplicateKeyError(FileFormatError):
    """One key occurs twice in a JSON object of a header or an index."""


class SourceError(MapperError):
    """Base of the errors about what PATH is; also raised when it holds no checkpoint at all."""


class IndexFileError(SourceError):
    """An index file is malformed, or a folder has more than one."""


class MissingShardError(SourceError):
    """A shard named by the index, or by the -of-N numbering, is not there."""


class StrayTensorError(SourceError):
    """A shard and the index disagree about which tensors the shard holds."""


class UnsafePathError(SourceError):
    """A shard name leaves the checkpoint's folder: absolute, `..`, or with a separator."""


# --- output --------------------------------------------------------------------------------------------


class OutputError(MapperError):
    """Base of the errors about where output goes."""


class OutputExistsError(OutputError):
    """The destination exists already."""


class OutputInsideSourceError(OutputError):
    """The destination is the source, or lies within it."""


class OutputThroughLinkError(OutputError):
    """The destination would be written through a symbolic link or into a hub cache."""


class NoSpaceError(OutputError):
    """The destination's file system has less free space than the output needs."""


class ReadBackError(OutputError):
    """The safetensors library does not read the written files back as planned."""


# --- internal theorem ----------------------------------------------------------------------------------


class PlanError(MapperError):
    """A plan does not cover every source row exactly once."""


def listed(names: Iterable[str], limit: int = 6) -> str:
    """Sorted names for a message, cut after `limit` with the number left out; control characters escaped."""
    ordered = [name if name.isprintable() else ascii(name) for name in sorted(names)]
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more


def counted(names: Collection[str], one: str, several: str) -> str:
    """How many names, and the word or words that follow the number: `1 tensor is`, `3 tensors are`."""
    return f"{len(names)} {one if len(names) == 1 else several}"


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Put a path before the message of a MapperError raised inside, by code that knows tensors and no files."""
    try:
        yield
    except MapperError as error:
        if not error.args[0].startswith(f"{path}: "):
            error.args = (f"{path}: {error.args[0]}", *error.args[1:])
        raise
