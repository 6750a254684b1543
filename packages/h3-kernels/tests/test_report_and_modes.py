"""Binding states, the report and the mode switch."""

import json

import pytest
from h3_kernels.binding import (
    Bound,
    External,
    Probe,
    Refused,
    Report,
    differing_dtypes,
    dtype_reasons,
)
from h3_kernels.errors import H3KernelsError, InstallError, ModeError
from h3_kernels.modes import InstallSettings, Mode, Scope, resolve_mode


@pytest.fixture
def report():
    report = Report("rollout")
    report.add(
        "blocks.0.attn.qkv_proj", Bound("h3-projection-gemm-v1", "reference", Probe(True, "equal", 64))
    )
    report.add("blocks.0.attn", External("SDPA"))
    report.add("blocks.0.mlp.fc2", Refused("weight is float16"))
    return report


def test_report_prints_every_node_in_order(report):
    lines = str(report).splitlines()
    assert lines[0] == "rollout: 1 bound, 1 external, 1 refused"
    assert [line.split()[:2] for line in lines[1:]] == [
        ["blocks.0.attn.qkv_proj", "bound"],
        ["blocks.0.attn", "external"],
        ["blocks.0.mlp.fc2", "refused"],
    ]
    assert "h3-projection-gemm-v1 by reference; equal" in lines[1]
    assert "weight is float16" in lines[3]


def test_report_as_json_keeps_every_field(report):
    document = json.loads(report.to_json())
    assert document["nodes"][0]["probe"] == {"ok": True, "detail": "equal", "compared": 64}
    assert [node["state"] for node in document["nodes"]] == ["bound", "external", "refused"]
    assert document["nodes"][2]["reason"] == "weight is float16"


def test_a_node_has_one_binding(report):
    with pytest.raises(ValueError, match="already external"):
        report.add("blocks.0.attn", Refused("again"))
    assert len(report) == 3
    assert list(report.refused()) == ["blocks.0.mlp.fc2"]


@pytest.mark.parametrize(
    ("argument", "environment", "expected"),
    [
        (None, None, Mode.STRICT),
        (None, "audit", Mode.AUDIT),
        (None, "", Mode.STRICT),
        ("off", "audit", Mode.OFF),
        (Mode.AUDIT, None, Mode.AUDIT),
    ],
)
def test_the_argument_wins_then_the_environment_then_strict(monkeypatch, argument, environment, expected):
    monkeypatch.delenv("H3_MODE", raising=False)
    if environment is not None:
        monkeypatch.setenv("H3_MODE", environment)
    assert resolve_mode(argument) is expected


def test_an_unknown_mode_says_where_it_came_from(monkeypatch):
    monkeypatch.setenv("H3_MODE", "on")
    with pytest.raises(ModeError, match="H3_MODE mode 'on' is not one of off, strict, audit"):
        resolve_mode()
    with pytest.raises(H3KernelsError, match="argument mode 'loose'"):
        resolve_mode("loose")


def test_a_scope_that_does_not_exist_names_those_that_do():
    with pytest.raises(ValueError, match="'all' is not a scope; expected linears, projections, model"):
        Scope("all")


def settings(**changed):
    stated = {
        "mode": Mode.STRICT,
        "scope": Scope.MODEL,
        "contract": "h3-parallel-v1-u8",
        "provider": "auto",
        "attention": "auto",
        "tp": 1,
        "rank": 0,
        "collective": None,
    }
    return InstallSettings(**{**stated, **changed})


def test_settings_say_what_every_rank_must_state():
    """The rank is not part of it; every other field is, attention where it is bound."""
    assert settings(tp=2, rank=0).describe() == settings(tp=2, rank=1).describe()
    for changed in ({"mode": Mode.AUDIT}, {"contract": "h3-parallel-v1-u4"}, {"attention": "fa3"}, {"tp": 2}):
        assert settings(**changed).describe() != settings().describe()
    assert "attention" not in settings(scope=Scope.LINEARS).describe()
    assert settings(tp=2, rank=1).title("rollout").endswith("tp=2, rank 1, 0 forwards")


def test_settings_refuse_names_before_any_model_is_looked_at():
    assert settings().obstacles() == []
    contract, attention = settings(contract="h3-parallel-v9", attention="fast").obstacles()
    assert "'h3-parallel-v9' is not a row-parallel contract" in contract
    assert "no attention provider is named 'fast'; known: auto, " in attention


def test_differing_dtypes_are_grouped_and_counted():
    held = {f"norm{i}": "bf16" for i in range(20)} | {"bias": "fp16"}
    expected = dict.fromkeys(held, "fp32") | {"absent": "fp32"}
    norms, bias = dtype_reasons(differing_dtypes(held, expected))
    assert norms.endswith("norm12 and 7 more: are bf16, expected fp32")
    assert bias == "bias: is fp16, expected fp32"
    assert not list(dtype_reasons(differing_dtypes(held, held)))


def test_an_install_error_states_an_obstacle_of_many_modules_once():
    error = InstallError(
        [*(f"blocks.{i}.fc: is float16" for i in range(5)), "proj: is quantised", "no blocks"]
    )
    assert len(error.reasons) == 7
    assert str(error) == (
        "cannot install the h3 contracts: blocks.0.fc, blocks.1.fc, blocks.2.fc, blocks.3.fc and 1 more: is float16; "
        "proj: is quantised; no blocks"
    )
    assert str(InstallError([f"{i}: obstacle {i}" for i in range(10)])).endswith(
        "; 7: obstacle 7; and 2 more"
    )
