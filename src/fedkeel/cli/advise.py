"""Look at a federation before deciding on a method: how far its clients differ in labels and in look, what a pilot of
FedAvg gets in a few rounds, which methods to try, and whether to calibrate. Nothing is trained but the pilot.

examples:
  fedkeel advise --data digits-shift
  fedkeel advise --data folder --root ./images --model 'resnet18(stem=small)' --batch-size 16
  fedkeel advise --data cifar10 --partition 'dirichlet(alpha=0.1, clients=10)' --stateless --json
  fedkeel advise --data pacs --no-pilot                   what needs no training
"""

import fedkeel
from fedkeel.cli.terminal.interrupts import interruptible
from fedkeel.cli.terminal.output import show
from fedkeel.cli.terminal.parsing import Arguments, Parser, given_options, whole
from fedkeel.config import option_names
from fedkeel.errors import FedkeelError
from fedkeel.experiments.rows import SET_BY_ADVICE

HELP = "say which methods to try on a federation, and why"
ROUNDS = 5


def add_arguments(parser: Parser) -> None:
    rounds = f"of the pilot (default: {ROUNDS})"
    parser.add_argument("--rounds", metavar="N", type=whole("rounds", 1), help=rounds)
    parser.add_argument(
        "--no-pilot", action="store_true", help="train nothing: no accuracies, looks of the model as it begins"
    )
    parser.add_shared("--json", "--quiet", "--config", "--root", "--tolerate", "--import")
    parser.add_options({*option_names()}.difference(SET_BY_ADVICE))


def run(arguments: Arguments) -> int:
    if arguments.no_pilot and arguments.rounds is not None:
        raise FedkeelError("'--rounds' is of the pilot, and '--no-pilot' is given: keep one.")
    options = given_options(arguments, SET_BY_ADVICE)

    from fedkeel.runs.progress import RunProgress

    with interruptible(), RunProgress(quiet=arguments.quiet) as progress:
        rounds, pilot = arguments.rounds or ROUNDS, not arguments.no_pilot
        advice = fedkeel.advise(rounds=rounds, pilot=pilot, observer=progress, verbose=False, **options)
    show(advice.lines(), advice.to_dict(), as_json=arguments.json, soft_wrap=True)
    return 0
