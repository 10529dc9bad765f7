"""Compute a diagnostic of a run, or show what was recorded of it while it trained.
A short table is printed; all of it goes to DIR/diagnostics/NAME.json.

examples:
  fedkeel list diagnostics
  fedkeel analyse representation-divergence runs/digits-shift-fedavg-seed0
  fedkeel analyse 'tsne(samples=500)' runs/demo/*/seed0
  fedkeel run --record statistics-divergence,loss-gap --record-every 5
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import fedkeel
from fedkeel.cli.terminal.output import Line, Table, show
from fedkeel.cli.terminal.parsing import Arguments, Parser
from fedkeel.errors import FedkeelError

HELP = "look at a run through one of the papers' diagnostics"
USAGE = "NAME DIR... [options]"
MOST_ROWS = 24  # of a table on the screen; the file has all of it


def add_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="a diagnostic, with options: 'tsne(samples=500)'")
    parser.add_argument("directories", nargs="+", metavar="DIR", help="a run directory")
    parser.add_argument("--out", metavar="DIR", help="write to DIR/diagnostics/NAME.json, of one run, not to its own")
    parser.add_shared("--json", "--import")


def run(arguments: Arguments) -> int:
    from fedkeel.analysis.diagnostic import FOLDER

    diagnostic, given = fedkeel.analysis.build(arguments.name), len(arguments.directories)
    if arguments.out is not None and given > 1:
        raise FedkeelError(f"'--out {arguments.out}' takes one run and {given} are given: give one.")
    runs = [fedkeel.Run(directory) for directory in arguments.directories]  # all are there before the first is read
    documents: list[dict[str, Any]] = []
    for run in runs:
        place = run.directory if arguments.out is None else Path(arguments.out)
        document = fedkeel.analysis.run(arguments.name, run, save=place)
        documents.append({"directory": str(run.directory), **document})
        if not arguments.json:
            paper = f" ({document['paper']})" if document["paper"] else ""
            title = f"{run.config.method}, seed {run.config.seed}: {document['title']}{paper}"
            written = f"written {place / FOLDER / diagnostic.name}.json"
            show([title, document["what"], *figure_lines(document["figures"]), written])
    if arguments.json:
        print(json.dumps(documents[0] if given == 1 else documents, indent=1))
    return 0


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
