"""Go on with a finished run until it has had more rounds. The result is that of a run of so many rounds from the start.
A schedule or a method that goes by the number of rounds is refused: train anew with 'fedkeel run --config'.

examples:
  fedkeel extend runs/digits-shift-fedavg-seed0 --rounds 60     30 more, if it had 30
"""

import shlex

import fedkeel
from fedkeel.cli import resume
from fedkeel.cli.terminal.parsing import Arguments, Parser, whole

HELP = "go on with a finished run for more rounds"
USAGE = "DIR --rounds N [options]"


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--rounds", metavar="N", type=whole("rounds", 1), required=True, help="in all, with those it had"
    )
    resume.add_arguments(parser)


def run(arguments: Arguments) -> int:
    arguments.continue_with = f"fedkeel resume {shlex.quote(arguments.directory)}"
    return resume.go_on(arguments, fedkeel.extend)
