"""Rows: what else is in the batch changes no bit of a bound linear."""

import pytest
import torch
from h3_adapter_vllm import install_h3_rollout
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.engine


def rows_of(layer, count, seed):
    x = torch.randn(count, layer.input_size, generator=torch.Generator().manual_seed(seed))
    return x.to(layer.weight.dtype)


def differing(a, b):
    """Values whose bits differ."""
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return int((a.contiguous().view(kind) != b.contiguous().view(kind)).sum())


class Seen:
    """Inputs and outputs of the bound linears of one forward, by name."""

    def __init__(self, model, names):
        self.calls = {}
        self.hooks = [model.get_submodule(name).register_forward_hook(self._keep(name)) for name in names]

    def _keep(self, name):
        def hook(_, inputs, outputs):
            self.calls[name] = (inputs[0].clone(), outputs[0].clone())

        return hook

    def remove(self):
        for hook in self.hooks:
            hook.remove()
        return self.calls


def forward(engine, model, names, requests, padding=0):
    seen = Seen(model, names)
    outputs = engine.velocities(model, requests, padding=padding)
    return seen.remove(), outputs


@pytest.mark.parametrize("count", [1, 2, 7, 33])
def test_a_row_has_the_same_bits_in_any_batch_at_any_position(model, count):
    """Alone, first, last, in another order, or beside rows of NaN."""
    with install_h3_rollout(model, scope="projections") as handle:
        for name, layer in handle.linears.items():
            x, others = rows_of(layer, count, 1), rows_of(layer, 9, 2)
            alone, _ = layer(x)
            order = torch.randperm(count)
            batches = {
                "first": (torch.cat([x, others]), slice(0, count)),
                "last": (torch.cat([others, x]), slice(9, 9 + count)),
                "beside NaN": (torch.cat([torch.full_like(others, torch.nan), x]), slice(9, 9 + count)),
                "permuted": (x[order], order.argsort()),
            }
            for how, (batch, where) in batches.items():
                assert differing(layer(batch)[0][where], alone) == 0, (name, how)


@pytest.fixture(scope="module")
def bound(engine, release):
    """A model bound for the whole module."""
    model = engine.build()
    model.load_weights(release.items())
    with install_h3_rollout(model, scope="projections") as handle:
        yield handle.linears


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_keep_their_bits_under_any_packing(bound, data):
    """Any linear, any choice and order of rows with repeats, in any number of batches, is indexing of one batch."""
    layer = bound[data.draw(st.sampled_from(sorted(bound)))]
    rows = data.draw(st.integers(1, 24))
    packing = data.draw(
        st.lists(st.lists(st.integers(0, rows - 1), min_size=1, max_size=30), min_size=1, max_size=4)
    )
    x = rows_of(layer, rows, data.draw(st.integers(0, 99)))
    whole, _ = layer(x)
    for batch in packing:
        assert differing(layer(x[batch])[0], whole[batch]) == 0


def test_strided_input_has_the_same_bits(model):
    """A view with gaps between its rows, as slices of a packed buffer are."""
    with install_h3_rollout(model, scope="linears") as handle:
        for name, layer in handle.linears.items():
            x = rows_of(layer, 12, 3)
            assert differing(layer(x[::2])[0], layer(x[::2].contiguous())[0]) == 0, name
            wide = torch.cat([x, x], dim=1)[:, : x.shape[1]]
            assert differing(layer(wide)[0], layer(x)[0]) == 0, name


def test_the_engines_own_linears_depend_on_the_batch(model):
    """Negative twin: torch's CPU linears give some row other bits alone than in a batch."""
    with install_h3_rollout(model, scope="projections") as handle:
        names = list(handle.linears)
    changed = []
    for name in names:
        layer = model.get_submodule(name)
        x = rows_of(layer, 33, 1)
        together, _ = layer(x)
        alone = torch.cat([layer(x[i : i + 1])[0] for i in range(33)])
        changed.append(differing(together, alone) > 0)
    assert any(changed)


@pytest.mark.parametrize("padding", [3, 12])
def test_padding_rows_change_no_bound_nodes_output(model, engine, padding):
    """In a padded forward, each bound linear maps a row it saw unpadded to the bits it had there.

    The engine's masked attention on a CPU is another kernel, so later inputs may differ: the claim is about every row
    whose input is the same, which covers the first block up to its attention entirely.
    """
    request = engine.request()
    with install_h3_rollout(model, scope="linears") as handle:
        plain, _ = forward(engine, model, handle.linears, [request])
        padded, _ = forward(engine, model, handle.linears, [request], padding)
        external = set(handle.report().external())
    compared = 0
    for name, (x, y) in plain.items():
        other_x, other_y = (t[: len(x)] for t in padded[name])
        rows = (x.view(torch.int16) == other_x.view(torch.int16)).all(dim=1)
        assert differing(y[rows], other_y[rows]) == 0, name
        compared += int(rows.sum())
        if not rows.all():
            assert "blocks.0.attn.attention" in external
    first = plain["blocks.0.attn.qkv_proj"][0]
    assert differing(first, padded["blocks.0.attn.qkv_proj"][0][: len(first)]) == 0
    assert compared >= 4 * 2 * 5 + 2 * len(first)


def test_a_second_request_changes_no_bound_nodes_output(model, engine):
    """The rows of two packed requests, and each request's rows alone, through every bound linear."""
    first, second = engine.request(seed=1), engine.request(seed=2, text=9, video=4, audio=3)
    with install_h3_rollout(model, scope="linears") as handle:
        calls = [forward(engine, model, handle.linears, [r])[0] for r in (first, second)]
        for name, layer in handle.linears.items():
            (x1, y1), (x2, y2) = (seen[name] for seen in calls)
            together, _ = layer(torch.cat([x1, x2]))
            assert differing(together, torch.cat([y1, y2])) == 0, name


def test_rows_of_a_sequence_parallel_rank_have_the_bits_of_the_whole(model, engine):
    """Ulysses gives each rank a contiguous share of the rows; every bound linear gives them the same bits."""
    with install_h3_rollout(model, scope="linears") as handle:
        seen, _ = forward(engine, model, handle.linears, [engine.request()])
        for name, (x, y) in seen.items():
            for ranks in (2, 4):
                shares = [handle.linears[name](part)[0] for part in x.chunk(ranks)]
                assert differing(torch.cat(shares), y) == 0, name


def test_the_engine_still_refuses_to_pack_requests_on_this_attention(model, engine):
    """vLLM-Omni packs requests only on backends that isolate documents; SDPA on a CPU does not, bound or not."""
    requests = [engine.request(seed=1), engine.request(seed=2)]
    with pytest.raises(ValueError, match="does not isolate multi-document packed"):
        engine.velocities(model, requests)
    with (
        install_h3_rollout(model, scope="linears"),
        pytest.raises(ValueError, match="does not isolate multi-document packed"),
    ):
        engine.velocities(model, requests)
