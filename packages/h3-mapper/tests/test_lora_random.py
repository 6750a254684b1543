"""Any adapter through any chain of formats: modules, ranks and scales at random, products bit for bit."""

from fractions import Fraction

from h3_mapper.lora import FORMATS, Adapter, Statement, read, write
from h3_mapper.lora.formats import PER_MODULE, Alpha
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_testkit import assert_same_products, block_modules, diffusers_lora
from mapper_testkit import TINY

MODULES = [
    *block_modules(),
    *(f"transformer_blocks.{n}.adaln_proj.linear" for n in range(TINY.num_layers)),
    "proj_out",
]


@st.composite
def adapters(draw) -> Adapter:
    """Some modules, each with a rank of its own; scales 1, 2 or a half, which no format has to round."""
    modules = draw(st.lists(st.sampled_from(MODULES), min_size=1, max_size=9, unique=True))
    ranks = {module: draw(st.integers(1, 5)) for module in modules}
    tensors = {}
    for seed, module in enumerate(modules):
        tensors |= diffusers_lora([module], rank=ranks[module], seed=seed)
    alphas = {f"^{module}": ranks[module] * draw(st.sampled_from([1, 2, 0.5])) for module in modules}
    settings_ = {
        "r": 1,
        "lora_alpha": 1,
        "rank_pattern": {f"^{m}": r for m, r in ranks.items()},
        "alpha_pattern": alphas,
    }
    return read(tensors, TINY, peft_config=settings_)


@settings(max_examples=settings().max_examples)
@given(source=adapters(), chain=st.lists(st.sampled_from(sorted(FORMATS)), min_size=1, max_size=4))
def test_every_chain_of_formats_keeps_every_product(source, chain):
    adapter = source
    for name in chain:
        written = write(adapter, name, TINY)
        adapter = read(
            written.tensors,
            TINY,
            metadata=written.metadata,
            peft_config=written.peft_config,
            statement=Statement.of(name),
        )
        assert_same_products(source, adapter)
        scales = {term.scale for term in adapter.low_rank.values()}
        if FORMATS[name].alpha is Alpha.ONE:
            assert scales == {Fraction(1)}
        elif FORMATS[name].alpha not in PER_MODULE:
            assert len(scales) == 1
