"""The diagnostics that runs recorded: `diagnostics/*.json`, checked and made small enough for one page.

A file holds `name`, `title`, `what`, `paper` and `figures`; a figure is one of the kinds in `CHECKS`. A file that is
not so is left out with a notice: a report never fails because of one diagnostic.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkeel.analysis.figures import Figure
from fedkeel.files import plain

MOST_POINTS = 2000  # of a scatter plot; more is neither seen nor drawn quickly
MOST_BYTES = 2_500_000  # of all diagnostics of a group

FRACTION = " (0 to 1)"  # at the end of an axis' name

OF_THE_DATA = ("label-distribution",)  # shown once where it is the same for all runs
ALL_RUNS = "all runs"
OTHERS = "What else was recorded"
CIRCUMSTANCES = "The circumstances"
QUESTIONS: dict[str, tuple[str, ...]] = {
    "Is every domain served?": ("fairness",),
    "Do the global statistics fit?": (
        *("calibration", "loss-gap", "statistics-accuracy", "statistics-divergence"),
        *("statistics-bias", "mixing-factors", "probability-floor", "bn-statistics"),
    ),
    "Do features of one class meet?": ("representation-divergence", "prototype-similarity", "nmi", "tsne"),
    "How did the training go?": ("gradient-norms", "clipping", "global-gradient", "singular-values"),
    OTHERS: (),
    CIRCUMSTANCES: ("label-distribution", "convergence", "cost"),
}


@dataclass(frozen=True)
class DiagnosticFigures:
    """One diagnostic of all runs that recorded it: their figures by the run's name."""

    name: str
    title: str
    what: str
    paper: str
    runs: dict[str, list[Figure]]


class Unreadable(Exception):
    """The text says what is wrong with a diagnostic."""


def read_diagnostics(directories: Mapping[str, Path], notices: list[str]) -> list[DiagnosticFigures]:
    """What runs, by their names, recorded. Where there is no room for all, the first come first."""
    found: dict[str, DiagnosticFigures] = {}
    left_out: list[str] = []
    room = MOST_BYTES
    for run, directory in directories.items():
        for path in sorted((directory / "diagnostics").glob("*.json")):
            try:
                document = plain(json.loads(path.read_text()))
                figures = [checked(figure) for figure in _list(document, "figures")]
                name = _text(document, "name")
            except (OSError, ValueError, TypeError, AttributeError, KeyError, Unreadable) as problem:
                notices.append(f"'{path}' is not a diagnostic that can be shown: {problem}.")
                continue
            size = len(json.dumps(figures))
            if size > room:
                left_out.append(f"{name} of {run}")
                continue
            room -= size
            title, what, paper = (str(document.get(key) or "") for key in ("title", "what", "paper"))
            found.setdefault(name, DiagnosticFigures(name, title or name, what, paper, {})).runs[run] = figures
    if left_out:
        notices.append(
            f"Left out to keep this page small: {', '.join(left_out)}. A report of these runs alone shows them."
        )
    for diagnostic in found.values():
        first, *others = diagnostic.runs.values()
        if diagnostic.name in OF_THE_DATA and others and all(figures == first for figures in others):
            diagnostic.runs.clear()
            diagnostic.runs[ALL_RUNS] = first
    return sorted(found.values(), key=lambda diagnostic: place(diagnostic.name))


def place(name: str) -> tuple[int, int]:
    """By the question that it answers; what nobody here knows before what only tells the circumstances."""
    for number, names in enumerate(QUESTIONS.values()):
        if name in names:
            return number, names.index(name)
    return list(QUESTIONS).index(OTHERS), 0


# -- what a figure must have -----------------------------------------------------------------------------------------
def checked(figure: Any) -> Figure:
    """The figure with what the page needs and nothing else; raises `Unreadable`."""
    if not isinstance(figure, dict) or figure.get("kind") not in CHECKS:
        kind = figure.get("kind") if isinstance(figure, dict) else figure
        raise Unreadable(f"a figure is of kind {kind!r}, not one of {', '.join(CHECKS)}")
    texts = {key: str(figure[key]) for key in ("title", "x_label", "y_label", "note") if figure.get(key) is not None}
    key = {"key": key_number(figure["key"])} if figure.get("key") is not None else {}
    result = {"kind": figure["kind"], "title": "", **texts, **key, **CHECKS[figure["kind"]](figure)}
    result |= {"log_y": True} if figure.get("log_y") else {}
    return in_percent(result) if result.get("y_label", "").endswith(FRACTION) else result


