"""Figures show what the records hold: every ratio, our error against each peer's, where two runs part."""

from pathlib import Path

import figures
import pytest
from matplotlib.figure import Figure as Canvas

RECORDS = [
    {
        "node": "swiglu",
        "ratio": {"diffusers": 0.5, "vllm": 1.25},
        "error_fp64": {"ours": 1e-3, "diffusers": 2e-3},
    },
    {"op": "fc2", "dtype": "float32", "rows": 1, "ratio": 1.1, "error": 3e-7, "stock_error": 2e-7},
    {"op": "fc2", "dtype": "bfloat16", "rows": 1, "ratio": 0.9},
]
OUTPUTS = ["text_norm [h]", "token_refiner.blocks.0.norm1 [h]", "blocks.0.norm1 [h]", "blocks.0.mlp.fc2 [h]"]
TRACES = [
    {"case": "again", "outputs": OUTPUTS, "share": [0.0, 0.0, 0.0, 0.0]},
    {"case": "one ulp", "outputs": OUTPUTS, "share": [0.0, 0.0, 0.25, 1.0]},
]

TIMES = [
    {"case": "kernels", "engine": "e", "direction": "step", "rows": 9, "variant": variant, "busy_ms": busy}
    for variant, busy in (("stock", {"gemm": 6.0, "rest": 4.0}), ("ours", {"gemm": 7.0, "rest": 1.0}))
] + [
    {"case": "node", "node": node, "rows": rows, "ours_ms": ms}
    for node, rows, ms in (("norm1", 9, 1.0), ("mlp.fc1", 9, 3.0), ("norm1", 5, 9.0))
]


def test_kernel_times_are_shares_of_the_run_as_shipped() -> None:
    assert figures.kernel_times(TIMES) == [
        ("e step, 9 rows, as shipped", {"gemm": 0.6, "rest": 0.4}),
        ("e step, 9 rows, bound", {"gemm": 0.7, "rest": 0.1}),
    ]
    assert figures.kernel_times(TIMES[1:]) == []  # nothing to compare with


def test_node_times_are_of_the_most_rows_and_the_largest_comes_first() -> None:
    assert figures.node_times(TIMES) == [("mlp.fc1: 3.0 ms", 0.75), ("norm1: 1.0 ms", 0.25)]


def test_every_ratio_is_one_bar_with_a_label_of_its_own() -> None:
    found = figures.bars(RECORDS)
    assert [ratio for _, ratio in found] == [0.5, 1.25, 1.1, 0.9]
    assert len({name for name, _ in found}) == 4


def test_errors_are_ours_over_each_peers() -> None:
    found = figures.error_ratios(RECORDS)
    assert found.keys() == {"diffusers", "stock"}
    assert found["diffusers"] == [0.5]
    assert abs(found["stock"][0] - 1.5) < 1e-12


def test_records_without_errors_have_none_to_show() -> None:
    assert figures.error_ratios(RECORDS[2:]) == {}
    assert figures.error_ratios([{"error_fp64": {"diffusers": 1e-3}}, {"error": 1e-3}]) == {}


def test_runs_part_where_the_first_row_differs() -> None:
    canvas = Canvas(layout="constrained")
    axes = canvas.subplots()
    figures.draw_divergence(axes, figures.shares([*RECORDS, *TRACES]))
    legend = [text.get_text() for text in canvas.legends[0].get_texts()]
    assert legend == ["again: equal", "one ulp: parts at blocks.0.norm1 [h]"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["token_refiner.blocks.0", "blocks.0"]


@pytest.mark.parametrize("figure", figures.FIGURES, ids=lambda figure: figure.kind)
def test_every_kind_is_drawn_and_one_without_records_is_known_to_be_empty(figure, tmp_path: Path) -> None:
    figures.save(figure, [*RECORDS, *TRACES, *TIMES], tmp_path / "figure.png", "a title")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert not figure.values([{"subject": "a note without numbers"}])


def test_a_run_that_measured_nothing_still_has_a_figure(tmp_path: Path) -> None:
    figures.speed_figure([], tmp_path / "figure.png", "a title")
    assert (tmp_path / "figure.png").exists()
