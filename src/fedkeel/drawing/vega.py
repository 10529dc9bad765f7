"""A figure as Vega-Lite: the one description that a page, a notebook and the file for a paper are drawn from.

A figure is a plain table that JSON can hold, of one of four kinds: lines, bars, matrix, points (see
`fedkeel.analysis.figures`). Its numbers stay in columns, which Vega unfolds; names are data and never part of an
expression, so they may be any text.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedkeel.drawing.theme import COLOURS, DASHES, SHAPES, config

Spec = dict[str, Any]
Given = Mapping[str, Any]
WIDTH = 520  # of a figure on its own, in pixels of 1/96 inch: the text of a page with one column
LETTER = 6.5  # pixels that a letter of a name and its number takes
BAR, GAP = 19, 8  # of bars, in pixels: how high each is, and the room between their groups
FEW = 15  # rounds of which each has a dot
WHOLE = "clamp(floor(last - first), 1, 5)"  # ticks between whole numbers: of more, 1.5 would be written as a second 2
NUMBER = "(abs({0}) < 1e-3 && {0} != 0 || abs({0}) >= 1e5 ? format({0}, '.3~e') : format({0}, '.4~r'))"
# The wheel alone scrolls the page; two fingers on a touchpad are the wheel with Ctrl.
ZOOM = {
    "name": "zoom",
    "select": {"type": "interval", "zoom": "wheel![event.ctrlKey || event.metaKey]"},
    "bind": "scales",
}


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


def chart(figure: Given) -> Chart:
    """What a figure looks like; a table is none, and refused with a `KeyError`."""
    return KINDS[figure["kind"]](figure)


# -- what they share --------------------------------------------------------------------------------------------------
def _spec(figure: Given, height: float, transform: list[Spec], encoding: Spec, **parts: Any) -> Spec:
    label = figure.get("y_label") or "" if figure["kind"] == "lines" else ""  # lying, where it takes no width
    title = {"text": figure["title"], "subtitle": label} if figure.get("title") else {"text": label}
    fit = {"type": "fit-x", "contains": "padding"}
    about = {"title": title, "description": described(figure), "height": height, "autosize": fit}
    return {**about, "transform": transform, "encoding": encoding, **parts}


def described(figure: Given) -> str:
    """In words, for those who do not see it."""
    what = ": ".join(filter(None, (figure.get("title"), figure.get("y_label")))) or "A figure"
    if figure["kind"] == "matrix":
        return f"{what}, {len(figure['rows'])} rows by {len(figure['columns'])} columns"
    if figure["kind"] == "points":
        return f"{what}, {len(figure['x'])} points"
    names = [str(series["name"]) for series in figure["series"]]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} others" if len(names) > 8 else "")
    return f"{what}, by {figure['x_label']}: {shown}" if figure.get("x_label") else f"{what}: {shown}"


def _names(figure: Given) -> list[str]:
    """In the order of their colours, which may be given, so that a name has the same in all figures."""
    return list(figure.get("names") or dict.fromkeys(series["name"] for series in figure["series"]))


def _number(of: str, title: Any = None, **more: Any) -> Spec:
    return {"field": of, "type": "quantitative", "title": title or None, **more}


def _colour(names: Sequence[str], by: str = "name", **symbol: Any) -> Spec:
    columns = 4 if max(map(len, names), default=0) < 14 else 2
    legend = {"title": None, "columns": columns, "symbolLimit": 0, "symbolOpacity": 1, **symbol}
    return {"field": by, "type": "nominal", "scale": {"domain": names}, "legend": legend if len(names) > 1 else None}


def _axis(low: str, high: str, *, log: bool = False, **scale: Any) -> Spec:
    """Between two parameters, so that two figures beside each other can be given the same."""
    kind: Spec = {"type": "log"} if log else {"zero": False}
    return {"domain": [{"expr": low}, {"expr": high}], "nice": False, **kind, **scale}


def _hides(by: str, parameter: str = "hidden") -> Spec:
    return {"filter": f"indexof({parameter}, datum.{by}) < 0"}


def _computed(**expressions: str) -> list[Spec]:
    return [{"calculate": expression, "as": name} for name, expression in expressions.items()]


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


def around(values: Iterable[float | None], spread: Iterable[float | None], side: int) -> list[float | None]:
    """The lower (-1) or upper (1) ends of the spread around values; where there is none, the values."""
    return [v if v is None or s is None else v + side * s for v, s in zip(values, spread, strict=True)]


# -- the kinds --------------------------------------------------------------------------------------------------------
def _lines(figure: Given) -> Chart:
    names = _names(figure)
    log = bool(figure.get("log_y")) and any(v > 0 for s in figure["series"] for v in known(s["y"]))
    data, values = [], list[float | None]()
    for series in figure["series"]:
        y = [v if v is not None and (v > 0 or not log) else None for v in series["y"]]
        spread = (None if log else series.get("spread")) or [None] * len(y)
        seeds = {"seeds": series["seeds"]} if "seeds" in series else {}
        data.append({"name": series["name"], "x": series["x"], "y": y, "spread": spread, **seeds})
        values += [*around(y, spread, -1), *around(y, spread, 1)]
    places = [x for series in figure["series"] for x in series["x"]]
    low, high = span(known(values), log=log, percent=bool(figure.get("percent")))
    pad = 0.5 if len(set(places)) == 1 else 0
    ends = {"first": min(places, default=0) - pad, "last": max(places, default=1) + pad, "low": low, "high": high}
    ticks: Spec = {"tickMinStep": 1, "format": "d"} if all(float(x).is_integer() for x in places) else {}
    ticks |= {"tickCount": {"expr": WHOLE}} if ticks else {}
    x = _number("x", figure.get("x_label"), scale=_axis("first", "last", padding=6), axis={"grid": False, **ticks})
    y_axis = {**_number("y"), "scale": _axis("low", "high", log=log)}
    has_spread = any(half is not None for row in data for half in row["spread"])
    few = max((len(series["x"]) for series in figure["series"]), default=0) <= FEW
    transform = [{"flatten": ["x", "y", "spread"]}, _hides("name")]
    if has_spread:
        ends_of = "isValid(datum.y) ? datum.y {} datum.spread : null"
        transform += _computed(lower=ends_of.format("-"), upper=ends_of.format("+"))
    colour = _colour(names, symbolType="stroke", symbolStrokeWidth=2, symbolSize=400)
    encoding = {"x": x, "y": y_axis, "color": colour}
    spec = _spec(figure, 300, transform, encoding, layer=_line_layers(colour, few, has_spread))
    legend = {"hidden": names} if len(names) > 1 else {}
    return Chart("lines", spec, data, {**ends, "hidden": [], "at": None, "lit": None}, legend)


def _line_layers(colour: Spec, few: bool, has_spread: bool) -> list[Spec]:
    names = colour["scale"]["domain"]
    dashes = [DASHES[place // len(COLOURS["light"]) % len(DASHES)] for place in range(len(names))]
    lit = {"condition": {"test": "lit && lit !== datum.name", "value": 0.12}, "value": 1}
    dot = {"type": "point", "filled": True, "opacity": 1, "clip": True}
    at = {"filter": "datum.x === at && isValid(datum.y)"}
    # A value between two gaps has no line, so that it needs a dot.
    neighbours = [{"op": op, "field": "y", "as": as_} for op, as_ in (("lag", "before"), ("lead", "after"))]
    alone = "isValid(datum.y)" + ("" if few else " && !isValid(datum.before) && !isValid(datum.after)")
    stroke = {**colour, "scale": {"domain": names, "range": dashes}}
    line = {"type": "line", "strokeWidth": 2, "strokeJoin": "round", "clip": True}
    rule = {"mark": {"type": "rule", "strokeDash": [3, 3]}, "encoding": {"y": None, "color": None}}
    band = {"y": _number("lower"), "y2": {"field": "upper"}}
    return [
        *([{"mark": {"type": "area", "opacity": 0.14, "clip": True}, "encoding": band}] if has_spread else []),
        {"mark": line, "encoding": {"strokeDash": stroke, "opacity": lit}, "params": [ZOOM]},
        {"transform": [{"window": neighbours, "groupby": ["name"]}, {"filter": alone}], "mark": {**dot, "size": 32}},
        {"transform": [at, {"aggregate": [], "groupby": ["x"]}], **rule},
        {"transform": [at], "mark": {**dot, "size": 70}},
    ]


def _bars(figure: Given) -> Chart:
    """Lying, so that names have room, with the name and the number written at the root of each. A logarithm has no zero
    that a bar could begin at: its values are points."""
    names, categories, several = _names(figure), list(figure["categories"]), len(figure["series"]) > 1
    data = []
    for series in figure["series"]:
        values, spread = series["values"], series.get("spread") or [None] * len(categories)
        under, over = (series.get(key) or around(values, spread, side) for key, side in (("low", -1), ("high", 1)))
        seeds = series.get("seeds") or [[] for _ in values]
        columns = {"category": categories, "value": values, "spread": spread, "under": under, "over": over}
        data.append({"name": series["name"], **columns, "seeds": seeds})
    every = known(value for row in data for key in ("value", "under", "over") for value in row[key])
    log = bool(figure.get("log_y")) and bool(every) and min(every) > 0
    low, high = (min(0.0, *every), max(0.0, *every) or 1.0) if every else (0.0, 1.0)
    high = 100.0 if figure.get("percent") and high <= 100 else high
    if log:
        high = max(every)
        low = min(every) / max(10.0, high / min(every)) ** 0.5  # a third of the axis is for the text
    text = "format({0}, '.1f')" if figure.get("percent") else NUMBER
    number = f"{text.format('datum.value')} + (isValid(datum.spread) ? ' ±' + {text.format('datum.spread')} : '')"
    # The text begins at the root of its bar, or, where whiskers would cross it and there is room, behind them.
    pixels, room = "({} - {}) / (high - low) * width", f"length(datum.label) * {LETTER} + 8"
    crossed = f"{pixels.format('datum.under', 'low')} < {room} && {pixels.format('high', 'datum.over')} > {room}"
    start = f"{crossed} ? max(datum.over, base) : base" if not log else "base"
    transform: list[Spec] = [
        {"flatten": ["category", "value", "spread", "under", "over", "seeds"]},
        *(_hides("name"), {"filter": "isValid(datum.value)"}),
        *_computed(label=f"datum.name + '   ' + {number}" if several else number, start=start),
        *_computed(tip=f"datum.category + ', ' + datum.name + ': ' + {number}"),
    ]
    y: Spec = {"field": "category", "type": "nominal", "title": None, "axis": {"domain": False, "ticks": False}}
    encoding: Spec = {"y": {**y, "scale": {"domain": categories, "paddingInner": 0.12}}, "color": _colour(names)}
    if several:
        encoding["yOffset"] = {"field": "name", "type": "nominal", "sort": None}
    has_ends = any(row["under"] != row["over"] for row in data)
    has_seeds = any(seeds for row in data for seeds in row["seeds"])
    x = _number("value", figure.get("y_label"), scale=_axis("low", "high", log=log))
    layers = _bar_layers(x, has_ends, has_seeds, points=log)
    height = len(categories) * (BAR * max(1, len(data)) + GAP)
    spec = _spec(figure, height, transform, encoding, layer=layers)
    ends = {"low": low, "high": high, "base": low if log else 0}
    return Chart(
        "bars", spec, data, {**ends, "hidden": []}, {"hidden": names} if several else {}, groups=len(categories)
    )


def _bar_layers(x: Spec, has_ends: bool, has_seeds: bool, *, points: bool) -> list[Spec]:
    base = {} if points else {"x2": {"datum": {"expr": "base"}, "type": "quantitative"}}
    bar = {"type": "bar", "opacity": 0.42, "cornerRadiusEnd": 2}
    point = {"type": "point", "filled": True, "opacity": 1, "size": 60}
    text = {"mark": {"type": "text", "align": "left", "dx": 5, "limit": 260}}
    whisker = {"mark": {"type": "rule", "strokeWidth": 1.6}}
    seed = {"mark": {"type": "point", "filled": True, "size": 14, "opacity": 0.8}}
    # Of layers that share an axis one has its name, and the others must not have another.
    ends = {"x": {"field": "under", "type": "quantitative"}, "x2": {"field": "over"}, "color": None}
    dots = {"x": {"field": "seed", "type": "quantitative"}, "color": {"value": {"expr": "ink"}}}
    each = {"flatten": ["seeds"], "as": ["seed"]}
    return [
        {"mark": point if points else bar, "encoding": {"x": x, **base, "tooltip": {"field": "tip"}}},
        {
            **text,
            "encoding": {"x": {"field": "start", "type": "quantitative"}, "text": {"field": "label"}, "color": None},
        },
        *([{"transform": [{"filter": "datum.under < datum.over"}], **whisker, "encoding": ends}] if has_ends else []),
        *([{"transform": [each], **seed, "encoding": dots}] if has_seeds else []),
    ]


def _matrix(figure: Given) -> Chart:
    rows, columns = list(figure["rows"]), list(figure["columns"])
    data = [{"row": row, "column": columns, "value": line} for row, line in zip(rows, figure["values"], strict=True)]
    values = known(value for line in figure["values"] for value in line)
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    signed, most = low < 0 < high, max(-low, high)
    low, high = (-most, most) if signed else (low, high if high > low else low + 1)
    room = max((len(f"{value:.4g}") for value in values), default=1) * 6.5 + 2
    share = "abs(datum.value) / high" if signed else "(datum.value - low) / (high - low)"
    ink = {"condition": {"test": f"{share} > darkens", "value": {"expr": "strong"}}, "value": {"expr": "weak"}}
    ends: list[Any] = [{"expr": "low"}, *([0] if signed else []), {"expr": "high"}]
    shades = {"domain": ends, "range": "diverging" if signed else "heatmap", "interpolate": "rgb"}
    axis = {"domain": False, "ticks": False, "labelOverlap": True}
    top = {**axis, "orient": "top", "labelAngle": -40 if max(map(len, columns), default=0) > 4 else 0}
    transform: list[Spec] = [
        *({"flatten": ["column", "value"]}, {"filter": "isValid(datum.value)"}),
        *_computed(text=NUMBER.format("datum.value"), tip="datum.row + ' / ' + datum.column + ': ' + datum.text"),
    ]

    def place(of: str, names: list[str], label: str, axis: Spec) -> Spec:
        return {
            "field": of,
            "type": "nominal",
            "title": figure.get(label) or None,
            "scale": {"domain": names},
            "axis": axis,
        }

    cell = {"mark": {"type": "rect", "stroke": {"expr": "paper"}, "cornerRadius": 2}}
    text = {"mark": {"type": "text", "opacity": {"expr": f"bandwidth('x') >= {room:.0f} ? 1 : 0"}}}
    colour = _number("value", scale=shades, legend=None)
    layers = [
        {**cell, "encoding": {"color": colour, "tooltip": {"field": "tip"}}},
        {**text, "encoding": {"text": {"field": "text"}, "color": ink}},
    ]
    encoding = {"x": place("column", columns, "x_label", top), "y": place("row", rows, "y_label", axis)}
    spec = _spec(figure, len(rows) * (28 if len(rows) <= 30 else 14), transform, encoding, layer=layers)
    return Chart("matrix", spec, data, {"low": low, "high": high}, widest=200 + 64 * len(columns))


def _points(figure: Given) -> Chart:
    # In an order that does not depend on the points, so that two figures beside each other agree.
    classes, domains = (
        sorted(set(figure[key]), key=lambda name: (name.isdigit() and len(name), name)) for key in ("class", "domain")
    )
    places = {key: list(figure[key]) for key in ("x", "y", "class", "domain")}
    log = bool(figure.get("log_x")) and all(x > 0 for x in known(figure["x"]))
    (first, last), (low, high) = span(known(figure["x"]), log=log), span(known(figure["y"]))
    ends = {"first": first, "last": last, "low": low, "high": high}
    shapes = [SHAPES[place % len(SHAPES)] for place in range(len(domains))]
    transform: list[Spec] = [
        {"flatten": list(places)},
        *(_hides("class"), _hides("domain", "apart"), {"filter": "isValid(datum.x) && isValid(datum.y)"}),
        *_computed(tip="datum['class'] + (datum.domain ? ', ' + datum.domain : '')"),
    ]
    legend = {"title": None} if len(domains) > 1 else None
    encoding = {
        "x": _number("x", figure.get("x_label"), scale=_axis("first", "last", log=log)),
        "y": _number("y", figure.get("y_label"), scale=_axis("low", "high")),
        "color": _colour(classes, "class"),
        "shape": {"field": "domain", "scale": {"domain": domains, "range": shapes}, "legend": legend},
        "tooltip": {"field": "tip"},
    }
    mark = {"type": "point", "filled": True, "size": 34, "opacity": 0.8, "clip": True}
    spec = _spec(figure, 380, transform, encoding, mark=mark, params=[ZOOM])
    hides = {key: names for key, names in (("hidden", classes), ("apart", domains)) if len(names) > 1}
    return Chart("points", spec, [places], {**ends, "hidden": [], "apart": []}, hides)


KINDS: dict[str, Callable[[Given], Chart]] = {"lines": _lines, "bars": _bars, "matrix": _matrix, "points": _points}