def in_percent(figure: Figure) -> Figure:
    """Shares are recorded as fractions; on a page, accuracy has one unit."""
    for series in figure.get("series", ()):
        for name in ("y", "values", "spread"):
            if series.get(name):
                series[name] = [None if value is None else short(100 * value) for value in series[name]]
    return {**figure, "y_label": figure["y_label"].removesuffix(FRACTION) + ", %", "percent": True}


def key_number(key: Any) -> dict[str, Any]:
    """The number in which runs are compared: `label`, `value`, which way is `better`, whether it is a fraction."""
    if not isinstance(key, dict) or key.get("better") not in ("low", "high", None):
        raise Unreadable("a 'key' has a label, a value and, if one way is better, \"low\" or \"high\" for 'better'")
    (value,) = _numbers([key.get("value")])
    if value is None:
        raise Unreadable("a 'key' has no value")
    better, percent = key.get("better"), bool(key.get("percent"))
    return {"label": _text(key, "label"), "value": value, "better": better, "percent": percent}


def _lines(figure: Figure) -> Figure:
    series = []
    for entry in _list(figure, "series"):
        x, y = _numbers(_list(entry, "x")), _numbers(_list(entry, "y"))
        if len(x) != len(y) or None in x:
            raise Unreadable(f"the series '{entry.get('name')}' has {len(x)} x and {len(y)} y")
        series.append({"name": _text(entry, "name"), "x": x, "y": y})
    return {"series": series}


def _bars(figure: Figure) -> Figure:
    categories, series = _names(figure, "categories"), []
    for entry in _list(figure, "series"):
        values = _numbers(_list(entry, "values"))
        spread = _numbers(entry["spread"]) if isinstance(entry.get("spread"), list) else None
        if len(values) != len(categories) or (spread is not None and len(spread) != len(values)):
            raise Unreadable(f"'{entry.get('name')}' has {len(values)} values for {len(categories)} categories")
        series.append({"name": _text(entry, "name"), "values": values, "spread": spread})
    return {"categories": categories, "series": series}


def _matrix(figure: Figure) -> Figure:
    rows, columns = _names(figure, "rows"), _names(figure, "columns")
    values = [_numbers(row) for row in _list(figure, "values")]
    if len(values) != len(rows) or any(len(row) != len(columns) for row in values):
        raise Unreadable(f"a matrix is not of {len(rows)} rows and {len(columns)} columns")
    return {"rows": rows, "columns": columns, "values": values}


def _points(figure: Figure) -> Figure:
    x, y = _numbers(_list(figure, "x")), _numbers(_list(figure, "y"))
    groups = {key: [str(name) for name in figure.get(key) or [""] * len(x)] for key in ("class", "domain")}
    columns: dict[str, list[Any]] = {"x": x, "y": y, **groups}
    if len({*map(len, columns.values())}) > 1:
        raise Unreadable("the points' x, y, class and domain are not of one length")
    step = -(-len(x) // MOST_POINTS) or 1
    shown: Figure = {key: column[::step] for key, column in columns.items()}
    if step > 1:
        shown["note"] = f"{figure.get('note') or ''} {len(shown['x'])} of {len(x)} points are shown.".strip()
    return shown


def _table(figure: Figure) -> Figure:
    columns = _names(figure, "columns")
    rows = [[short(value) for value in row] for row in _list(figure, "rows")]
    if any(len(row) != len(columns) for row in rows):
        raise Unreadable(f"a table's row does not have its {len(columns)} columns")
    return {"columns": columns, "rows": rows}


CHECKS: dict[str, Callable[[Figure], Figure]] = {
    "lines": _lines,
    "bars": _bars,
    "matrix": _matrix,
    "points": _points,
    "table": _table,
}


def _list(document: Mapping[str, Any], key: str) -> list[Any]:
    if not isinstance(document, Mapping) or not isinstance(document.get(key), list):
        raise Unreadable(f"it has no list '{key}'")
    return list(document[key])


def _names(document: Mapping[str, Any], key: str) -> list[str]:
    return [str(name) for name in _list(document, key)]


def _text(document: Mapping[str, Any], key: str) -> str:
    if document.get(key) is None:
        raise Unreadable(f"it has no '{key}'")
    return str(document[key])


def _numbers(values: Any) -> list[float | None]:
    if not isinstance(values, list) or any(
        isinstance(v, bool) or not isinstance(v, int | float | None) for v in values
    ):
        raise Unreadable(f"{values!r:.60} are not numbers")
    return [short(value) for value in values]


def short(value: Any) -> Any:
    """A number with five digits: more cannot be seen, and would double the page. Anything else as text."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return value if isinstance(value, int | None) else str(value)
