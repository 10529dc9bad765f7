"""The command that looks closer: analyse."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fedkeel.cli.parsing import examples
from fedkeel.errors import FedkeelError

MOST_ROWS = 24  # of a table on the screen; the file has all of it


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "analyse",
        usage="%(prog)s NAME DIR... [options]",
        help="look at a run through one of the papers' diagnostics",
        description="Compute a diagnostic of a run, or show what was recorded of it while it trained.\n"
        "A short table is printed; all of it goes to DIR/diagnostics/NAME.json.",
        epilog=examples(
            [
                "fedkeel list diagnostics",
                "fedkeel analyse representation-divergence runs/digits-shift-fedavg-seed0",
                "fedkeel analyse 'tsne(samples=500)' runs/demo/*/seed0",
                "fedkeel run --record statistics-divergence,loss-gap --record-every 5",
            ]
        ),
    )
    parser.add_argument("name", metavar="NAME", help="a diagnostic, with options: 'tsne(samples=500)'")
    parser.add_argument("directories", nargs="+", metavar="DIR", help="a run directory")
    parser.add_argument("--out", metavar="DIR", help="write to DIR/diagnostics/NAME.json, of one run, not to its own")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(act=analyse)


def analyse(arguments: argparse.Namespace) -> int:
    from fedkeel import analysis
    from fedkeel.cli.console import console
    from fedkeel.runs.run import Run

    diagnostic = analysis.build(arguments.name)
    if arguments.out is not None and len(arguments.directories) > 1:
        raise FedkeelError(
            f"'--out {arguments.out}' takes one run and {len(arguments.directories)} are given: give one."
        )
    runs = [Run(directory) for directory in arguments.directories]  # all of them are there before the first is read
    out, documents = console(sys.stdout), []
    for run in runs:
        place = run.directory if arguments.out is None else Path(arguments.out)
        document = analysis.run(arguments.name, run, save=place)
        documents.append({"directory": str(run.directory), **document})
        if not arguments.json:
            out.print(
                f"{run.config.method}, seed {run.config.seed}: {document['title']} ({document['paper']})", markup=False
            )
            out.print(document["what"], markup=False)
            for figure in document["figures"]:
                print_figure(figure, out)
            out.print(f"written {place / analysis.FOLDER / diagnostic.name}.json", markup=False)
    if arguments.json:
        print(json.dumps(documents[0] if len(documents) == 1 else documents, indent=1))
    return 0


def print_figure(figure: dict[str, Any], out: Any) -> None:
    from fedkeel.cli.console import plain_table

    headings, rows = figure_table(figure)
    left_out = len(rows) - MOST_ROWS
    out.print(f"\n{figure['title']}", markup=False)
    out.print(plain_table(headings, rows[:MOST_ROWS]))
    for line in (figure.get("note"), f"{left_out} rows more are in the file." if left_out > 0 else None):
        if line:
            out.print(line, markup=False)


def figure_table(figure: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A figure as a short table: of a line its ends and extremes, of points how many there are."""
    kind = figure["kind"]
    if kind == "lines":
        places = [f"first {figure['x_label']}", f"last {figure['x_label']}"]
        headings = [figure["y_label"], *places, "at first", "at last", "smallest", "largest"]
        return headings, [[line["name"], *line_row(line)] for line in figure["series"]]
    if kind == "bars":
        names = [series["name"] for series in figure["series"]]
        columns = [series["values"] for series in figure["series"]]
        rows = [[category, *map(number, row)] for category, *row in zip(figure["categories"], *columns, strict=True)]
        return [figure["x_label"] or figure["y_label"], *names], rows
    if kind == "matrix":
        rows = [[name, *map(number, row)] for name, row in zip(figure["rows"], figure["values"], strict=True)]
        return [figure["y_label"], *figure["columns"]], rows
    if kind == "points":
        counts: dict[str, int] = {}
        for domain in figure["domain"]:
            counts[domain] = counts.get(domain, 0) + 1
        return ["domain", "points"], [[domain, str(count)] for domain, count in counts.items()]
    return figure["columns"], [[number(entry) for entry in row] for row in figure["rows"]]


def line_row(line: dict[str, Any]) -> list[str]:
    known = [(x, y) for x, y in zip(line["x"], line["y"], strict=True) if y is not None]
    if not known:
        return ["-"] * 6
    values = [y for _, y in known]
    return [number(n) for n in (known[0][0], known[-1][0], values[0], values[-1], min(values), max(values))]


def number(value: Any) -> str:
    """Four digits that count.

    >>> number(0.000123456), number(12), number(None), number("photo")
    ('0.0001235', '12', '-', 'photo')
    """
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
