"""Audit: the engine's own results come back, differences are counted, and little is computed twice."""

import pytest
import torch
from h3_adapter_vllm import install_h3_rollout, method
from h3_kernels.audit import AUDIT_ROWS
from h3_kernels.binding import External

pytestmark = pytest.mark.engine


def perturb(layer, row, column):
    """Make the engine's own linear wrong at one place."""
    linear = layer.cpu_linear

    def wrong(x, weight, bias=None):
        y = linear(x, weight, bias)
        y[row, column] += 1
        return y

    layer.cpu_linear = wrong


def test_audit_returns_the_engines_bits(model, engine):
    request = engine.request()
    before = engine.velocities(model, [request])
    with install_h3_rollout(model, mode="audit", scope="linears"):
        after = engine.velocities(model, [request])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", ["blocks.0.mlp.fc1", "blocks.1.attn.out_proj"])
def test_audit_counts_a_difference_and_says_where(model, name):
    """One planted value: one more differing value than without it, found at its row and column, with both values."""
    layer = model.get_submodule(name)
    x = torch.randn(20, layer.input_size, dtype=torch.bfloat16)
    with install_h3_rollout(model, mode="audit", scope="linears") as handle:
        layer(x)
        clean = next(row for row in handle.audit() if row.node == name)
    with install_h3_rollout(model, scope="linears") as handle:
        expected, _ = layer(x)
    perturb(layer, 0, 5)
    with install_h3_rollout(model, mode="audit", scope="linears") as handle:
        y, _ = layer(x)
        rows = {row.node: row for row in handle.audit()}
    planted = rows[name]
    assert planted.compared == clean.compared == y.numel()
    assert planted.differing == clean.differing + 1
    assert planted.first == (0, 5)
    assert (planted.provider, planted.contract) == (float(y[0, 5]), float(expected[0, 5]))
    assert f"{planted.differing} of {planted.compared} values differ, first at [0, 5]" in str(planted)
    assert sum(row.compared for other, row in rows.items() if other != name) == 0


def test_audit_report_carries_the_counts_and_binds_nothing(model, engine):
    with install_h3_rollout(model, mode="audit", scope="linears") as handle:
        engine.velocities(model, [engine.request()])
        report = handle.report()
    assert not report.bound()
    assert not report.refused()
    node = report["blocks.0.mlp.fc2"]
    assert isinstance(node, External)
    assert node.operator.startswith("bfloat16 RowParallelLinear; ")
    assert node.operator.endswith("of 1600 values differ from h3-parallel-v1-u8")


def test_an_audited_call_computes_at_most_64_rows_twice(model, monkeypatch):
    """The first and the last row are among them, so a difference in either is found."""
    counts = []

    def counting(x, *args, **kwargs):
        counts.append(len(x))
        return projection(x, *args, **kwargs)

    projection = method.projection
    monkeypatch.setattr(method, "projection", counting)
    layer = model.blocks[0].mlp.fc1
    perturb(layer, 999, 3)
    with install_h3_rollout(model, mode="audit", scope="linears") as handle:
        x = torch.zeros(1000, layer.input_size, dtype=torch.bfloat16)
        x[:, 0] = 1  # one product a row: any order gives the same bits, so only the planted value differs
        layer(x)
        (row,) = [r for r in handle.audit() if r.compared]
    assert counts == [AUDIT_ROWS]
    assert row.differing == 1
    assert row.first == (999, 3)


def test_strict_and_off_have_no_audit(model, engine):
    for mode in ("strict", "off"):
        with install_h3_rollout(model, mode=mode, scope="linears") as handle:
            engine.velocities(model, [engine.request()])
            assert handle.audit() == []
