"""Go on with a run from its last good checkpoint. The result is that of a run never stopped.
With --rounds, go on with a finished run until it has had more; the result is that of a run of so many from the start.
What else changes the result needs a new run: fedkeel run --config DIR/config.toml --seed 1

examples:
  fedkeel resume runs/digits-shift-fedavg-seed0
  fedkeel resume runs/digits-shift-fedavg-seed0 --rounds 60      30 more, if it had 30
  fedkeel resume runs/digits-shift-fedavg-seed0 --device cpu     on another machine than it began on
  fedkeel resume runs/digits-shift-mine-seed0 --import my_methods.py
"""

from __future__ import annotations

import shlex

import fedkeel
from fedkeel.cli.show import show_run
from fedkeel.cli.terminal.interrupts import interruptible
from fedkeel.cli.terminal.parsing import Arguments, Parser, given_options, whole
from fedkeel.config import MACHINE_OPTIONS
from fedkeel.runs.trackers import tracked

HELP = "go on with a run that was stopped, or for more rounds"
USAGE = "DIR [options]"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the run directory")
    text = "go on with a finished run until it has had so many in all"
    parser.add_argument("--rounds", metavar="N", type=whole("rounds", 1), help=text)
    parser.add_shared("--json", "--quiet", "--track", "--import")
    parser.add_options({*MACHINE_OPTIONS} - {"round_timeout"}, default="as before")


def run(arguments: Arguments) -> int:
    from fedkeel.runs.progress import RunProgress

    if arguments.rounds:  # once begun, it is a run that was stopped
        arguments.continue_with = f"fedkeel resume {shlex.quote(arguments.directory)}"
    progress = RunProgress(quiet=arguments.quiet)
    with interruptible(), progress, tracked(arguments.track, arguments.directory, progress) as observer:
        result = fedkeel.resume(arguments.directory, observer=observer, verbose=False, **given_options(arguments))
    return show_run(result, as_json=arguments.json)
