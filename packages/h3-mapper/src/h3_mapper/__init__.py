"""Move MiniMax-H3 transformers between the `diffusers`, `release` and `module` layouts, bit for bit.

Plans (`plan`, `prove`) are pure arithmetic; `convert` runs one on files and `diffusers_to_native` /
`native_to_diffusers` run one on tensors in memory. Nothing here imports torch or numpy.
"""

from h3_mapper.apply import (
    convert_state_dict,
    diffusers_to_native,
    diffusers_to_native_groups,
    native_to_diffusers,
    native_to_diffusers_groups,
)
from h3_mapper.config import H3Config
from h3_mapper.convert import convert
from h3_mapper.errors import MapperError
from h3_mapper.plan import atoms, groups, plan, spans, tensors
from h3_mapper.proof import prove
from h3_mapper.spec import Atom, Layout, Plan, Rows, Target, TensorSpec
from h3_mapper.verify import verify

__version__ = "0.1.0"

__all__ = [
    "Atom",
    "H3Config",
    "Layout",
    "MapperError",
    "Plan",
    "Rows",
    "Target",
    "TensorSpec",
    "__version__",
    "atoms",
    "convert",
    "convert_state_dict",
    "diffusers_to_native",
    "diffusers_to_native_groups",
    "groups",
    "native_to_diffusers",
    "native_to_diffusers_groups",
    "plan",
    "prove",
    "spans",
    "tensors",
    "verify",
]
