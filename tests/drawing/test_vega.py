"""The one description of figures: axes begin where the eye expects, names are only data, and gaps are gaps."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fedkeel.drawing.show import as_file
from fedkeel.drawing.theme import COLOURS, DASHES, config
from fedkeel.drawing.vega import Chart, chart, span

HOSTILE = ["a'b\"c", "datum.y", "</script>", "[x].y\\", "_b", "日本", ""]
LINES = {"kind": "lines", "x_label": "round", "y_label": "loss"}
BARS = {"kind": "bars", "categories": ["a", "b"], "y_label": "seconds"}


def line(name: str, y: list[Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "x": list(range(1, len(y) + 1)), "y": y, **more}


def ticks(drawn: Chart) -> list[str]:
    """The numbers at the lower axis."""
    pytest.importorskip("vl_convert")
    return re.findall(r"<text[^>]*>(\d+)</text>", as_file(drawn.whole(), "svg").decode())


def expressions(spec: Any) -> list[str]:
    """Every text in a description that Vega would read as an expression."""
    if isinstance(spec, list):
        return [text for part in spec for text in expressions(part)]
    if not isinstance(spec, dict):
        return []
    own = [
        value for key, value in spec.items() if key in ("calculate", "filter", "test", "expr") and type(value) is str
    ]
    return own + [text for part in spec.values() for text in expressions(part)]


def test_a_name_is_never_part_of_an_expression() -> None:
    figures = [
        {**LINES, "series": [line(name, [1.0, 2.0]) for name in HOSTILE], "title": HOSTILE[0]},
        {"kind": "bars", "categories": HOSTILE, "series": [{"name": n, "values": [1.0] * 7} for n in HOSTILE]},
        {"kind": "matrix", "rows": HOSTILE, "columns": HOSTILE, "values": [[1.0] * 7] * 7},
        {"kind": "points", "x": [1.0] * 7, "y": [1.0] * 7, "class": HOSTILE, "domain": HOSTILE},
    ]
    for figure in figures:
        found = expressions(chart(figure).whole())
        assert found
        for name in filter(None, HOSTILE[:1] + HOSTILE[2:]):
            assert not any(name in text for text in found), (figure["kind"], name)
        json.dumps(chart(figure).whole(), allow_nan=False)


def test_bars_begin_at_zero_and_percents_end_at_a_hundred() -> None:
    drawn = chart({**BARS, "percent": True, "series": [{"name": "s", "values": [61.0, 74.0]}]})
    assert (drawn.values["low"], drawn.values["base"], drawn.values["high"]) == (0, 0, 100)
    negative = chart({**BARS, "series": [{"name": "s", "values": [-2.0, None]}]})
    assert (negative.values["low"], negative.values["base"]) == (-2, 0)
    assert chart({**BARS, "series": [{"name": "s", "values": [None, None]}]}).values["high"] == 1


def test_whiskers_are_the_spread_or_the_interval_that_is_given() -> None:
    spread = chart({**BARS, "series": [{"name": "s", "values": [4.0, 5.0], "spread": [1.0, None]}]})
    assert (spread.data[0]["under"], spread.data[0]["over"]) == ([3.0, 5.0], [5.0, 5.0])
    given = chart({**BARS, "series": [{"name": "s", "values": [0.0, 5.0], "low": [0.0, 4.5], "high": [2.0, 7.0]}]})
    assert (given.data[0]["under"], given.data[0]["over"]) == ([0.0, 4.5], [2.0, 7.0])
    assert given.values["high"] == 7.0


def test_on_a_logarithmic_axis_are_points_which_need_no_zero() -> None:
    values = {"series": [{"name": "s", "values": [0.02, 5.0]}]}
    logarithmic, linear = chart({**BARS, **values, "log_y": True}), chart({**BARS, **values})
    marks = [drawn.spec["layer"][0]["mark"]["type"] for drawn in (logarithmic, linear)]
    assert marks == ["point", "bar"]
    assert "x2" not in logarithmic.spec["layer"][0]["encoding"]
    assert 0 < logarithmic.values["low"] < 0.02, "room for the text"
    with_zero = chart({**BARS, "log_y": True, "series": [{"name": "s", "values": [0.0, 5.0]}]})
    assert with_zero.spec["layer"][0]["mark"]["type"] == "bar", "where there is a zero there is no logarithm"


@pytest.mark.parametrize(("value", "width", "behind"), [(62.0, 900, False), (62.0, 260, False), (10.0, 260, True)])
def test_what_is_written_beside_a_bar_is_not_cut_off(value: float, width: int, behind: bool) -> None:
    pytest.importorskip("vl_convert")
    series = [{"name": "a_method(of=3)", "values": [value], "spread": [5.0]}, {"name": "b", "values": [1.0]}]
    spec = chart({**BARS, "categories": ["a"], "percent": True, "series": series}).whole()
    drawn = as_file({**spec, "width": width}, "svg").decode()
    [place] = re.findall(r"<text[^>]*translate\(([\d.]+)[^>]*>a_method[^<]*±", drawn)
    assert (float(place) > 5) == behind  # only where there is room for it


@pytest.mark.parametrize(
    ("values", "options", "wanted"),
    [
        ([10.0, 90.0], {"percent": True}, (6, 94)),
        ([1.0, 99.0], {"percent": True}, (0, 100)),
        ([99.0, 101.0], {"percent": True}, (98.9, 101.1)),
        ([-1.0, 1.0], {}, (-1.1, 1.1)),
        ([3.0], {}, (2.85, 3.15)),
        ([], {}, (0, 1.05)),
        ([5.0], {"log": True}, (2.5, 10)),
    ],
)
def test_the_ends_of_an_axis(values: list[float], options: dict[str, bool], wanted: tuple[float, float]) -> None:
    assert span(values, **options) == pytest.approx(wanted)


def test_a_single_round_has_its_own_tick_in_the_middle() -> None:
    drawn = chart({**LINES, "series": [{"name": "a", "x": [7], "y": [0.1]}, {"name": "b", "x": [7], "y": [0.2]}]})
    assert (drawn.values["first"], drawn.values["last"]) == (6.5, 7.5)
    assert ticks(drawn) == ["7"]


@pytest.mark.parametrize(("rounds", "wanted"), [(2, "1 2"), (3, "1 2 3"), (6, "1 2 3 4 5 6"), (30, "5 10 15 20 25 30")])
def test_rounds_are_written_once_each(rounds: int, wanted: str) -> None:
    drawn = chart({**LINES, "series": [{"name": "a", "x": [*range(1, rounds + 1)], "y": [0.5] * rounds}]})
    assert ticks(drawn) == wanted.split()


def test_a_logarithm_leaves_out_what_has_none() -> None:
    drawn = chart({**LINES, "log_y": True, "series": [line("a", [0.0, -1.0, 10.0, None])]})
    assert drawn.data[0]["y"] == [None, None, 10.0, None]
    assert drawn.spec["encoding"]["y"]["scale"]["type"] == "log"
    flat = chart({**LINES, "log_y": True, "series": [line("a", [0.0, -1.0])]})
    assert "type" not in flat.spec["encoding"]["y"]["scale"], "where nothing is positive there is no logarithm"


def test_a_name_has_the_same_colour_in_every_figure_and_an_eleventh_is_dashed() -> None:
    names = [f"method {i}" for i in range(11)]
    lines = chart({**LINES, "names": names, "series": [line(names[4], [1.0])]})
    bars = chart({**BARS, "names": names, "series": [{"name": names[4], "values": [1.0, 2.0]}]})
    for drawn in (lines, bars):
        assert drawn.spec["encoding"]["color"]["scale"]["domain"] == names
    layer = next(layer for layer in lines.spec["layer"] if "strokeDash" in layer.get("encoding", {}))
    assert layer["encoding"]["strokeDash"]["scale"]["range"] == [DASHES[0]] * 10 + [DASHES[1]]


def test_data_stay_in_columns_and_a_shared_description_has_none() -> None:
    one, other = (chart({**LINES, "series": [line("a", [value] * 50)]}) for value in (1.0, 2.0))
    assert one.spec == other.spec, "a page keeps it once"
    assert one.data[0]["y"] == [1.0] * 50
    assert "data" not in one.spec
    assert one.whole()["data"]["values"] == one.data


def test_it_says_in_words_what_it_shows() -> None:
    many = chart({**LINES, "series": [line(f"m{i}", [1.0]) for i in range(11)]})
    assert many.spec["description"].startswith("loss, by round: m0, m1,")
    assert many.spec["description"].endswith("and 3 others")


# -- colours ---------------------------------------------------------------------------------------------------------
SEEN = {  # Machado, Oliveira and Fernandes (2009), severity 1
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def product(matrix: Any, vector: Any) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def linear(colour: str) -> list[float]:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def oklab(light: list[float]) -> list[float]:
    """Björn Ottosson (2020)."""
    cones = product(
        ((0.4122215, 0.5363325, 0.0514460), (0.2119035, 0.6806995, 0.1073970), (0.0883025, 0.2817188, 0.6299787)),
        [min(1.0, max(0.0, c)) for c in light],
    )
    rows = ((0.2104543, 0.7936178, -0.0040720), (1.9779985, -2.4285922, 0.4505937), (0.0259040, 0.7827718, -0.8086758))
    return product(rows, [c ** (1 / 3) for c in cones])


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("eyes", SEEN)
def test_colours_can_be_told_apart_by_everyone(theme: str, eyes: str) -> None:
    places = [oklab(product(SEEN[eyes], linear(colour))) for colour in COLOURS[theme]]
    nearest = min(
        sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5
        for i, one in enumerate(places)
        for other in places[:i]
    )
    assert nearest > 0.09


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_stand_out_from_their_paper(theme: str) -> None:
    paper = next(param["value"] for param in config(theme)["params"] if param["name"] == "paper")
    weights = (0.2126, 0.7152, 0.0722)
    for colour in COLOURS[theme]:
        low, high = sorted(sum(w * c for w, c in zip(weights, linear(x), strict=True)) for x in (colour, paper))
        assert (high + 0.05) / (low + 0.05) >= 3
