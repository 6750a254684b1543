"""Refusals about adapters, one class per kind."""

from __future__ import annotations

from h3_mapper.errors import MapperError


class AdapterError(MapperError):
    """Base of the errors about an adapter."""


class UnmappedModuleError(AdapterError):
    """A name is no adapter tensor, or names no module of the model; also raised when no module matches at all."""


class UnpairedFactorError(AdapterError):
    """A module has A without B, B without A, or one factor twice."""


class UnstatedError(AdapterError):
    """The file does not record something that cannot be guessed: row order, alpha, adapter or partition."""


class FactorShapeError(AdapterError):
    """A factor does not fit the module, or A and B disagree about the rank."""


class ScaleError(AdapterError):
    """The target format cannot hold these scales without rounding, or a recorded rank contradicts the tensors."""


class UnsupportedAdapterError(AdapterError):
    """Another kind of adapter (LoKr, bias, column-wise DoRA ...), or a target format that cannot hold this one."""


class NonFiniteError(AdapterError):
    """A factor holds an infinity or a NaN."""


class MissingExtraError(AdapterError):
    """An optional dependency is needed for this operation."""
