"""Recorded diagnostics: every kind of figure is taken, and one that cannot be drawn is left out with a notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedkeel.report import collect
from fedkeel.report import diagnostics as module
from fedkeel.report.diagnostics import ALL_RUNS, MOST_POINTS, checked, share_ends
from tests.report.samples import add_diagnostics, make_comparison, make_run

LINE = {"name": "a", "x": [0, 1], "y": [0.5, None]}
LINES = {"kind": "lines", "series": [LINE]}


def record(directory: Path, document: Any, name: str = "made-up") -> None:
    (directory / "diagnostics").mkdir(exist_ok=True)
    (directory / "diagnostics" / f"{name}.json").write_text(json.dumps(document))


def test_every_kind_is_read_with_its_texts(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    add_diagnostics(tmp_path / "a")
    collected = collect([tmp_path / "a"])
    assert collected.notices == []
    every, norms = collected.groups[0].diagnostics
    assert [figure["kind"] for figure in every.runs["fedavg, seed 0"]] == ["lines", "bars", "matrix", "points", "table"]
    assert every.title == "A figure of every kind"
    assert every.what.endswith("(GReg, Figure 1)")
    assert norms.runs["fedavg, seed 0"][0]["log_y"] is True


@pytest.mark.parametrize(
    "figure",
    [
        *({"kind": "pie"}, "lines", {"kind": "lines"}),
        {"kind": "lines", "series": [{**LINE, "y": [1.0]}]},
        {"kind": "lines", "series": [{**LINE, "x": [0, None]}]},
        {"kind": "lines", "series": [{"x": [], "y": []}]},
        {"kind": "bars", "categories": ["a"], "series": [{"name": "s", "values": [1, 2]}]},
        {"kind": "bars", "categories": ["a"], "series": [{"name": "s", "values": [1], "spread": [1, 2]}]},
        {"kind": "matrix", "rows": ["a"], "columns": ["b"], "values": [[1], [2]]},
        {"kind": "points", "x": [1], "y": [1, 2], "class": ["a"], "domain": ["b"]},
        {"kind": "table", "columns": ["a", "b"], "rows": [[1]]},
    ],
)
def test_a_file_with_what_cannot_be_drawn_is_left_out_and_told(tmp_path: Path, figure: Any) -> None:
    make_run(tmp_path / "a")
    record(tmp_path / "a", {"name": "bad", "figures": [figure]}, "bad")
    record(tmp_path / "a", {"name": "good", "title": "Good", "figures": [LINES]}, "good")
    collected = collect([tmp_path / "a"])
    assert [diagnostic.name for diagnostic in collected.groups[0].diagnostics] == ["good"]
    (notice,) = collected.notices
    assert "bad.json' is not a diagnostic that can be shown" in notice


def test_not_a_number_is_a_gap_and_others_have_five_digits(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    series = {**LINE, "y": [float("nan"), 0.123456789]}
    record(tmp_path / "a", {"name": "d", "figures": [{"kind": "lines", "series": [series]}]})
    (diagnostic,) = collect([tmp_path / "a"]).groups[0].diagnostics
    assert diagnostic.runs["fedavg, seed 0"][0]["series"][0]["y"] == [None, 0.12346]


def test_shares_are_shown_in_percent() -> None:
    figure = checked({"kind": "lines", "y_label": "accuracy (0 to 1)", "series": [dict(LINE)]})
    assert (figure["y_label"], figure["series"][0]["y"], figure["percent"]) == ("accuracy, %", [50.0, None], True)


def test_many_points_are_thinned_and_it_is_said() -> None:
    count = 3 * MOST_POINTS
    names = {"class": ["a"] * count, "domain": ["b"] * count}
    made = checked({"kind": "points", "x": list(range(count)), "y": [0.0] * count, **names})
    assert made["x"] == list(range(0, count, 3))
    assert len(made["class"]) == MOST_POINTS
    assert f"{MOST_POINTS} of {count} points" in made["note"]


def test_what_there_is_no_room_for_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = make_comparison(tmp_path / "c", ("fedavg", "fedbn"), seeds=1)
    for number, row in enumerate(("row0/seed0", "row1/seed0")):
        figure = {"kind": "lines", "series": [{**LINE, "y": [number, 1]}]}
        record(place / row, {"name": "d", "figures": [figure]})
    monkeypatch.setattr(module, "MOST_BYTES", len(json.dumps([figure])) + 1)
    collected = collect([tmp_path / "c"])
    assert list(collected.groups[0].diagnostics[0].runs) == ["fedavg, seed 0"]
    assert "is left out to keep this page small" in collected.notices[0]


def test_what_is_the_same_for_all_runs_is_shown_once(tmp_path: Path) -> None:
    make_comparison(tmp_path / "c", ("fedavg", "fedbn"), seeds=1)
    for row in ("row0/seed0", "row1/seed0"):
        record(tmp_path / "c" / row, {"name": "d", "figures": [LINES]})
    assert list(collect([tmp_path / "c"]).groups[0].diagnostics[0].runs) == [ALL_RUNS]


def test_the_same_figure_of_two_runs_has_one_axis() -> None:
    bars = {"kind": "bars", "categories": ["a"]}
    runs = {
        "one": [
            {"kind": "lines", "series": [{**LINE, "y": [0.0, 4.0]}]},
            {**bars, "series": [{"name": "s", "values": [2]}]},
        ],
        "two": [
            {"kind": "lines", "series": [{**LINE, "y": [2.0, 10.0]}]},
            {**bars, "series": [{"name": "s", "values": [8]}]},
        ],
    }
    share_ends(runs)
    for figures in runs.values():
        assert figures[0]["ends"] == pytest.approx((0, 10.5))
        assert figures[1]["ends"] == pytest.approx((0, 8.4))


def test_the_numbers_of_diagnostics_are_a_table_by_method_with_the_best_in_bold(tmp_path: Path) -> None:
    from tests.report.test_page import page_of

    make_comparison(tmp_path / "c", ("fedavg", "fedbn"), seeds=3)
    for row, level in ((0, 0.5), (1, 0.2)):
        for seed in range(3):
            key = {"label": "loss gap", "value": level + 0.001 * seed, "better": "low"}
            figure = {**LINES, "series": [{**LINE, "y": [level, seed]}], "key": key}
            record(tmp_path / "c" / f"row{row}" / f"seed{seed}", {"name": "d", "figures": [figure]})
    page = page_of(tmp_path / "c")
    table = page[page.index("loss gap ↓") :].partition("</tbody>")[0]
    assert "<b>0.201</b>" in table
    assert ">0.501" in table
