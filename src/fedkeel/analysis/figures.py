"""The figures of a diagnostic: tables that JSON can hold, made from the shape of its numbers.

Numbers are a mapping. Each entry is a figure, and its key, "WHAT by NAMES", names the figure and its axes:

    number                                            a line over the rounds
    {name: number}                                    lines over the rounds; of one round, or very many names, bars
    {name: [numbers]}                                 lines over the index, from 1
    {name: {name: number}}                            bars beside each other; of many, or of the same names, a matrix
    {"x": [], "y": [], "class": [], "domain": []}     points

The last three are of the last round. What ends in " (0 to 1)" is a share, which is shown in %.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fedkeel.config import from_one

Figure = dict[str, Any]
Values = Sequence[float | None]
Names = Sequence[str]

SHARE = " (0 to 1)"
MOST_LINES = 12  # over the rounds
MOST_BARS = 4  # beside each other


def lines(title: str, x_label: str, y_label: str, series: Mapping[str, tuple[Values, Values]], **more: Any) -> Figure:
    """`series`: x and y by the name of the line."""
    drawn = [{"name": name, "x": list(x), "y": list(y)} for name, (x, y) in series.items()]
    return {"kind": "lines", "title": title, "x_label": x_label, "y_label": y_label, "series": drawn, **more}


def bars(title: str, y_label: str, table: Mapping[str, Mapping[str, float | None]], **more: Any) -> Figure:
    """Bars beside each other, from the values of each series by category; all series have the same categories."""
    drawn = [{"name": name, "values": list(values.values()), "spread": None} for name, values in table.items()]
    about = {"title": title, "x_label": "", "y_label": y_label, "categories": list(next(iter(table.values())))}
    return {"kind": "bars", **about, "series": drawn, **more}


def matrix(
    title: str, rows: Names, columns: Names, values: Sequence[Values], x_label: str, y_label: str, **more: Any
) -> Figure:
    sides = {"x_label": x_label, "y_label": y_label, "rows": list(rows), "columns": list(columns)}
    return {"kind": "matrix", "title": title, **sides, "values": [list(row) for row in values], **more}


def points(title: str, x: Values, y: Values, classes: Names, domains: Names, **more: Any) -> Figure:
    places = {"x": list(x), "y": list(y), "class": list(classes), "domain": list(domains)}
    return {"kind": "points", "title": title, "x_label": "", "y_label": "", **places, **more}


def of_numbers(rounds: Mapping[int, Mapping[str, Any]]) -> list[Figure]:
    """The figures of what was measured in these rounds, which count from 0 in files and from 1 where a person reads.

    >>> of_numbers({0: {"loss by client": {"a": 2.0}}, 4: {"loss by client": {"a": 1.5}}})[0]["series"]
    [{'name': 'a', 'x': [1, 5], 'y': [2.0, 1.5]}]
    """
    figures = list[Figure]()
    for key, last in rounds[max(rounds)].items():
        title, (what, _, names) = key[:1].upper() + key[1:].replace(SHARE, ""), key.partition(" by ")
        first = next(iter(last.values()), None) if isinstance(last, Mapping) else None
        if isinstance(first, list) and "class" in last:
            figures.append(points(title, last["x"], last["y"], last["class"], last["domain"]))
        elif isinstance(first, list):
            series = {name: (range(1, len(y) + 1), y) for name, y in last.items()}
            figures.append(lines(title, names, what, series, **_scale(last.values())))
        elif isinstance(first, Mapping):
            figures.append(_table(title, what, names, last))
        elif last != {}:
            found = {round: numbers[key] for round, numbers in rounds.items() if key in numbers}
            tables = {round: of if isinstance(of, Mapping) else {what: of} for round, of in found.items()}
            figures.append(_over_rounds(title, what, names, tables))
    return figures


def _table(title: str, what: str, names: str, table: Mapping[str, Mapping[str, Any]]) -> Figure:
    rows, columns, values = list(table), list(next(iter(table.values()))), [[*row.values()] for row in table.values()]
    y_label, _, x_label = names.partition(" and ")
    if len(rows) <= MOST_BARS and rows != columns:
        return bars(title, what, table, **_scale(values)) | {"x_label": x_label}
    return matrix(title, rows, columns, values, x_label, y_label)


def _over_rounds(title: str, what: str, names: str, rounds: dict[int, Mapping[str, Any]]) -> Figure:
    last, scale = rounds[max(rounds)], _scale(list(table.values()) for table in rounds.values())
    if len(rounds) == 1 or len(last) > MOST_LINES:
        return bars(title, what, {what: last}, **scale) | {"x_label": names}
    there = {name: [r for r in rounds if name in rounds[r]] for table in rounds.values() for name in table}
    series = {name: ([from_one(r) for r in own], [rounds[r][name] for r in own]) for name, own in there.items()}
    return lines(title, "round", what, series, **scale)


def _scale(rows: Iterable[Values]) -> dict[str, bool]:
    """A logarithmic axis where numbers differ by more than a hundred times."""
    known = [value for row in rows for value in row if value is not None]
    return {"log_y": True} if known and 0 < 100 * min(known) < max(known) else {}


def leaves(numbers: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float | None]]:
    """Every single number, after the names that lead to it."""
    for name, value in numbers.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path} {name}")
        elif not isinstance(value, list):
            yield f"{path} {name}", value
