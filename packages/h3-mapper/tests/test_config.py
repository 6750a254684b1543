"""config.json in either spelling gives the same dimensions, and back; nonsense is refused."""

import struct

import pytest
from h3_mapper import H3Config
from h3_mapper.errors import ConfigError
from hypothesis import given
from mapper_testkit import TINY, configs

RELEASED_INV_FREQ = (
    "0000803f9af50f3f9be8a13e8718363ecdcccc3dc255663de386013d39ad913c"
    "0ad7233c9c44b83b383e4f3b2815e93a6f12833a166a133a60cba53953773a39"
)


@given(config=configs())
def test_both_spellings_round_trip(config):
    config = config.with_gates(False)
    assert H3Config.from_mapping(config.to_json(native=True)) == config
    assert H3Config.from_mapping(config.to_json(native=False)) == config


def test_unrelated_keys_are_kept_and_respelled_ones_are_not():
    original = TINY.to_json(native=False, original={"norm_eps": 1e-6, "_diffusers_version": "0.42.1"})
    native = TINY.to_json(native=True, original=original)
    assert native["norm_eps"] == 1e-6
    assert "ffn_dim" not in native
    assert "_class_name" not in native
    assert native["adaln_out_features"] == 18 * 48


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, "none of H3's dimensions"),
        ({"_class_name": "WanTransformer3DModel", "num_layers": 2}, "WanTransformer3DModel"),
        ({"model_type": "llama", "hidden_size": 8}, "llama"),
        ({"num_layers": 0}, "positive"),
        ({"num_layers": True}, "positive"),
        ({"num_layers": "50"}, "positive"),
        ({"hidden_size": 2**40}, "positive"),
        ({"patch_size": [1, 2]}, "patch_size"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"ffn_dim": 8, "ffn_hidden_size": 16}, "differ"),
        ({"hidden_size": 5376, "adaln_out_features": 8}, "not the full"),
    ],
)
def test_a_wrong_config_is_refused(mapping, message):
    with pytest.raises(ConfigError, match=message):
        H3Config.from_mapping(mapping)


def test_inv_freq_holds_the_released_bits():
    """And not theta**-x, which a well-known converter writes: that differs in 4 of 16 values."""
    assert H3Config().inv_freq().hex() == RELEASED_INV_FREQ
    other = [struct.unpack("<f", struct.pack("<f", 10000.0 ** -(2 * i / 32)))[0] for i in range(16)]
    ours = struct.unpack("<16f", H3Config().inv_freq())
    assert sum(a != b for a, b in zip(ours, other, strict=True)) == 4
