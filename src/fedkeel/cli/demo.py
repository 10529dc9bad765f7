"""Compare the methods on digits-shift, five domains of real handwritten digits that look different.

examples:
  fedkeel demo
  fedkeel demo --quick
  fedkeel demo --resume
"""

import sys

from fedkeel.cli.show import show_comparison
from fedkeel.cli.terminal.interrupts import interruptible
from fedkeel.cli.terminal.parsing import Arguments, Parser
from fedkeel.core.naming import visible
from fedkeel.errors import FedkeelError

HELP = "compare the methods on built-in digits, in about three minutes"


def add_arguments(parser: Parser) -> None:
    parser.add_shared("--seeds")
    parser.add_argument("--quick", action="store_true", help="a few seconds: few rounds, one seed; shows that it works")
    parser.add_argument("--resume", action="store_true", help="keep the runs that are there and do the rest")
    parser.add_shared("--jobs")
    parser.add_argument("--out", metavar="DIR", help="where the run directories go (default: runs/demo)")
    parser.add_shared("--json", "--quiet")


def run(arguments: Arguments) -> int:
    from fedkeel import report
    from fedkeel.experiments.demo import demo, findings, introduction
    from fedkeel.experiments.progress import ComparisonProgress

    if not (arguments.quiet or arguments.json):
        print(introduction(quick=arguments.quick), file=sys.stderr)
    if not arguments.resume:
        arguments.continue_with += " --resume"
    options = {name: getattr(arguments, name) for name in ("seeds", "jobs", "quick", "resume")}
    with interruptible(), ComparisonProgress(quiet=arguments.quiet) as progress:
        comparison = demo(arguments.out or "runs/demo", **options, observer=progress)
    page = None
    try:
        page = report.write([comparison.directory]) if comparison.runs else None
    except FedkeelError as problem:  # it must not cost the table
        print(f"fedkeel: there is no report: {visible(str(problem))}", file=sys.stderr)
    sentences = [] if arguments.quick else findings(comparison.results)
    return show_comparison(comparison, as_json=arguments.json, findings=sentences, page=page)
