"""The diagnostics that runs recorded, `diagnostics/*.json`: checked, made small enough for one page, and side by side.

A report never fails because of one diagnostic: a file with a figure that cannot be drawn is left out with a notice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fedkeel.analysis.figures import Figure
from fedkeel.drawing.vega import chart, known
from fedkeel.experiments.difference import RULE, Cell, unbeaten
from fedkeel.experiments.tables import competes
from fedkeel.report.html import html, measured

if TYPE_CHECKING:
    from fedkeel.report.collect import Group
    from fedkeel.report.page import Page

MOST_POINTS = 2000  # of a scatter plot; more is neither seen nor drawn quickly
MOST_BYTES = 2_500_000  # of all diagnostics of a group
FRACTION = " (0 to 1)"  # at the end of an axis' name
ALL_RUNS = "all runs"


@dataclass(frozen=True)
class DiagnosticFigures:
    """One diagnostic of all runs that recorded it: their figures by the run's name."""

    name: str
    title: str
    what: str
    runs: dict[str, list[Figure]] = field(default_factory=dict)


def read_diagnostics(directories: Mapping[str, Path], notices: list[str]) -> list[DiagnosticFigures]:
    """What runs, by their names, recorded."""
    found: dict[str, DiagnosticFigures] = {}
    room = MOST_BYTES
    for run, directory in directories.items():
        for path in sorted((directory / "diagnostics").glob("*.json")):
            try:
                # Five digits: more cannot be seen, and would double the page.
                text = path.read_text()
                document = json.loads(text, parse_float=lambda digits: short(float(digits)), parse_constant=_none)
                name, figures = str(document["name"]), [checked(figure) for figure in document["figures"]]
            except (OSError, ValueError, TypeError, AttributeError, LookupError) as problem:
                notices.append(f"'{path}' is not a diagnostic that can be shown ({problem!r}).")
                continue
            room -= len(json.dumps(figures))
            if room < 0:
                notices.append(f"'{path}' is left out to keep this page small: a report of this run alone shows it.")
                continue
            title, what, paper = (str(document.get(key) or "") for key in ("title", "what", "paper"))
            about = DiagnosticFigures(name, title or name, f"{what} ({paper})" if paper else what)
            found.setdefault(name, about).runs[run] = figures
    for diagnostic in found.values():
        first, *others = diagnostic.runs.values()
        if others and all(figures == first for figures in others):  # it is of the data, and these are the same
            diagnostic.runs.clear()
            diagnostic.runs[ALL_RUNS] = first
        share_ends(diagnostic.runs)
    return list(found.values())


def _none(_constant: str) -> None:
    """JSON has neither NaN nor infinity."""


def checked(figure: Any) -> Figure:
    """The figure as the page draws it; an error of any kind where it cannot be drawn."""
    result = dict(figure)
    if result["kind"] == "table":
        rows = [[cell if isinstance(cell, int | float | None) else str(cell) for cell in row] for row in result["rows"]]
        if any(len(row) != len(result["columns"]) for row in rows):
            raise ValueError("a row has not one cell for each column")
        return {**result, "rows": rows}
    if result["kind"] == "points" and (step := -(-len(result["x"]) // MOST_POINTS)) > 1:
        few = {key: result[key][::step] for key in ("x", "y", "class", "domain")}
        result |= {**few, "note": f"{len(few['x'])} of {len(result['x'])} points are shown."}
    if str(result.get("y_label", "")).endswith(FRACTION):  # on a page, accuracy has one unit
        for one in result.get("series", ()):
            shares = {key: one[key] for key in ("y", "values", "spread") if one.get(key)}
            one |= {key: [None if v is None else short(100 * v) for v in values] for key, values in shares.items()}
        result |= {"y_label": result["y_label"].removesuffix(FRACTION) + ", %", "percent": True}
    chart(result)
    return result


def short(value: float) -> float:
    return float(f"{value:.5g}")


def share_ends(runs: Mapping[str, list[Figure]]) -> None:
    """The same axis for the same figure of several runs: else they could not be compared."""
    for twins in zip(*runs.values(), strict=False):
        values = known(value for figure in twins for value in _values(figure))
        if len(twins) > 1 and values and not twins[0].get("log_y"):
            low, high = min(values), max(values)
            low = min(low, 0) if twins[0]["kind"] == "bars" else low
            for figure in twins:
                figure["ends"] = (low - 0.05 * (high - low) * (low != 0), high + 0.05 * (high - low))


def _values(figure: Figure) -> Iterator[float | None]:
    if figure["kind"] in ("lines", "bars", "matrix"):
        for row in figure.get("series") or figure["values"]:
            yield from row["y" if "y" in row else "values"] if isinstance(row, dict) else row


# -- on the page -----------------------------------------------------------------------------------------------------
def diagnostics_section(group: Group, page: Page) -> Iterator[Markup]:
    yield from key_table(group)
    for diagnostic in group.diagnostics:
        yield html("heading", diagnostic.title)
        yield html("text", diagnostic.what)
        yield page.choice(diagnostic.runs, group.two_of(diagnostic.runs))


def key_table(group: Group) -> Iterator[Markup]:
    """One number of each diagnostic by method."""
    members = {str(member): member for member in group.members}
    found: dict[tuple[str, str | None, bool], dict[str, dict[int, float]]] = {}
    for diagnostic in group.diagnostics:
        for run, figures in diagnostic.runs.items():
            for key in (figure["key"] for figure in figures if figure.get("key") and run in members):
                numbers = found.setdefault((key["label"], key.get("better"), bool(key.get("percent"))), {})
                numbers.setdefault(members[run].label, {})[members[run].seed] = key["value"]
    rows, methods = [], [row for row in group.results.rows if row.method in group.shown]
    for (label, better, percent), numbers in found.items():
        cells = {method: Cell(values) for method, values in numbers.items()}
        competing = {row.method: cells[row.method] for row in methods if competes(row) and row.method in cells}
        best = unbeaten(competing, lower=better == "low") if better else set()
        name = label + (", points" if percent else "") + {"low": " \u2193", "high": " \u2191"}.get(better or "", "")
        scale, form = (100, ".1f") if percent else (1, ".3g")
        best_and_all = ((cells.get(r.method), r.method in best) for r in methods)
        rows.append([name, *(measured(cell, best=bold, scale=scale, form=form) for cell, bold in best_and_all)])
    caption = (
        "One number of each diagnostic, in the last round it was recorded in, mean over seeds. \u2193 lower is better, "
        f"\u2191 higher is better; bold: no other is ahead of it, {RULE}; none where nothing is decided."
    )
    if rows and len(methods) > 1:
        yield html("table", ["number", *(group.results.name(row) for row in methods)], rows, caption)
