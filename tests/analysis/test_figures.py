"""The figure follows from the shape of the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from fedkeel.analysis import number
from fedkeel.analysis.figures import of_numbers


def figure(key: str, *values: Any) -> dict[str, Any]:
    """Of what stands under a key in rounds 0, 1, ..."""
    (found,) = of_numbers({round: {key: value} for round, value in enumerate(values)})
    return found


def test_a_number_is_a_line_over_the_rounds_and_of_one_round_a_bar() -> None:
    line = figure("squared norm", 4.0, None, 2.0)
    assert (line["kind"], line["title"], line["x_label"], line["y_label"]) == (
        *("lines", "Squared norm", "round", "squared norm"),
    )
    assert line["series"] == [{"name": "squared norm", "x": [1, 2, 3], "y": [4.0, None, 2.0]}]
    assert figure("squared norm", 4.0)["kind"] == "bars"


def test_names_are_lines_over_the_rounds_in_which_they_are_there() -> None:
    found = figure("norm by client", {"a": 1.0}, {"a": 2.0, "b": 3.0})
    assert [(line["name"], line["x"]) for line in found["series"]] == [("a", [1, 2]), ("b", [2])]
    single = figure("accuracy (0 to 1) by domain", {"a": 0.5, "b": None})
    assert (single["title"], single["x_label"], single["y_label"]) == (
        *("Accuracy by domain", "domain", "accuracy (0 to 1)"),
    )
    assert (single["categories"], single["series"][0]["values"]) == (["a", "b"], [0.5, None])
    many = dict.fromkeys(map(str, range(13)), 1.0)
    assert figure("norm by client", many, many)["kind"] == "bars"  # so many lines cannot be told apart


def test_lists_are_lines_over_the_index_of_the_last_round() -> None:
    found = figure("value by channel", {"a": [9.0]}, {"a": [3.0, 2.0]})
    assert (found["x_label"], found["series"]) == ("channel", [{"name": "a", "x": [1, 2], "y": [3.0, 2.0]}])


def test_few_rows_are_bars_beside_each_other_and_others_a_matrix() -> None:
    rows = {"global": {"a": 0.1, "b": 0.2}, "batch": {"a": 0.3, "b": 0.4}}
    found = figure("accuracy by statistics and domain", rows)
    assert (found["kind"], found["categories"], found["x_label"]) == ("bars", ["a", "b"], "domain")
    assert [(series["name"], series["values"]) for series in found["series"]] == [
        ("global", [0.1, 0.2]),
        ("batch", [0.3, 0.4]),
    ]
    square = figure("divergence by domain and domain", {"a": {"a": 0.0, "b": 1.0}, "b": {"a": 1.0, "b": 0.0}})
    assert (square["kind"], square["values"]) == ("matrix", [[0.0, 1.0], [1.0, 0.0]])
    many = figure("samples by client and class", {str(k): {"cat": k, "dog": 1} for k in range(5)})
    assert (many["kind"], many["y_label"], many["x_label"]) == ("matrix", "client", "class")
    assert (many["rows"], many["columns"]) == (["0", "1", "2", "3", "4"], ["cat", "dog"])


def test_places_are_points_and_nothing_is_no_figure() -> None:
    places = {"x": [0.0], "y": [1.0], "class": ["cat"], "domain": ["photo"]}
    assert figure("map", places).items() >= {"kind": "points", **places}.items()
    assert of_numbers({0: {"norm by client": {}}}) == []


@pytest.mark.parametrize(("values", "log"), [((1.0, 200.0), True), ((1.0, 50.0), False), ((0.0, 200.0), False)])
def test_numbers_far_apart_have_a_logarithmic_axis(values: tuple[float, ...], log: bool) -> None:
    assert figure("norm", *values).get("log_y", False) == log


def test_a_number_is_found_by_the_end_of_its_names() -> None:
    numbers = {"gap": {"test": 2.0}, "accuracy (0 to 1) by domain and way": {"photo": {"rule 4": 0.5}}, "list": [1.0]}
    document = {"rounds": [{"round": 0, "numbers": numbers}], "figures": [{"kind": "bars"}]}
    assert [number(document, at) for at in ("test", "rule 4", "photo rule 4", "e 4", "")] == [2.0, 50, 50, None, None]
