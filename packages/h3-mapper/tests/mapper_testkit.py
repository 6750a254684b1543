"""Shared by the tests: hypothesis strategies and small configurations in which no two dimensions alias."""

from h3_mapper import H3Config
from hypothesis import strategies as st

TINY = H3Config(
    num_attention_heads=2,
    attention_head_dim=32,
    hidden_size=48,
    num_layers=2,
    num_refiner_layers=2,
    ffn_dim=80,
    in_channels=4,
    audio_in_channels=6,
    text_dim=40,
    freq_dim=16,
    time_embed_hidden_dim=56,
    time_embed_dim=24,
    rope_freq_dim=4,
)
"""hidden != heads * head_dim and 6 * rope_freq_dim < head_dim: a swapped dimension cannot pass."""


def configs() -> st.SearchStrategy[H3Config]:
    """Any small H3 dimensions, odd sizes, one head and one layer included."""
    small = st.integers(1, 5)
    return st.builds(
        H3Config,
        num_attention_heads=small,
        attention_head_dim=st.integers(1, 6),
        hidden_size=st.integers(1, 7),
        num_layers=st.integers(1, 3),
        num_refiner_layers=st.integers(1, 2),
        ffn_dim=small,
        in_channels=st.integers(1, 3),
        audio_in_channels=small,
        patch_size=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)),
        text_dim=small,
        freq_dim=small,
        time_embed_hidden_dim=small,
        time_embed_dim=small,
        rope_freq_dim=st.integers(1, 16),
        rope_theta=st.sampled_from([10000.0, 500.0]),
        vsa_gates=st.booleans(),
    )
