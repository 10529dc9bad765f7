"""The command that measures: bench."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fedkeel import config as configuration
from fedkeel.cli.interrupts import interruptible
from fedkeel.cli.parsing import examples
from fedkeel.errors import FedkeelError
from fedkeel.experiments.rows import typed

if TYPE_CHECKING:
    from fedkeel.experiments.bench import Report, Result

STOPPED = 130
SET_BY_ROW = ("method", "data", "partition", "model", "rounds", "batch_size", "learning_rate", "executor", "device")


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        usage="%(prog)s [ROW...] [options]",
        help="measure how fast Fedkeel is on this machine",
        description="Repeat the table of the benchmarks here: each row against the usual loop, in turn and several\n"
        "times, and the median of the ratios. Rows that this machine cannot do are skipped, with the reason.",
        epilog=examples(
            [
                "fedkeel bench                    every row that this machine can do: on a CPU about two minutes",
                "fedkeel bench --list             the rows",
                "fedkeel bench cpu4 small10       these rows",
                "fedkeel bench --quick            a few steps of each: shows that it works",
            ]
        ),
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="a row of the table (default: all), see --list")
    parser.add_argument("--list", action="store_true", help="list the rows and measure nothing")
    parser.add_argument("--quick", action="store_true", help="a few steps of each row: the ratios mean nothing")
    parser.add_argument("--compile", action="store_true", help="short for --set compile=true")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="an option of the runs on Fedkeel's side"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress, only the tables")
    parser.set_defaults(act=run_bench)


def run_bench(arguments: argparse.Namespace) -> int:
    options = read_options([*arguments.set, *(["compile=true"] if arguments.compile else [])])
    if arguments.json and not Path(arguments.json).absolute().parent.is_dir():
        raise FedkeelError(f"'{arguments.json}' cannot be written: its folder does not exist.")

    from fedkeel.experiments.bench import bench, choose

    rows = choose(arguments.rows)
    if arguments.list:
        print_rows(rows)
        return 0
    with interruptible(), ProgressLine(sys.stderr, quiet=arguments.quiet) as line:
        report = bench(rows, quick=arguments.quick, options=options, say=line.say)
    print_report(report)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    if report.stopped:
        print("fedkeel: stopped; the tables have what was measured until then", file=sys.stderr)
        return STOPPED
    return 0


def read_options(texts: list[str]) -> dict[str, Any]:
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


class ProgressLine:
    """What is being measured: one line that changes on a terminal, elsewhere a line for each row."""

    def __init__(self, stream: IO[str], *, quiet: bool = False) -> None:
        self._stream, self._quiet, self._live = stream, quiet, stream.isatty()
        self._row = ""

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live and self._row:
            self._write("\r\033[K")

    def say(self, text: str) -> None:
        row = text.partition(":")[0]
        if self._live:
            self._write(f"\r\033[K{text}")
        elif row != self._row:
            self._write(f"{text}\n")
        self._row = row

    def _write(self, text: str) -> None:
        if not self._quiet:
            self._stream.write(text)
            self._stream.flush()


# -- tables ----------------------------------------------------------------------------------------------------------
def print_rows(rows: dict[str, Any]) -> None:
    from fedkeel.cli.console import console, plain_table
    from fedkeel.experiments.bench import reason_to_skip

    lines = [
        (name, row.work, row.method, aim_text(row.group, row.aim), reason_to_skip(row) or "yes")
        for name, row in rows.items()
    ]
    console(sys.stdout).print(plain_table(["row", "work", "method", "aim", "here"], lines))


def print_report(report: Report) -> None:
    from fedkeel.cli.console import console, plain_table
    from fedkeel.experiments.bench import GROUPS

    out = console(sys.stdout)

    def say(text: str) -> None:
        out.print(text, markup=False)

    for group, title in GROUPS.items():
        measured = [result for result in report.results if result.group == group and not result.skipped]
        if measured:
            say(title)
            out.print(plain_table(headings(group), [cells(result) for result in measured]))
    reasons: dict[str, list[str]] = {}
    for result in report.results:
        if result.skipped:
            reasons.setdefault(result.skipped, []).append(result.row)
    for reason, names in reasons.items():
        say(f"Skipped {', '.join(names)}: {reason}.")
    if report.quick:
        say("Only a few steps each (--quick): these ratios mean nothing.")
    if report.busy:
        say(f"The machine was busy before it began (load {report.load:g}): the ratios of CPU rows mean little.")
    say(f"{report.machine}; torch {report.torch}; {report.date}")


def headings(group: str) -> list[str]:
    if group == "cell":
        return ["row", "work", "method", "seconds", "aim", "met"]
    ratio = "costs times" if group == "cost" else "ratio"
    return ["row", "work", "other side", "steps/s", "Fedkeel", "steps/s", ratio, "from", "to", "aim", "met"]


def cells(result: Result) -> list[str]:
    met = {None: "", True: "yes", False: "no"}[result.met]
    aim = aim_text(result.group, result.aim)
    if result.seconds is not None:
        return [result.row, result.work, result.ours, f"{result.seconds:.1f}", aim, met]
    assert result.ratio is not None
    assert result.other_speed is not None
    assert result.our_speed is not None
    speeds = [result.other, f"{result.other_speed:.0f}", result.ours, f"{result.our_speed:.0f}"]
    ratios = [f"{ratio:.2f}" for ratio in (result.ratio, min(result.ratios), max(result.ratios))]
    return [result.row, result.work, *speeds, *ratios, aim, met]


def aim_text(group: str, aim: float | None) -> str:
    if aim is None:
        return ""
    return {"cost": f"at most {aim:g}", "cell": f"under {aim:g} s"}.get(group, f"{aim:g}")
