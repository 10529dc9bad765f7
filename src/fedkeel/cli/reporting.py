"""The command that writes reports."""

from __future__ import annotations

import argparse
import json
from typing import Any

from fedkeel.cli.parsing import examples

FORMATS = ("svg", "png", "pdf")


def add_commands(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        usage="%(prog)s DIR... [options]",
        help="a run, or a comparison, as one HTML page; figures and tables for a paper",
        description="Write one HTML page with tables, curves, diagnostics and the commands to repeat it all.\n"
        "It is a single file that opens from disk and asks nothing of any network.",
        epilog=examples(
            [
                "fedkeel report runs/demo",
                "fedkeel report runs/digits-shift-fedavg-seed0 runs/digits-shift-fedbn-seed0 -o both.html",
                "fedkeel report runs/demo --figures paper/figures --format pdf --tables paper/tables",
            ]
        ),
    )
    report.add_argument("directories", nargs="+", metavar="DIR", help="a run directory, or a folder of run directories")
    report.add_argument(
        "-o", "--output", metavar="FILE", help="the page (default: DIR/report.html; of several: report.html)"
    )
    report.add_argument("--figures", metavar="DIR", help="write the figures there too, for a paper")
    report.add_argument(
        "--format", choices=FORMATS, default="svg", metavar="|".join(FORMATS), help="of the figures (default: svg)"
    )
    report.add_argument("--tables", metavar="DIR", help="write the table there too, as Markdown, LaTeX and CSV")
    report.add_argument(
        "--json", action="store_true", help="print one JSON document: what was written, and what to know"
    )
    report.set_defaults(act=write_report)


def write_report(arguments: argparse.Namespace) -> int:
    from fedkeel import report

    if arguments.figures:
        # Before anything is written: it may be that matplotlib is missing.
        from fedkeel.report import figures

        figures.require_matplotlib()
    page = report.write(arguments.directories, arguments.output)
    written = [page]
    if arguments.figures or arguments.tables:
        collected = report.collect(arguments.directories)
        if arguments.figures:
            written += figures.write(collected, arguments.figures, arguments.format)
        if arguments.tables:
            written += report.write_tables(collected, arguments.tables)
    if arguments.json:
        print(json.dumps({"page": str(page), "written": [str(path) for path in written]}, indent=1))
    else:
        print("\n".join(map(str, written)))
    return 0
