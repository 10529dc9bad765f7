"""The figures of a diagnostic, as plain tables that JSON can hold; whoever draws them decides how they look."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fedkeel.config import from_one

Figure = dict[str, Any]
Numbers = Sequence[float | None]
Names = Sequence[str]
Better = Literal["low", "high"]


def lines(title: str, x_label: str, y_label: str, series: Mapping[str, tuple[Numbers, Numbers]], **more: Any) -> Figure:
    """`series`: x and y by the name of the line. `more`: `log_y=True`, `note="..."`, or, where a paper's table has a
    single number of the kind, `number=...`."""
    drawn = [{"name": name, "x": list(x), "y": list(y)} for name, (x, y) in series.items()]
    return {"kind": "lines", "title": title, "x_label": x_label, "y_label": y_label, "series": drawn, **more}


def by_round(title: str, y_label: str, table: Mapping[int, Mapping[str, float | None]], **more: Any) -> Figure:
    """Lines over the rounds, from the values of each round by name. A line begins where its name first appears.

    The table counts rounds from 0, the figure from 1: it is there to be read.
    """
    names = dict.fromkeys(name for values in table.values() for name in values)
    series = {name: [(from_one(r), values[name]) for r, values in table.items() if name in values] for name in names}
    split = {name: ([x for x, _ in pairs], [y for _, y in pairs]) for name, pairs in series.items()}
    return lines(title, "round", y_label, split, **more)


def bars(
    title: str, y_label: str, table: Mapping[str, Mapping[str, float | None]], x_label: str = "", **more: Any
) -> Figure:
    """Bars beside each other, from the values of each series by category; all series have the same categories."""
    drawn = [{"name": name, "values": list(values.values()), "spread": None} for name, values in table.items()]
    axes = {"x_label": x_label, "y_label": y_label}
    return {
        "kind": "bars",
        "title": title,
        **axes,
        "categories": list(next(iter(table.values()))),
        "series": drawn,
        **more,
    }


def matrix(
    title: str,
    rows: Names,
    columns: Names,
    values: Sequence[Numbers],
    x_label: str = "",
    y_label: str = "",
    **more: Any,
) -> Figure:
    axes = {"x_label": x_label, "y_label": y_label, "rows": list(rows), "columns": list(columns)}
    return {"kind": "matrix", "title": title, **axes, "values": [list(row) for row in values], **more}


def points(title: str, x: Sequence[float], y: Sequence[float], classes: Names, domains: Names, **more: Any) -> Figure:
    places = {"x": list(x), "y": list(y), "class": list(classes), "domain": list(domains)}
    return {"kind": "points", "title": title, "x_label": "", "y_label": "", **places, **more}


def table(title: str, columns: Names, rows: Sequence[Sequence[Any]], **more: Any) -> Figure:
    return {"kind": "table", "title": title, "columns": list(columns), "rows": [list(row) for row in rows], **more}


def keyed(
    figures: list[Figure], label: str, value: float | None, better: Better | None = None, *, percent: bool = False
) -> list[Figure]:
    """The figures with the one number in which methods are compared, as it is in the last round; the first has it.

    `better`: which way is good, where that can be said. `percent`: a fraction that is shown as percent.
    """
    if figures and value is not None:
        figures[0]["key"] = {"label": label, "value": value, "better": better, "percent": percent}
    return figures
