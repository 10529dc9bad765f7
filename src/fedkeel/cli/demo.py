"""Compare the methods on digits-shift, five domains of real handwritten digits that look different.

examples:
  fedkeel demo
  fedkeel demo --quick
  fedkeel demo --resume
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedkeel.cli.terminal.interrupts import interruptible
from fedkeel.cli.terminal.parsing import Arguments, Parser
from fedkeel.core.naming import visible
from fedkeel.errors import FedkeelError
from fedkeel.experiments.rows import read_seeds

HELP = "compare the methods on built-in digits, in about three minutes"


def add_arguments(parser: Parser) -> None:
    parser.add_shared("--seeds")
    parser.add_argument("--quick", action="store_true", help="a few seconds: few rounds, one seed; shows that it works")
    parser.add_argument("--resume", action="store_true", help="keep the runs that are there and do the rest")
    parser.add_shared("--jobs")
    parser.add_argument("--out", metavar="DIR", help="where the run directories go (default: runs/demo)")
    parser.add_shared("--json", "--quiet")


def run(arguments: Arguments) -> int:
    seeds = read_seeds(arguments.seeds)

    from fedkeel.cli.show import show_comparison
    from fedkeel.cli.terminal.progress import ComparisonProgress
    from fedkeel.experiments.demo import demo, findings, introduction

    quick, resume = arguments.quick, arguments.resume
    if not (arguments.quiet or arguments.json):
        print(introduction(quick=quick), file=sys.stderr)
    go_on_with = arguments.command_line if resume else f"{arguments.command_line} --resume"
    with interruptible(go_on_with), ComparisonProgress(quiet=arguments.quiet) as progress:
        directory = arguments.out or "runs/demo"
        comparison = demo(directory, seeds=seeds, jobs=arguments.jobs, quick=quick, resume=resume, observer=progress)
    page = write_page(comparison.directory) if comparison.runs else None
    sentences = [] if quick else findings(comparison)
    return show_comparison(comparison, as_json=arguments.json, findings=sentences, page=page)


def write_page(directory: Path) -> Path | None:
    """The report; what keeps it from being written must not cost the table."""
    from fedkeel import report

    try:
        return report.write([directory])
    except FedkeelError as problem:
        print(f"fedkeel: there is no report: {visible(str(problem))}", file=sys.stderr)
        return None
