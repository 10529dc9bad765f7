"""Write one HTML page with tables, curves, diagnostics and the commands to repeat it all.
It is a single file that opens from disk and asks nothing of any network.

examples:
  fedkeel report runs/demo
  fedkeel report runs/digits-shift-fedavg-seed0 runs/digits-shift-fedbn-seed0 -o both.html
  fedkeel report runs/demo --figures paper/figures --format pdf --tables paper/tables
  fedkeel report runs/demo --metric balanced-accuracy
"""

import json

from fedkeel.cli.terminal.parsing import Arguments, Parser
from fedkeel.errors import FedkeelError

HELP = "a run, or a comparison, as one HTML page; figures and tables for a paper"
USAGE = "DIR... [options]"
FORMATS = ("svg", "png", "pdf")


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("directories", nargs="+", metavar="DIR", help="a run directory, or a folder of run directories")
    place = "the page (default: DIR/report.html; of several: report.html)"
    add("-o", "--out", "--output", dest="output", metavar="FILE", help=place)
    add("--figures", metavar="DIR", help="write the figures there too, for a paper")
    add("--format", choices=FORMATS, metavar="|".join(FORMATS), help="of the figures (default: svg)")
    add("--tables", metavar="DIR", help="write the table there too, as Markdown, LaTeX and CSV")
    parser.add_shared("--metric")
    add("--json", action="store_true", help="print one JSON document: what was written")


def run(arguments: Arguments) -> int:
    from fedkeel import report
    from fedkeel.drawing.show import require_converter

    if arguments.format and not arguments.figures:
        raise FedkeelError(
            "'--format' is of the figures that are written, and none are: give --figures, or leave it out."
        )
    if arguments.figures:
        require_converter()  # before anything is written
    page = report.write(arguments.directories, arguments.output, metric=arguments.metric)
    written = [page]
    if arguments.figures or arguments.tables:
        collected = report.collect(arguments.directories, metric=arguments.metric)
        if arguments.figures:
            written += report.write_figures(collected, arguments.figures, arguments.format or FORMATS[0])
        if arguments.tables:
            written += report.write_tables(collected, arguments.tables)
    paths = [str(path) for path in written]
    print(json.dumps({"page": str(page), "written": paths}, indent=1) if arguments.json else "\n".join(paths))
    return 0
