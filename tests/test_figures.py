"""Figures show what the records hold: every ratio, and our error against each peer's."""

from pathlib import Path

import figures

RECORDS = [
    {
        "node": "swiglu",
        "ratio": {"diffusers": 0.5, "vllm": 1.25},
        "error_fp64": {"ours": 1e-3, "diffusers": 2e-3},
    },
    {"op": "fc2", "dtype": "float32", "rows": 1, "ratio": 1.1, "error": 3e-7, "stock_error": 2e-7},
    {"op": "fc2", "dtype": "bfloat16", "rows": 1, "ratio": 0.9},
]


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


def test_both_figures_are_drawn(tmp_path: Path) -> None:
    for draw in (figures.speed_figure, figures.error_figure):
        draw(RECORDS, tmp_path / "figure.png", "a title")
        assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "figure.png").unlink()
