"""A figure as Vega-Lite: the one description that a page, a notebook and the file for a paper are drawn from.

A figure is a plain table that JSON can hold, of one of four kinds: lines, bars, matrix, points (see
`fedkeel.analysis.figures`). Its numbers stay in columns, which Vega unfolds; names are data and never part of an
expression, so they may be any text.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedkeel.drawing.theme import COLOURS, DASHES, SHAPES, config

Spec = dict[str, Any]
WIDTH = 520  # of a figure on its own, in pixels at 96 a inch: the text of a page with one column
BAR, GAP = 19, 8  # of bars, in pixels: how high each is, and the room between their groups
FEW = 15  # rounds of which each has a dot
NUMBER = "(abs({0}) < 1e-3 && {0} != 0 || abs({0}) >= 1e5 ? format({0}, '.3~e') : format({0}, '.4~r'))"


@dataclass(frozen=True)
class Chart:
    """A figure described: `spec` is Vega-Lite without its data and without the values of its parameters."""

    kind: str
    spec: Spec
    data: list[dict[str, Any]]
    values: dict[str, Any]  # of the parameters: the ends of the axes, and what is hidden
    legend: dict[str, list[str]] = field(default_factory=dict)  # names by the parameter that hides them
    widest: int = 0  # beyond which it is not stretched, if there is such a width
    groups: int = 0  # of bars, each as high as it has bars that are not hidden

    def whole(self, theme: str = "light") -> Spec:
        """All that Vega-Lite needs to draw it by itself."""
        styles = config(theme)
        params = [*self.spec.get("params", ()), *styles.pop("params")]
        params += [{"name": name, "value": value} for name, value in self.values.items()]
        width = min(WIDTH, self.widest or WIDTH)
        return {**self.spec, "data": {"values": self.data}, "params": params, "width": width, "config": styles}


def chart(figure: Mapping[str, Any]) -> Chart:
    """What a figure looks like; a table is none, and refused with a `KeyError`."""
    return KINDS[figure["kind"]](figure)


# -- what they share ----------------------------------------------------------------------------------------------------
def _spec(figure: Mapping[str, Any], height: Any, **parts: Any) -> Spec:
    title = {"text": figure.get("title") or "", "subtitle": figure.get("y_label") or ""}
    fit = {"type": "fit-x", "contains": "padding"}
    return {"title": title, "description": described(figure), "height": height, "autosize": fit, **parts}


def described(figure: Mapping[str, Any]) -> str:
    """In words, for those who do not see it."""
    what = ": ".join(filter(None, (figure.get("title"), figure.get("y_label")))) or "A figure"
    if figure["kind"] == "matrix":
        return f"{what}, {len(figure['rows'])} rows by {len(figure['columns'])} columns"
    if figure["kind"] == "points":
        return f"{what}, {len(figure['x'])} points"
    names = [str(series["name"]) for series in figure["series"]]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} others" if len(names) > 8 else "")
    return f"{what}, by {figure['x_label']}: {shown}" if figure.get("x_label") else f"{what}: {shown}"


def _names(figure: Mapping[str, Any]) -> list[str]:
    """In the order of their colours, which may be given, so that a name has the same in all figures."""
    own = [series["name"] for series in figure["series"]]
    return list(figure.get("names") or dict.fromkeys(own))


def _colour(names: list[str], by: str = "name", **legend: Any) -> Spec:
    shown = {
        "title": None,
        "columns": 4 if max(map(len, names), default=0) < 14 else 2,
        "symbolLimit": 0,
        "symbolOpacity": 1,
        **legend,
    }
    return {"field": by, "type": "nominal", "scale": {"domain": names}, "legend": shown if len(names) > 1 else None}


def _hides(by: str, parameter: str = "hidden") -> Spec:
    return {"filter": f"indexof({parameter}, datum.{by}) < 0"}


def _ends(low: str, high: str, *, log: bool = False, **scale: Any) -> Spec:
    kind: Spec = {"type": "log"} if log else {"zero": False}
    return {"domain": [{"expr": low}, {"expr": high}], "nice": False, **kind, **scale}


def _ends_of_spread(of: str) -> list[Spec]:
    """Also where there is none, as a band needs it; none around a gap."""
    ends = (("-", "under"), ("+", "over"))
    return [
        {"calculate": f"isValid(datum.{of}) ? datum.{of} {sign} datum.spread : null", "as": as_} for sign, as_ in ends
    ]


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def span(values: Iterable[float], *, log: bool = False, percent: bool = False) -> tuple[float, float]:
    """The ends of an axis: a little beyond the values, and not beyond 0 or 100 % where they are not either."""
    found = list(values)
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    if log:
        return (low / 2, high * 2) if low == high else (low / 1.15, high * 1.15)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 0.5
    bottom, top = low - margin, high + margin
    return (max(bottom, 0.0) if low >= 0 else bottom, min(top, 100.0) if percent and high <= 100 else top)


def _both(values: Iterable[float | None], spread: Iterable[float | None] | None) -> list[float]:
    """Values, and the ends of the spread around them."""
    pairs = [(v, s or 0.0) for v, s in zip(values, spread, strict=True)] if spread else [(v, 0.0) for v in values]
    return [value + side * half for value, half in pairs if value is not None for side in (-1, 1)]


# -- the kinds ----------------------------------------------------------------------------------------------------------
def _lines(figure: Mapping[str, Any]) -> Chart:
    names = _names(figure)
    log = bool(figure.get("log_y")) and any(v > 0 for s in figure["series"] for v in known(s["y"]))
    data, values = [], []
    for series in figure["series"]:
        y = [v if v is not None and (v > 0 or not log) else None for v in series["y"]]
        spread = None if log else series.get("spread")
        data.append({"name": series["name"], "x": series["x"], "y": y, "spread": spread or [None] * len(y)})
        if "seeds" in series:
            data[-1]["seeds"] = series["seeds"]
        values += _both(y, spread)
    places = [x for series in figure["series"] for x in series["x"]]
    low, high = span(values, log=log, percent=bool(figure.get("percent")))
    pad = 0.5 if len(set(places)) == 1 else 0
    ends = {"first": min(places, default=0) - pad, "last": max(places, default=1) + pad, "low": low, "high": high}
    whole = {"tickMinStep": 1, "format": "d"} if all(float(x).is_integer() for x in places) else {}
    few = max((len(series["x"]) for series in figure["series"]), default=0) <= FEW
    neighbours = [{"op": op, "field": "y", "as": as_} for op, as_ in (("lag", "before"), ("lead", "after"))]
    lonely = f"isValid(datum.y) && ({str(few).lower()} || !isValid(datum.before) && !isValid(datum.after))"
    dashes = [DASHES[place // len(COLOURS["light"]) % len(DASHES)] for place in range(len(names))]
    zoom = {"type": "interval", "zoom": "wheel![event.shiftKey]"}
    y = {"field": "y", "type": "quantitative", "title": None}
    at = {"filter": "datum.x === at && isValid(datum.y)"}
    layers: list[Spec] = [
        {
            "mark": {"type": "line", "strokeWidth": 2, "strokeJoin": "round", "clip": True},
            "encoding": {
                "strokeDash": {"field": "name", "scale": {"domain": names, "range": dashes}, "legend": None},
                "opacity": {"condition": {"test": "lit && lit !== datum.name", "value": 0.12}, "value": 1},
            },
            "params": [{"name": "zoom", "select": zoom, "bind": "scales"}],
        },
        {
            "transform": [{"window": neighbours, "groupby": ["name"]}, {"filter": lonely}],
            "mark": {"type": "point", "filled": True, "size": 32, "opacity": 1, "clip": True},
        },
        {
            "transform": [at, {"aggregate": [], "groupby": ["x"]}],
            "mark": {"type": "rule", "strokeDash": [3, 3]},
            "encoding": {"y": None, "color": None},
        },
        {"transform": [at], "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1, "clip": True}},
    ]
    if any(half is not None for row in data for half in row["spread"]):
        ends_of = {"y": {"field": "under", **{k: v for k, v in y.items() if k != "field"}}, "y2": {"field": "over"}}
        layers.insert(0, {"mark": {"type": "area", "opacity": 0.14, "clip": True}, "encoding": ends_of})
    spec = _spec(
        figure,
        300,
        transform=[{"flatten": ["x", "y", "spread"]}, _hides("name"), *_ends_of_spread("y")],
        encoding={
            "x": {
                "field": "x",
                "type": "quantitative",
                "title": figure.get("x_label") or None,
                "scale": _ends("first", "last", padding=6),
                "axis": {"grid": False, **whole},
            },
            "y": {**y, "scale": _ends("low", "high", log=log)},
            "color": _colour(names, symbolType="stroke", symbolStrokeWidth=3),
        },
        layer=layers,
    )
    return Chart(
        "lines",
        spec,
        data,
        {**ends, "hidden": [], "at": None, "lit": None},
        {"hidden": names} if len(names) > 1 else {},
    )


def _bars(figure: Mapping[str, Any]) -> Chart:
    names, several = _names(figure), len(figure["series"]) > 1
    data = [
        {
            "name": series["name"],
            "category": figure["categories"],
            "value": series["values"],
            "spread": series.get("spread") or [None] * len(series["values"]),
            "seeds": series.get("seeds") or [[] for _ in series["values"]],
        }
        for series in figure["series"]
    ]
    values = [value for series in figure["series"] for value in _both(series["values"], series.get("spread"))]
    log = bool(figure.get("log_y")) and bool(values) and min(values) > 0
    low, high = (10.0 ** math.floor(math.log10(min(values))), max(values)) if log else (0.0, 1.0)
    if not log and values:
        low, high = min(0.0, *values), max(0.0, *values) or 1.0
        high = 100.0 if figure.get("percent") and high <= 100 else high
    text = NUMBER.format("datum.value") if not figure.get("percent") else "format(datum.value, '.1f')"
    half = text.replace("datum.value", "datum.spread")
    label = f"{text} + (isValid(datum.spread) ? ' ±' + {half} : '')"
    own = f"datum.name + '   ' + {label}" if several else label
    tip = f"datum.category + ', ' + datum.name + ': ' + {label}"
    x = {"type": "quantitative", "title": figure.get("y_label") or None, "scale": _ends("low", "high", log=log)}
    base = {"datum": {"expr": "base"}, "type": "quantitative"}
    layers: list[Spec] = [
        {
            "mark": {"type": "bar", "opacity": 0.42, "cornerRadiusEnd": 2},
            "encoding": {"x": {"field": "value", **x}, "x2": base, "tooltip": {"field": "tip"}},
        },
        {
            "mark": {"type": "text", "align": "left", "dx": 5, "limit": 260},
            "encoding": {"x": base, "text": {"field": "label"}, "color": None},
        },
    ]
    if any(half is not None for row in data for half in row["spread"]):
        ends = {"x": {"field": "under", "type": "quantitative"}, "x2": {"field": "over"}, "color": None}
        layers.append(
            {
                "transform": [{"filter": "isValid(datum.spread)"}],
                "mark": {"type": "rule", "strokeWidth": 1.4},
                "encoding": ends,
            }
        )
    if any(seeds for row in data for seeds in row["seeds"]):
        mark = {"type": "point", "filled": True, "size": 14, "opacity": 0.75, "yOffset": 6}
        one = {"x": {"field": "seed", "type": "quantitative"}, "color": {"value": {"expr": "ink"}}}
        layers.append({"transform": [{"flatten": ["seeds"], "as": ["seed"]}], "mark": mark, "encoding": one})
    y = {
        "field": "category",
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(figure["categories"]), "paddingInner": 0.12},
    }
    y["axis"] = {"domain": False, "ticks": False}
    encoding: Spec = {"y": y, "color": _colour(names)}
    if several:
        encoding["yOffset"] = {"field": "name", "type": "nominal", "sort": None}
    spec = _spec(
        {**figure, "y_label": ""},
        len(figure["categories"]) * (BAR * max(1, len(figure["series"])) + GAP),
        transform=[
            {"flatten": ["category", "value", "spread", "seeds"]},
            _hides("name"),
            {"filter": "isValid(datum.value)"},
            *({"calculate": of, "as": as_} for of, as_ in ((own, "label"), (tip, "tip"))),
            *_ends_of_spread("value"),
        ],
        encoding=encoding,
        layer=layers,
    )
    legend = {"hidden": names} if several else {}
    return Chart(
        "bars",
        spec,
        data,
        {"low": low, "high": high, "base": low if log else 0, "hidden": []},
        legend,
        groups=len(figure["categories"]),
    )


def _matrix(figure: Mapping[str, Any]) -> Chart:
    rows, columns = list(figure["rows"]), list(figure["columns"])
    data = [{"row": row, "column": columns, "value": line} for row, line in zip(rows, figure["values"], strict=True)]
    values = known(value for line in figure["values"] for value in line)
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    signed = low < 0 < high
    most = max(-low, high)
    low, high = (-most, most) if signed else (low, high if high > low else low + 1)
    text = NUMBER.format("datum.value")
    room = max((len(f"{value:.4g}") for value in values), default=1) * 6.5 + 2
    share = "abs(datum.value) / high" if signed else "(datum.value - low) / (high - low)"
    dark = {"test": f"{share} > darkens", "value": {"expr": "paper"}}
    place = {"type": "nominal", "axis": {"domain": False, "ticks": False, "labelOverlap": True}}
    scale = {
        "domain": [{"expr": "low"}, {"expr": "high"}],
        "range": "diverging" if signed else "heatmap",
        "interpolate": "rgb",
    }
    if signed:
        scale["domain"].insert(1, 0)
    x_axis = {**place["axis"], "orient": "top", "labelAngle": -40 if max(map(len, columns), default=0) > 4 else 0}
    spec = _spec(
        {**figure, "y_label": ""},
        len(rows) * (28 if len(rows) <= 30 else 14),
        transform=[
            {"flatten": ["column", "value"]},
            {"filter": "isValid(datum.value)"},
            {"calculate": text, "as": "text"},
            {"calculate": "datum.row + ' / ' + datum.column + ': ' + datum.text", "as": "tip"},
        ],
        encoding={
            "x": {
                **place,
                "field": "column",
                "title": figure.get("x_label") or None,
                "scale": {"domain": columns},
                "axis": x_axis,
            },
            "y": {**place, "field": "row", "title": figure.get("y_label") or None, "scale": {"domain": rows}},
        },
        layer=[
            {
                "mark": {"type": "rect", "stroke": {"expr": "paper"}, "cornerRadius": 2},
                "encoding": {
                    "color": {"field": "value", "type": "quantitative", "scale": scale, "legend": None},
                    "tooltip": {"field": "tip"},
                },
            },
            {
                "mark": {"type": "text", "opacity": {"expr": f"bandwidth('x') >= {room:.0f} ? 1 : 0"}},
                "encoding": {"text": {"field": "text"}, "color": {"condition": dark, "value": {"expr": "ink"}}},
            },
        ],
    )
    return Chart("matrix", spec, data, {"low": low, "high": high}, widest=200 + 64 * len(columns))


def _points(figure: Mapping[str, Any]) -> Chart:
    # In an order that does not depend on the points, so that two figures beside each other agree.
    classes, domains = (
        sorted(set(figure[key]), key=lambda name: (name.isdigit() and len(name), name)) for key in ("class", "domain")
    )
    places = {key: list(figure[key]) for key in ("x", "y", "class", "domain")}
    ends = dict(zip(("first", "last"), span(known(figure["x"])), strict=True))
    ends |= dict(zip(("low", "high"), span(known(figure["y"])), strict=True))
    shapes = [SHAPES[place % len(SHAPES)] for place in range(len(domains))]
    legend = {"title": None} if len(domains) > 1 else None
    spec = _spec(
        {**figure, "y_label": ""},
        380,
        transform=[
            {"flatten": list(places)},
            *(_hides("class"), _hides("domain", "apart"), {"filter": "isValid(datum.x) && isValid(datum.y)"}),
            {"calculate": "datum['class'] + (datum.domain ? ', ' + datum.domain : '')", "as": "tip"},
        ],
        mark={"type": "point", "filled": True, "size": 34, "opacity": 0.8, "clip": True},
        encoding={
            "x": {
                "field": "x",
                "type": "quantitative",
                "title": figure.get("x_label") or None,
                "scale": _ends("first", "last"),
            },
            "y": {
                "field": "y",
                "type": "quantitative",
                "title": figure.get("y_label") or None,
                "scale": _ends("low", "high"),
            },
            "color": _colour(classes, "class"),
            "shape": {"field": "domain", "scale": {"domain": domains, "range": shapes}, "legend": legend},
            "tooltip": {"field": "tip"},
        },
        params=[{"name": "zoom", "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"}, "bind": "scales"}],
    )
    named = {"hidden": classes, "apart": domains}
    return Chart(
        "points", spec, [places], {**ends, "hidden": [], "apart": []}, {k: v for k, v in named.items() if len(v) > 1}
    )


KINDS: dict[str, Callable[[Mapping[str, Any]], Chart]] = {
    "lines": _lines,
    "bars": _bars,
    "matrix": _matrix,
    "points": _points,
}
