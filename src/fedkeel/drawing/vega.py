"""A figure as Vega-Lite: the one description that a page, a notebook and the file for a paper are drawn from.

A figure is a plain table that JSON can hold, of one of four kinds: lines, bars, matrix, points (see
`fedkeel.analysis.figures`). Its numbers stay in columns, which Vega unfolds; names are data and never part of an
expression, so they may be any text.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fedkeel.drawing.theme import COLOURS, DASHES, SHAPES

Spec = dict[str, Any]
Given = Mapping[str, Any]
BAR, GAP = 19, 8  # of bars, in pixels: how high each is, and the room between their groups
FEW = 15  # rounds of which each has a dot
WHOLE = "clamp(floor(domain('x')[1] - domain('x')[0]), 1, 5)"  # ticks between whole numbers
LINE = 46  # letters of a title that fit on a phone
NUMBER = "(abs({0}) < 1e-3 && {0} != 0 || abs({0}) >= 1e5 ? format({0}, '.3~e') : format({0}, '.4~r'))"
# The wheel alone scrolls the page; two fingers on a touchpad are the wheel with Ctrl.
WHEEL = {"type": "interval", "zoom": "wheel![event.ctrlKey || event.metaKey]"}
ZOOM = {"name": "zoom", "select": WHEEL, "bind": "scales"}


def chart(figure: Given) -> Spec:
    """A figure as Vega-Lite, as wide as the place it is in; a table is none, and refused with a `KeyError`.

    Besides what its kind has, a figure may have `names`, all in the order of their colours; `shown`, those that are
    seen before anything is chosen in the legend; and `ends`, of the axis of its values.
    """
    names = list(figure.get("names") or dict.fromkeys(series["name"] for series in figure.get("series", ())))
    title = textwrap.wrap(figure.get("title") or "", LINE)
    label = textwrap.wrap(figure.get("y_label") or "", LINE) if figure["kind"] == "lines" else []
    about = ": ".join(filter(None, (figure.get("title"), figure.get("y_label")))) or "A figure"
    return {
        "title": {"text": title, "subtitle": label} if title else {"text": label} if label else None,
        "description": f"{about}; {', '.join(names[:8])}" if names else about,
        "width": "container",
        "autosize": {"contains": "padding"},
        **KINDS[figure["kind"]](figure, names),
    }


# -- what they share --------------------------------------------------------------------------------------------------
def _number(of: str, title: Any = None, **more: Any) -> Spec:
    return {"field": of, "type": "quantitative", "title": title or None, **more}


def _values(figure: Given, **scale: Any) -> Spec:
    """The scale of the values; with the ends that are given, so that two figures beside each other can be compared."""
    ends = {"domain": list(figure["ends"]), "nice": False} if "ends" in figure else {}
    return {"padding": 8, "type": "log", **ends} if figure.get("log_y") else {**scale, **ends}


def _colour(by: str, names: Sequence[str], **symbol: Any) -> Spec:
    widest = min(7 * max(map(len, names), default=0) + 45, 300)
    columns = {"expr": f"max(1, floor((containerSize()[0] || 520) / {widest}))"}
    legend = {"title": None, "columns": columns, "symbolLimit": 0, "symbolOpacity": 1, **symbol}
    return {"field": by, "type": "nominal", "scale": {"domain": names}, "legend": legend if len(names) > 1 else None}


def _chosen(by: str, names: Sequence[str], shown: Sequence[str] = ()) -> tuple[Spec, Spec]:
    """The parameter by which a click in the legend chooses what is seen (with Shift, one more), and the filter."""
    value = {"value": [{by: name} for name in shown]} if 0 < len(shown) < len(names) else {}
    select = {"type": "point", "fields": [by]}
    return {"name": f"chosen_{by}", "select": select, "bind": "legend", **value}, {"filter": {"param": f"chosen_{by}"}}


def _calculate(**expressions: str) -> list[Spec]:
    return [{"calculate": expression, "as": name} for name, expression in expressions.items()]


def _text(figure: Given) -> str:
    """A value with its spread, as it is read: an expression."""
    text = "format({0}, '.1f')" if figure.get("percent") else NUMBER
    return f"{text.format('datum.y')} + (isValid(datum.spread) ? ' ±' + {text.format('datum.spread')} : '')"


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


# -- the kinds --------------------------------------------------------------------------------------------------------
def _lines(figure: Given, names: list[str]) -> Spec:
    log, data = figure.get("log_y"), []
    for series in figure["series"]:
        y = [v if v is not None and (v > 0 or not log) else None for v in series["y"]]
        columns = zip(series["x"], y, series.get("spread") or [None] * len(y), strict=True)
        x, y, spread = map(list, zip(*columns, strict=True)) if y else ([], [], [])
        few = series.get("few") or [""] * len(y)
        data.append({"name": series["name"], "x": x, "y": y, "spread": spread, "few": few})
    places = {x for row in data for x in row["x"]}
    middle = {"domain": [x + side for x in places for side in (-0.5, 0.5)]} if len(places) == 1 else {}
    axis = {"tickCount": {"expr": WHOLE}} if all(float(x).is_integer() for x in places) else {}
    across = {"zero": False, "nice": False, "padding": 6, **middle}
    colour = _colour("name", names, symbolType="stroke", symbolStrokeWidth=2)
    dashes = [DASHES[place // len(COLOURS["light"]) % len(DASHES)] for place in range(len(names))]
    dashed = {"strokeDash": {**colour, "scale": {"domain": names, "range": dashes}}}
    chosen, seen = _chosen("name", names, figure.get("shown", ()))
    half = "isValid(datum.y) ? datum.y {} datum.spread : null"
    dots = {"point": {"size": 26}} if max((len(row["x"]) for row in data), default=0) <= FEW else {}
    line = {"type": "line", "strokeWidth": 2, "strokeJoin": "round", "strokeCap": "round", "clip": True, **dots}
    band = {"y": _number("lower"), "y2": {"field": "upper"}}
    return {
        "data": {"name": "given", "values": data},
        "height": 300,
        "usermeta": {"x": figure.get("x_label") or "x"},
        "transform": [
            *({"flatten": ["x", "y", "spread", "few"]}, seen),
            *_calculate(text=f"{_text(figure)} + datum.few", lower=half.format("-"), upper=half.format("+")),
        ],
        "encoding": {
            "x": _number("x", figure.get("x_label"), axis={"grid": False, **axis}, scale=across),
            "y": _number("y", scale=_values(figure, zero=False)),
            "color": colour,
        },
        "layer": [
            *([{"mark": {"type": "area", "opacity": 0.14, "clip": True}, "encoding": band}] if not log else []),
            {"mark": line, "encoding": dashed if len(names) > len(COLOURS["light"]) else {}, "params": [chosen, ZOOM]},
            *_values_at(),
        ],
    }


def _values_at() -> list[Spec]:
    """All that is seen at the place that is pointed at."""
    nearest = {"type": "point", "fields": ["x"], "nearest": True, "on": "pointermove", "clear": "pointerout"}
    of_all = [{"filter": "isValid(datum.y)"}, {"pivot": "name", "value": "text", "groupby": ["x"], "op": "max"}]
    rule = {"type": "rule", "strokeDash": [3, 3], "tooltip": {"content": "data"}}
    lit = {"opacity": {"condition": {"param": "at", "empty": False, "value": 1}, "value": 0}}
    dot = {"type": "point", "filled": True, "opacity": 1, "size": 70, "clip": True}
    at = {"name": "at", "select": nearest}
    return [
        {"transform": of_all, "mark": rule, "encoding": {"y": None, "color": None, **lit}, "params": [at]},
        {"transform": [{"filter": {"param": "at", "empty": False}}], "mark": dot},
    ]


def _bars(figure: Given, names: list[str]) -> Spec:
    """Lying, so that names have room, with the name and the number at the root of a long bar, and behind the whiskers
    of a short one."""
    categories, several, data = list(figure["categories"]), len(figure["series"]) > 1, []
    for series in figure["series"]:
        pairs = [*zip(series["values"], series.get("spread") or [None] * len(categories), strict=True)]
        low, high = ([None if v is None else v + sign * (s or 0) for v, s in pairs] for sign in (-1, 1))
        ends = {"low": series.get("low") or low, "high": series.get("high") or high}
        more = {"spread": [s for _, s in pairs], "seeds": series.get("seeds") or [[] for _ in categories]}
        data.append({"name": series["name"], "x": categories, "y": series["values"], **ends, **more})
    every = known(value for row in data for key in ("low", "high") for value in row[key])
    least, most = min(every, default=0), max(every, default=0)
    shares = {"domain": [0, 100]} if figure.get("percent") and 0 <= least <= most <= 100 else {}
    label = f"datum.name + '   ' + {_text(figure)}" if several else _text(figure)
    tip = f"datum.x + ', ' + datum.name + ': ' + {_text(figure)}"
    chosen, seen = _chosen("name", names, figure.get("shown", ()))
    rows = {"field": "x", "type": "nominal", "title": None, "axis": {"domain": False, "ticks": False}}
    x = _number("y", figure.get("y_label"), stack=None, scale={**_values({**figure, "log_y": False}), **shares})
    written = {"x": _number("start"), "text": {"field": "label"}, "color": None}
    whiskers = {"x": _number("low"), "x2": {"field": "high"}, "color": None}
    dots = {"x": _number("seed"), "color": {"value": {"expr": "ink"}}}
    return {
        "data": {"name": "given", "values": data},
        "height": len(categories) * (BAR * min(len(data), len(figure.get("shown") or data)) + GAP),
        "transform": [
            {"flatten": ["x", "y", "spread", "low", "high", "seeds"]},
            *(seen, {"filter": "isValid(datum.y)"}),
            *_calculate(label=label, tip=tip, start=f"datum.high < {0.4 * (100 if shares else most)} ? datum.high : 0"),
        ],
        "encoding": {
            "y": {**rows, "scale": {"domain": categories, "paddingInner": 0.12}},
            "color": _colour("name", names),
            **({"yOffset": {"field": "name", "type": "nominal", "sort": None}} if several else {}),
        },
        "layer": [
            {
                "mark": {"type": "bar", "opacity": 0.42},
                "encoding": {"x": x, "tooltip": {"field": "tip"}},
                "params": [chosen],
            },
            {"mark": {"type": "text", "align": "left", "dx": 5, "limit": 260}, "encoding": written},
            {"mark": {"type": "rule", "strokeWidth": 1.6}, "encoding": whiskers},
            {
                "transform": [{"flatten": ["seeds"], "as": ["seed"]}, {"filter": "isValid(datum.seed)"}],
                "mark": {"type": "point", "filled": True, "size": 14, "opacity": 0.8},
                "encoding": dots,
            },
        ],
    }


def _matrix(figure: Given, _: list[str]) -> Spec:
    columns, lines = list(figure["columns"]), zip(figure["rows"], figure["values"], strict=True)
    data = [{"name": row, "x": columns, "y": line} for row, line in lines]
    values = known(value for line in figure["values"] for value in line)
    low, high = figure.get("ends") or (min(values, default=0), max(values, default=1))
    signed, most = low < 0 < high, max(-low, high)
    low, high = (-most, most) if signed else (low, high if high > low else low + 1)
    share = f"abs(datum.y) / {high}" if signed else f"(datum.y - {low}) / {high - low}"
    shades = {"domain": [low, 0, high] if signed else [low, high], "range": "diverging" if signed else "heatmap"}
    ink = {"condition": {"test": f"{share} > darkens", "value": {"expr": "strong"}}, "value": {"expr": "weak"}}
    room = max((len(f"{value:.4g}") for value in values), default=1) * 6.5 + 2
    axis = {"domain": False, "ticks": False, "labelOverlap": True}
    top = {**axis, "orient": "top", "labelAngle": -40 if max(map(len, columns), default=0) > 4 else 0}
    tip = f"datum.name + ' / ' + datum.x + ': ' + {NUMBER.format('datum.y')}"
    colour = _number("y", scale={**shades, "interpolate": "rgb"}, legend=None)
    cell = {"type": "rect", "stroke": {"expr": "paper"}, "cornerRadius": 2}
    text = {"type": "text", "opacity": {"expr": f"bandwidth('x') >= {room:.0f} ? 1 : 0"}}
    sides = (("x", "x", "x_label", columns, top), ("y", "name", "y_label", list(figure["rows"]), axis))
    return {
        "data": {"name": "given", "values": data},
        "height": len(data) * (28 if len(data) <= 30 else 14),
        "usermeta": {"widest": 200 + 64 * len(columns)},
        "transform": [
            *({"flatten": ["x", "y"]}, {"filter": "isValid(datum.y)"}),
            *_calculate(text=NUMBER.format("datum.y"), tip=tip),
        ],
        "encoding": {
            side: {
                "field": of,
                "title": figure.get(label) or None,
                "type": "nominal",
                "scale": {"domain": all},
                "axis": line,
            }
            for side, of, label, all, line in sides
        },
        "layer": [
            {"mark": cell, "encoding": {"color": colour, "tooltip": {"field": "tip"}}},
            {"mark": text, "encoding": {"text": {"field": "text"}, "color": ink}},
        ],
    }


def _points(figure: Given, _: list[str]) -> Spec:
    # In an order that does not depend on the points, so that two figures beside each other agree.
    classes, domains = (sorted(set(figure[key]), key=lambda name: (len(name), name)) for key in ("class", "domain"))
    places = zip(figure["x"], figure["y"], figure["class"], figure["domain"], strict=True)
    shape = _colour("domain", domains)
    chosen, seen = _chosen("class", classes)
    return {
        "data": {"name": "given", "values": [dict(zip(("x", "y", "class", "domain"), p, strict=True)) for p in places]},
        "height": 380,
        "transform": [seen, *_calculate(tip="datum['class'] + ' ' + datum.domain")],
        "encoding": {
            "x": _number("x", figure.get("x_label"), scale={"zero": False, "padding": 8}),
            "y": _number("y", figure.get("y_label"), scale=_values(figure, zero=False, padding=8)),
            "color": _colour("class", classes),
            "shape": {**shape, "scale": {"domain": domains, "range": SHAPES}},
            "tooltip": {"field": "tip"},
        },
        "mark": {"type": "point", "filled": True, "size": 34, "opacity": 0.8, "clip": True},
        "params": [chosen, ZOOM],
    }


KINDS: dict[str, Callable[[Given, list[str]], Spec]] = {
    "lines": _lines,
    "bars": _bars,
    "matrix": _matrix,
    "points": _points,
}
