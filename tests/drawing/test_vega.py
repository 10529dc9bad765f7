"""The one description of figures: axes begin where the eye expects, names are only data, and gaps are gaps."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fedkeel.drawing.show import as_file
from fedkeel.drawing.theme import COLOURS, DASHES, config
from fedkeel.drawing.vega import Spec, chart

HOSTILE = ["a'b\"c", "datum.y", "</script>", "[x].y\\", "_b", "日本", ""]
LINES = {"kind": "lines", "x_label": "round", "y_label": "loss"}
BARS = {"kind": "bars", "categories": ["a", "b"], "y_label": "seconds"}


def line(name: str, y: list[Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "x": list(range(1, len(y) + 1)), "y": y, **more}


def rows(drawn: Spec) -> list[dict[str, Any]]:
    return list(drawn["data"]["values"])


def ticks(drawn: Spec) -> list[str]:
    """The numbers at the lower axis."""
    pytest.importorskip("vl_convert")
    return re.findall(r"<text[^>]*>(\d+)</text>", as_file(drawn, "svg").decode())


def expressions(spec: Any) -> list[str]:
    """Every text in a description that Vega would read as an expression."""
    if isinstance(spec, list):
        return [text for part in spec for text in expressions(part)]
    if not isinstance(spec, dict):
        return []
    keys = ("calculate", "filter", "test", "expr")
    own = [value for key, value in spec.items() if key in keys and type(value) is str]
    return own + [text for part in spec.values() for text in expressions(part)]


def test_a_name_is_never_part_of_an_expression() -> None:
    figures = [
        {**LINES, "series": [line(name, [1.0, 2.0]) for name in HOSTILE], "title": HOSTILE[0]},
        {"kind": "bars", "categories": HOSTILE, "series": [{"name": n, "values": [1.0] * 7} for n in HOSTILE]},
        {"kind": "matrix", "rows": HOSTILE, "columns": HOSTILE, "values": [[1.0] * 7] * 7},
        {"kind": "points", "x": [1.0] * 7, "y": [1.0] * 7, "class": HOSTILE, "domain": HOSTILE},
    ]
    for figure in figures:
        found = expressions(chart(figure))
        assert found
        for name in filter(None, HOSTILE[:1] + HOSTILE[2:]):
            assert not any(name in text for text in found), (figure["kind"], name)
        json.dumps(chart(figure), allow_nan=False)


def test_percents_end_at_a_hundred() -> None:
    drawn = chart({**BARS, "percent": True, "series": [{"name": "s", "values": [61.0, 74.0]}]})
    assert drawn["layer"][0]["encoding"]["x"]["scale"]["domain"] == [0, 100]
    assert (
        "domain"
        not in chart({**BARS, "series": [{"name": "s", "values": [-2.0, None]}]})["layer"][0]["encoding"]["x"]["scale"]
    )


def test_whiskers_are_the_spread_or_the_interval_that_is_given() -> None:
    (spread,) = rows(chart({**BARS, "series": [{"name": "s", "values": [4.0, 5.0], "spread": [1.0, None]}]}))
    assert (spread["low"], spread["high"]) == ([3.0, 5.0], [5.0, 5.0])
    series = {"name": "s", "values": [0.0, 5.0], "low": [0.0, 4.5], "high": [2.0, 7.0]}
    (given,) = rows(chart({**BARS, "series": [series]}))
    assert (given["low"], given["high"]) == ([0.0, 4.5], [2.0, 7.0])


def test_figures_beside_each_other_have_the_ends_that_are_given() -> None:
    for figure, place in (({**LINES, "series": [line("a", [1.0])]}, ("encoding", "y")),):
        drawn = chart({**figure, "ends": (-1, 7)})
        assert drawn[place[0]][place[1]]["scale"]["domain"] == [-1, 7]


def test_a_single_round_has_its_own_tick_in_the_middle() -> None:
    assert ticks(
        chart({**LINES, "series": [{"name": "a", "x": [7], "y": [0.1]}, {"name": "b", "x": [7], "y": [0.2]}]})
    ) == ["7"]


@pytest.mark.parametrize(("rounds", "wanted"), [(2, "1 2"), (3, "1 2 3"), (6, "1 2 3 4 5 6"), (30, "5 10 15 20 25 30")])
def test_rounds_are_written_once_each(rounds: int, wanted: str) -> None:
    y = [0.5 + 0.01 * (i % 2) for i in range(rounds)]
    assert ticks(chart({**LINES, "series": [{"name": "a", "x": [*range(1, rounds + 1)], "y": y}]})) == wanted.split()


def test_a_logarithm_leaves_out_what_has_none() -> None:
    drawn = chart({**LINES, "log_y": True, "series": [line("a", [0.0, -1.0, 10.0, None])]})
    assert rows(drawn)[0]["y"] == [None, None, 10.0, None]
    assert drawn["encoding"]["y"]["scale"]["type"] == "log"


def test_a_name_has_the_same_colour_in_every_figure_and_an_eleventh_is_dashed() -> None:
    names = [f"method {i}" for i in range(11)]
    lines = chart({**LINES, "names": names, "series": [line(names[4], [1.0])]})
    bars = chart({**BARS, "names": names, "series": [{"name": names[4], "values": [1.0, 2.0]}]})
    for drawn in (lines, bars):
        assert drawn["encoding"]["color"]["scale"]["domain"] == names
    layer = next(layer for layer in lines["layer"] if "strokeDash" in layer.get("encoding", {}))
    assert layer["encoding"]["strokeDash"]["scale"]["range"] == [DASHES[0]] * 10 + [DASHES[1]]


def test_it_says_in_words_what_it_shows() -> None:
    many = chart({**LINES, "series": [line(f"m{i}", [1.0]) for i in range(11)]})
    assert many["description"].startswith("loss; m0, m1,")


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
