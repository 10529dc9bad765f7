"""Compare methods on real handwritten digits: on clients whose images look different, then whose labels differ.

examples:
  fedkeel demo
  fedkeel demo --quick
"""

import sys
from pathlib import Path
from typing import Any

from fedkeel.cli.show import comparison_lines, tell_failures
from fedkeel.cli.terminal.interrupts import interruptible
from fedkeel.cli.terminal.output import Line, show
from fedkeel.cli.terminal.parsing import SEEDS, Arguments, Parser
from fedkeel.core.naming import visible
from fedkeel.errors import FedkeelError
from fedkeel.experiments.rows import read_seeds

HELP = "what shifts do to federated learning, on built-in digits, in about two minutes"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--seeds", metavar="N", type=read_seeds, help=f"{SEEDS} (default: 3)")
    parser.add_argument("--quick", action="store_true", help="a few seconds: few rounds, one seed; shows that it works")
    parser.add_shared("--jobs")
    parser.add_argument("--out", metavar="DIR", help="where runs go (default: runs/demo, or runs/demo-quick)")
    parser.add_shared("--json", "--quiet")


def run(arguments: Arguments) -> int:
    from fedkeel import report
    from fedkeel.experiments.demo import PARTS, calibrated, demo, introduction
    from fedkeel.experiments.findings import findings
    from fedkeel.experiments.progress import ComparisonProgress

    if arguments.quick and arguments.seeds is not None:
        raise FedkeelError("'--seeds' is given, and '--quick' has one seed: leave one of them out.")
    arguments.seeds = arguments.seeds or read_seeds(3)
    if not (arguments.quiet or arguments.json):
        print(introduction(quick=arguments.quick), file=sys.stderr)
    place = Path(arguments.out or ("runs/demo-quick" if arguments.quick else "runs/demo"))
    options = {name: getattr(arguments, name) for name in ("seeds", "jobs", "quick")}
    with interruptible(), ComparisonProgress(quiet=arguments.quiet) as progress:
        comparisons = demo(place, **options, observer=progress)
    document: dict[str, Any] = {"directory": str(place), "parts": {}}
    lines: list[Line] = []
    for part, comparison in zip(PARTS, comparisons, strict=True):
        groups = report.collect([comparison.directory]).groups if comparison.runs and not arguments.quick else []
        sentences = [sentence for group in groups for sentence in findings(group.results)]
        sentences += [] if arguments.quick else [*calibrated(comparison), *filter(None, [part.claimed])]
        document["parts"][part.name] = {**comparison.to_dict(), "findings": sentences}
        lines += [part.title, *comparison_lines(comparison, findings=sentences)]
    lines.append(f"The run directories are in {place}/")
    try:
        page = report.write([comparison.directory for comparison in comparisons], place / report.NAME)
        lines.append(f"The report, with curves: {page}")
        document["report"] = str(page)
    except FedkeelError as problem:  # it must not cost the tables
        print(f"fedkeel: there is no report: {visible(str(problem))}", file=sys.stderr)
    show(lines, document, as_json=arguments.json)
    return max([tell_failures(comparison) for comparison in comparisons])
