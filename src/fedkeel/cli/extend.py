"""Go on with a finished run until it has had more rounds. The result is that of a run of so many rounds from the start.
A schedule or a method that goes by the number of rounds is refused: train anew with 'fedkeel run --config'.

examples:
  fedkeel extend runs/digits-shift-fedavg-seed0 --rounds 60     30 more, if it had 30
"""

import shlex

import fedkeel
from fedkeel.cli.show import show_run
from fedkeel.cli.terminal.interrupts import interruptible
from fedkeel.cli.terminal.parsing import Arguments, Parser, given_options, whole
from fedkeel.config import MACHINE_OPTIONS
from fedkeel.runs.trackers import tracked

HELP = "go on with a finished run for more rounds"
USAGE = "DIR --rounds N [options]"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the run directory")
    parser.add_argument("--rounds", metavar="N", type=whole("rounds", 1), required=True, help="in all, not beside")
    parser.add_shared("--json", "--quiet", "--track")
    parser.add_options({*MACHINE_OPTIONS} - {"round_timeout"}, default="as before")


def run(arguments: Arguments) -> int:
    from fedkeel.cli.terminal.progress import RunProgress

    arguments.continue_with = f"fedkeel resume {shlex.quote(arguments.directory)}"
    progress = RunProgress(quiet=arguments.quiet)
    with interruptible(), progress, tracked(arguments.track, arguments.directory, progress) as observer:
        result = fedkeel.extend(arguments.directory, observer=observer, **given_options(arguments))
    return show_run(result, as_json=arguments.json)
