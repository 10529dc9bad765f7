"""The figures of a diagnostic as short tables."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from fedkeel.cli.terminal.output import Line, Table

MOST_ROWS = 24  # of a table on the screen; the file has all of it


def figure_lines(figures: Iterable[dict[str, Any]]) -> Iterator[Line]:
    for figure in figures:
        headings, rows = figure_table(figure)
        yield f"\n{figure['title']}"
        yield Table(headings, rows[:MOST_ROWS])
        if figure.get("note"):
            yield figure["note"]
        if len(rows) > MOST_ROWS:
            yield f"{len(rows) - MOST_ROWS} rows more are in the file."


def figure_table(figure: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A figure as a short table: of a line its ends and extremes, of points how many there are."""
    kind = figure["kind"]
    if kind == "lines":
        places = [f"first {figure['x_label']}", f"last {figure['x_label']}"]
        headings = [figure["y_label"], *places, "at first", "at last", "smallest", "largest"]
        return headings, [[line["name"], *line_row(line)] for line in figure["series"]]
    if kind == "bars":
        columns = [series["values"] for series in figure["series"]]
        headings = [figure["x_label"] or figure["y_label"], *(series["name"] for series in figure["series"])]
        return headings, as_text(zip(figure["categories"], *columns, strict=True))
    if kind == "matrix":
        rows = zip(figure["rows"], figure["values"], strict=True)
        return [figure["y_label"], *figure["columns"]], as_text((name, *values) for name, values in rows)
    if kind == "points":
        return ["domain", "points"], as_text(Counter(figure["domain"]).items())
    return figure["columns"], as_text(figure["rows"])


def line_row(line: dict[str, Any]) -> list[str]:
    known = [(x, y) for x, y in zip(line["x"], line["y"], strict=True) if y is not None]
    if not known:
        return ["-"] * 6
    xs, ys = zip(*known, strict=True)
    return [number(value) for value in (xs[0], xs[-1], ys[0], ys[-1], min(ys), max(ys))]


def as_text(rows: Iterable[Iterable[Any]]) -> list[list[str]]:
    return [[number(cell) for cell in row] for row in rows]


def number(value: Any) -> str:
    """Four digits that count.

    >>> number(0.000123456), number(12), number(None), number("photo")
    ('0.0001235', '12', '-', 'photo')
    """
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
