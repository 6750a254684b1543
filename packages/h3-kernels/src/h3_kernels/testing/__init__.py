"""Tools for tests of bitwise promises, public: the adapters and their users need the same ones."""

from h3_kernels.testing.bitwise import assert_bitwise_equal, count_differing
from h3_kernels.testing.inputs import cancellation_inputs, large_magnitude_inputs, random_inputs

__all__ = [
    "assert_bitwise_equal",
    "cancellation_inputs",
    "count_differing",
    "large_magnitude_inputs",
    "random_inputs",
]
