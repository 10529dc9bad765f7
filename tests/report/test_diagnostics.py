"""Recorded diagnostics: every kind of figure is taken, and one that is not as agreed is left out with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedkeel.report import collect
from fedkeel.report import diagnostics as module
from fedkeel.report.diagnostics import MOST_POINTS, Unreadable, checked, short
from tests.report.samples import add_diagnostics, make_comparison, make_run

LINE = {"name": "a", "x": [0, 1], "y": [0.5, None]}


def record(directory: Path, document: Any, name: str = "made-up") -> None:
    (directory / "diagnostics").mkdir(exist_ok=True)
    (directory / "diagnostics" / f"{name}.json").write_text(json.dumps(document))


def test_every_kind_is_read_with_its_texts(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    add_diagnostics(tmp_path / "a")
    collected = collect([tmp_path / "a"])
    assert collected.notices == []
    norms, every = collected.groups[0].diagnostics
    assert [figure["kind"] for figure in every.runs["fedavg, seed 0"]] == ["lines", "bars", "matrix", "points", "table"]
    assert (every.title, every.paper) == ("A figure of every kind", "GReg, Figure 1")
    assert norms.runs["fedavg, seed 0"][0]["log_y"] is True


@pytest.mark.parametrize(
    ("figure", "reason"),
    [
        ({"kind": "pie"}, "'pie'"),
        ("lines", "'lines'"),
        ({"kind": "lines"}, "no list 'series'"),
        ({"kind": "lines", "series": [{**LINE, "y": [1.0]}]}, "2 x and 1 y"),
        ({"kind": "lines", "series": [{**LINE, "x": [0, None]}]}, "2 x and 2 y"),
        ({"kind": "lines", "series": [{**LINE, "y": ["high", 1]}]}, "not numbers"),
        ({"kind": "lines", "series": [{"x": [], "y": []}]}, "no 'name'"),
        (
            {"kind": "bars", "categories": ["a"], "series": [{"name": "s", "values": [1, 2]}]},
            "2 values for 1 categories",
        ),
        ({"kind": "bars", "categories": ["a"], "series": [{"name": "s", "values": [1], "spread": [1, 2]}]}, "1 values"),
        ({"kind": "matrix", "rows": ["a"], "columns": ["b"], "values": [[1, 2]]}, "1 rows and 1 columns"),
        ({"kind": "points", "x": [1], "y": [1, 2], "class": ["a"], "domain": ["b"]}, "not of one length"),
        ({"kind": "table", "columns": ["a", "b"], "rows": [[1]]}, "its 2 columns"),
    ],
)
def test_what_is_not_as_agreed_is_refused_with_the_reason(figure: Any, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        checked(figure)


def test_one_bad_file_costs_neither_the_report_nor_the_others(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    record(tmp_path / "a", {"name": "bad", "figures": [{"kind": "pie"}]}, "bad")
    record(tmp_path / "a", {"name": "good", "title": "Good", "figures": [{"kind": "lines", "series": [LINE]}]}, "good")
    (tmp_path / "a" / "diagnostics" / "cut.json").write_text('{"name": "cu')
    record(tmp_path / "a", ["no", "object"], "list")
    collected = collect([tmp_path / "a"])
    assert [diagnostic.name for diagnostic in collected.groups[0].diagnostics] == ["good"]
    for name in ("bad.json", "cut.json", "list.json"):
        assert sum(name in notice for notice in collected.notices) == 1


def test_not_a_number_becomes_a_gap(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    record(
        tmp_path / "a", {"name": "d", "figures": [{"kind": "lines", "series": [{**LINE, "y": [float("nan"), 1.0]}]}]}
    )
    (diagnostic,) = collect([tmp_path / "a"]).groups[0].diagnostics
    assert diagnostic.runs["fedavg, seed 0"][0]["series"][0]["y"] == [None, 1.0]


def test_many_points_are_thinned_and_it_is_said() -> None:
    count = 3 * MOST_POINTS
    figure = {
        "kind": "points",
        "x": list(range(count)),
        "y": [0.0] * count,
        "class": ["a"] * count,
        "domain": ["b"] * count,
    }
    made = checked(figure)
    assert made["x"] == list(range(0, count, 3))
    assert len(made["class"]) == MOST_POINTS
    assert f"{MOST_POINTS} of {count} points" in made["note"]


def test_what_there_is_no_room_for_is_a_later_seeds_and_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_comparison(tmp_path / "c", ("fedavg", "fedbn"), seeds=2)
    for place in ("row0/seed0", "row0/seed1", "row1/seed0", "row1/seed1"):
        record(tmp_path / "c" / place, {"name": "d", "figures": [{"kind": "lines", "series": [LINE]}]})
    one = len(json.dumps([checked({"kind": "lines", "series": [LINE]})]))
    monkeypatch.setattr(module, "MOST_BYTES", 2 * one + 1)
    collected = collect([tmp_path / "c"])
    assert list(collected.groups[0].diagnostics[0].runs) == ["fedavg, seed 0", "fedbn, seed 0"]
    assert "Left out to keep this page small: d of fedavg, seed 1, d of fedbn, seed 1." in collected.notices[0]


def test_numbers_are_kept_to_five_digits() -> None:
    assert short(0.123456789) == 0.12346
    assert short(123456) == 123456
    assert short(None) is None
