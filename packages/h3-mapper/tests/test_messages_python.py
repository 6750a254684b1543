"""What a refusal of a Python call says, word for word: state dicts, sizes, words, numbers; each with a twin."""

import pytest
from h3_mapper import H3Config, Layout, MapperError, convert, diffusers_to_native, verify
from h3_mapper.errors import AlreadyConvertedError, ConfigError, UnsupportedTensorError
from h3_mapper.tp import check_degree
from mapper_testkit import TINY, read_files, reference_native

# --- tensor parallelism on the demo ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_demo_can_be_cut_as_the_release_can(tp):
    from h3_mapper.demo import DEMO

    check_degree(DEMO, tp)
    check_degree(H3Config(), tp)
    with pytest.raises(
        MapperError, match=r"tp 3 does not divide 8 attention heads; this model allows \[1, 2, 4, 8\]"
    ):
        check_degree(DEMO, 3)


# --- Python ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1], "state dict: a list; expected a mapping of names to tensors: pass a state dict"),
        ({1: 2}, "state dict: key 1 is no name; expected names of tensors"),
    ],
)
def test_what_is_no_state_dict_is_refused(given, message):
    with pytest.raises(UnsupportedTensorError) as caught:
        diffusers_to_native(given, layout="release", config=TINY)
    assert str(caught.value) == message


def test_a_module_is_asked_for_its_state_dict():
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(1, 1)
    with pytest.raises(UnsupportedTensorError) as caught:
        diffusers_to_native(module, layout="release", config=TINY)
    assert str(caught.value) == (
        "state dict: a Linear; expected a mapping of names to tensors: pass its state_dict()"
    )
    with pytest.raises(MapperError, match="2 names are no H3 tensor's: bias, weight"):
        diffusers_to_native(module.state_dict(), layout="release", config=TINY)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0; expected a positive integer up to 4,096"),
        ({"num_layers": 2.5}, "num_layers is 2.5; expected a positive integer up to 4,096"),
        ({"hidden_size": "48"}, "hidden_size is '48'; expected a positive integer up to 2,147,483,647"),
        ({"ffn_dim": True}, "ffn_dim is True; expected a positive integer up to 2,147,483,647"),
        ({"patch_size": [1, 2]}, "patch_size is [1, 2]; expected three positive integers"),
        ({"rope_theta": 1}, "rope_theta is 1; expected a number above 1"),
        ({"vsa_gates": 1}, "vsa_gates is 1; expected True or False"),
    ],
)
def test_a_size_no_model_has_is_refused_wherever_it_is_stated(sizes, message):
    with pytest.raises(ConfigError) as caught:
        H3Config(**sizes)
    assert str(caught.value) == f"H3Config: {message}"
    if "vsa_gates" not in sizes:
        with pytest.raises(ConfigError) as caught:
            H3Config.from_mapping({"num_layers": 2, **sizes})
        assert str(caught.value) == f"config.json: {message}"
    assert H3Config(patch_size=[1, 2, 2]) == H3Config(rope_theta=10000) == H3Config()


def test_words_and_numbers_that_are_none_are_refused_alike_in_python(src):
    for call, message in {
        lambda: convert(
            "src", "out", "grouped"
        ): "'grouped' is not a layout; expected diffusers, release, module",
        lambda: convert(
            "src", "out", "release", digest="md5"
        ): "'md5' is not a digest; expected xxh3, blake3, none",
        lambda: convert("src", "out", "release", threads=0): "threads is 0; expected a positive integer",
        lambda: verify(
            "src", "src", stated="release"
        ): "stated is 'release'; expected a pair, the layouts of the two sides (None where they say it)",
        lambda: H3Config.from_mapping(
            None
        ): "the configuration is a NoneType; expected an H3Config or config.json's object (a mapping)",
    }.items():
        with pytest.raises(MapperError) as caught:
            call()
        assert str(caught.value) == message
        assert not (src.parent / "out").exists()
    native = reference_native(read_files(src), TINY, Layout.RELEASE)
    with pytest.raises(AlreadyConvertedError):
        diffusers_to_native(native, layout="release", config=TINY)
    assert verify("src", "src", stated=("diffusers", None)).equal
