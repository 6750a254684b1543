"""Tables say what the records hold: nothing is left out in silence, and no cell stands for another kind of run."""

from typing import Any

import pytest
import readme_tables
import result_tables

STEP = {"engine": "vllm-omni", "direction": "forward", "rows": 925, "ratio": 1.021, "adaln": "computed"}


def cells(table: str) -> list[list[str]]:
    """The cells of a Markdown table, without its rule."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def test_a_whole_step_is_one_cell() -> None:
    found = [
        STEP,
        STEP | {"rows": 8349, "ratio": 0.5},
        STEP | {"engine": "diffusers", "direction": "step", "ratio": 2.0},
    ]
    _, *sizes = cells(readme_tables.whole_steps(found))[0]
    assert sizes == ["run", "925 rows", "8349 rows"]
    assert cells(readme_tables.whole_steps(found))[1:] == [
        ["vllm-omni", "forward", "1.02", "0.50"],
        ["diffusers", "LoRA training step", "2.00", ""],
    ]


@pytest.mark.parametrize(
    "change", [{"adaln": "cached"}, {"case": "contract"}, {"measured_blocks": {"4": {}}}, {"ratio": None}]
)
def test_another_kind_of_run_is_no_whole_step(change: dict[str, Any]) -> None:
    assert readme_tables.whole_steps([STEP | change]) == ""


def test_a_captured_step_is_told_from_a_launched_one_and_has_a_cell_against_the_engine_captured_too() -> None:
    """Twin: where the engine's step could not be captured, there is no such cell."""
    step = STEP | {
        "engine": "diffusers",
        "direction": "step",
        "case": "captured",
        "ours_ms": 6.0,
        "ratio": 0.6,
    }
    assert [row[1:] for row in cells(readme_tables.whole_steps([step | {"stock_captured_ms": 4.0}]))[1:]] == [
        ["LoRA training step from CUDA graphs / as shipped", "0.60"],
        ["LoRA training step, both from CUDA graphs", "1.50"],
    ]
    assert len(cells(readme_tables.whole_steps([step | {"stock_captured_refused": "no"}]))) == 2


def test_records_of_an_earlier_commit_are_counted() -> None:
    """Twin: records of one commit."""
    new, old = ({"environment": {"cpu": "a CPU", "head": letter * 40}} for letter in "ab")
    assert result_tables.machine([new, new, old]).endswith(
        "`aaaaaaaaaaaa`; 1 of 3 records at `bbbbbbbbbbbb`."
    )
    assert result_tables.machine([new, new]) == "Measured on a CPU, at commit `aaaaaaaaaaaa`."


def test_a_divergence_names_its_first_output() -> None:
    traces = [
        {"case": "again", "outputs": ["a", "b", "c"], "share": [0.0, 0.0, 0.0]},
        {"case": "planted", "outputs": ["a", "b", "c"], "share": [0.0, 0.5, 1.0]},
    ]
    assert cells(result_tables.divergence_table(traces))[1:] == [
        ["again", "none", "0", "3"],
        ["planted", "`b`", "2", "3"],
    ]


def test_records_without_a_number_are_counted() -> None:
    refused = {"op": "fc2", "refused": "no legal provider"}
    assert "1 more hold no ratio" in result_tables.refusals([{"op": "fc2", "ratio": 1.0}, refused])
    assert result_tables.refusals([{"op": "fc2", "ratio": 1.0}]) == ""


def test_bits_are_headlined_at_the_largest_size_beside_the_engines_as_shipped() -> None:
    gate = {"case": "velocities of both engines", "rows": 925, "blocks": 50, "differing": 0, "values": 65152}
    twin = gate | {"case": "twin: as shipped", "differing": 65152}
    larger = [record | {"rows": 8349, "values": 587904} for record in (gate, twin)]
    assert "8349 rows, **0 of 587,904 velocities differ**" in readme_tables.bits([*larger, gate, twin])
    assert readme_tables.bits([gate]) == ""


def test_a_failed_gate_stands_out() -> None:
    gate = {
        "case": "repeated",
        "rows": 925,
        "blocks": 50,
        "differing": 3,
        "values": 9,
        "expected": 0,
        "passed": False,
    }
    assert cells(result_tables.gates_table([gate]))[1][-1] == "NO"
