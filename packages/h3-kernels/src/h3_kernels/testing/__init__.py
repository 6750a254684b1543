"""Tools for tests of bitwise promises, public: the adapters and their users need the same ones."""

from h3_kernels.testing.bench import Timing, interleaved_bench
from h3_kernels.testing.bitwise import assert_bitwise_equal, count_differing
from h3_kernels.testing.inputs import cancellation_inputs, large_magnitude_inputs, random_inputs
from h3_kernels.testing.orders import NEGATIVE_FOLDS, OrderProbe, order_probe, split_k_gemm, twin_gemm
from h3_kernels.testing.parallel import emulated_row_parallel, shard_columns, shard_parts

__all__ = [
    "NEGATIVE_FOLDS",
    "OrderProbe",
    "Timing",
    "assert_bitwise_equal",
    "cancellation_inputs",
    "count_differing",
    "emulated_row_parallel",
    "interleaved_bench",
    "large_magnitude_inputs",
    "order_probe",
    "random_inputs",
    "shard_columns",
    "shard_parts",
    "split_k_gemm",
    "twin_gemm",
]
