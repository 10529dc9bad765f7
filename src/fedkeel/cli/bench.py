"""Repeat the table of the benchmarks here: each row against the usual loop, in turn and several
times, and the median of the ratios. Rows that this machine cannot do are skipped, with the reason.

examples:
  fedkeel bench                    every row that this machine can do: on a CPU about two minutes
  fedkeel bench --list             the rows
  fedkeel bench cpu4 small10       these rows
  fedkeel bench --quick            a few steps of each: shows that it works
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkeel import config as configuration
from fedkeel.cli.terminal.interrupts import EXIT_CODE, interruptible
from fedkeel.cli.terminal.output import Line, Table, show
from fedkeel.cli.terminal.parsing import Arguments, Parser
from fedkeel.errors import FedkeelError
from fedkeel.experiments.rows import typed

if TYPE_CHECKING:
    from fedkeel.experiments.bench import Report, Result

HELP = "measure how fast Fedkeel is on this machine"
USAGE = "[ROW...] [options]"
SET_BY_ROW = ("method", "data", "partition", "model", "rounds", "batch_size", "learning_rate", "executor", "device")


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("rows", nargs="*", metavar="ROW", help="a row of the table (default: all), see --list")
    add("--list", action="store_true", help="list the rows and measure nothing")
    add("--quick", action="store_true", help="a few steps of each row: the ratios mean nothing")
    add("--compile", action="store_true", help="short for --set compile=true")
    add("--json", metavar="FILE", help="also write the results to this file")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of the runs on Fedkeel's side")
    add("--quiet", action="store_true", help="no progress, only the tables")


def run(arguments: Arguments) -> int:
    options = read_options([*arguments.set, *(["compile=true"] if arguments.compile else [])])
    if arguments.json and not Path(arguments.json).absolute().parent.is_dir():
        raise FedkeelError(f"'{arguments.json}' cannot be written: its folder does not exist.")

    from fedkeel.experiments.bench import bench, choose, reason_to_skip

    rows = choose(arguments.rows)
    if arguments.list:
        lines = [
            (name, r.work, r.method, aim_text(r.group, r.aim), reason_to_skip(r) or "yes") for name, r in rows.items()
        ]
        show([Table(["row", "work", "method", "aim", "here"], lines)])
        return 0
    with interruptible(), progress_line(quiet=arguments.quiet) as say:
        report = bench(rows, quick=arguments.quick, options=options, say=say)
    show(report_lines(report))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    if report.stopped:
        print("fedkeel: stopped; the tables have what was measured until then", file=sys.stderr)
        return EXIT_CODE
    return 0


def read_options(texts: Sequence[str]) -> dict[str, Any]:
    """`workers=8` as an option of a run."""
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise FedkeelError(f"'--set {text}' is not an option: write it like '--set workers=8'.")
        configuration.refuse_unknown({name: value})
        if name in SET_BY_ROW:
            raise FedkeelError(f"'--set {text}' sets '{name}', which the row itself sets: leave it out.")
        options[name] = typed(name, value.strip())
    configuration.from_dict(options)
    return options


@contextmanager
def progress_line(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Takes "row: what is done": one line that changes on a terminal, elsewhere a line for each row."""
    last, clear = "", "\r\033[K" if sys.stderr.isatty() else ""

    def say(text: str) -> None:
        nonlocal last
        row = text.partition(":")[0]
        if not quiet and (clear or row != last):
            print(clear + text, end="" if clear else "\n", file=sys.stderr, flush=True)
        last = row

    try:
        yield say
    finally:
        if last and not quiet:
            print(clear, end="", file=sys.stderr, flush=True)


def report_lines(report: Report) -> Iterator[Line]:
    from fedkeel.experiments.bench import GROUPS

    for group, title in GROUPS.items():
        if measured := [cells(result) for result in report.results if result.group == group and not result.skipped]:
            yield title
            yield Table(headings(group), measured)
    skipped: dict[str, list[str]] = {}
    for result in report.results:
        if result.skipped:
            skipped.setdefault(result.skipped, []).append(result.row)
    yield from (f"Skipped {', '.join(names)}: {reason}." for reason, names in skipped.items())
    if report.quick:
        yield "Only a few steps each (--quick): these ratios mean nothing."
    if report.busy:
        yield f"The machine was busy before it began (load {report.load:g}): the ratios of CPU rows mean little."
    yield f"{report.machine}; torch {report.torch}; {report.date}"


def headings(group: str) -> list[str]:
    if group == "cell":
        return ["row", "work", "method", "seconds", "aim", "met"]
    ratio = "costs times" if group == "cost" else "ratio"
    return ["row", "work", "other side", "steps/s", "Fedkeel", "steps/s", ratio, "from", "to", "aim", "met"]


def cells(result: Result) -> list[str]:
    verdict = [aim_text(result.group, result.aim), {None: "", True: "yes", False: "no"}[result.met]]
    if result.seconds is not None:
        return [result.row, result.work, result.ours, f"{result.seconds:.1f}", *verdict]
    speeds = [result.other, f"{result.other_speed:.0f}", result.ours, f"{result.our_speed:.0f}"]
    ratios = [f"{ratio:.2f}" for ratio in (result.ratio, min(result.ratios), max(result.ratios))]
    return [result.row, result.work, *speeds, *ratios, *verdict]


def aim_text(group: str, aim: float | None) -> str:
    if aim is None:
        return ""
    return {"cost": f"at most {aim:g}", "cell": f"under {aim:g} s"}.get(group, f"{aim:g}")
