"""Go on with a run from its last good checkpoint. The result is that of a run never stopped.
What changes the result needs a new run: fedkeel run --config DIR/config.toml --rounds 50

examples:
  fedkeel resume runs/digits-shift-fedavg-seed0
  fedkeel resume runs/digits-shift-fedavg-seed0 --device cpu     on another machine than it began on
  fedkeel resume runs/digits-shift-mine-seed0 --import my_methods.py
"""

from __future__ import annotations

from collections.abc import Callable

import fedkeel
from fedkeel.cli.show import show_run
from fedkeel.cli.terminal.interrupts import interruptible
from fedkeel.cli.terminal.parsing import Arguments, Parser, given_options
from fedkeel.config import MACHINE_OPTIONS
from fedkeel.runs.trackers import tracked

HELP = "go on with a run that was stopped"
USAGE = "DIR [options]"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the run directory")
    parser.add_shared("--json", "--quiet", "--track", "--no-cache", "--import")
    text = "go on though the code of the method or model is not what the run began with"
    parser.add_argument("--changed-code", action="store_true", help=text)
    parser.add_options({*MACHINE_OPTIONS} - {"round_timeout"}, default="as before")


def run(arguments: Arguments) -> int:
    return go_on(arguments, fedkeel.resume)


def go_on(arguments: Arguments, how: Callable[..., fedkeel.Run]) -> int:
    from fedkeel.runs.progress import RunProgress

    progress = RunProgress(quiet=arguments.quiet)
    with interruptible(), progress, tracked(arguments.track, arguments.directory, progress) as observer:
        own = {"observer": observer, "verbose": False, "changed_code": arguments.changed_code}
        result = how(arguments.directory, **own, **given_options(arguments))
    return show_run(result, as_json=arguments.json)
