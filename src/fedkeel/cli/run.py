"""Train one federation. Its run directory holds the configuration, the metrics and the model.

examples:
  fedkeel run --method 'fedprox(mu=0.1)' --rounds 50 --seed 1
  fedkeel run --data folder --root ./images --model 'resnet18(stem=small)' --device cuda
  fedkeel run --partition 'dirichlet(alpha=0.3, clients=4)' --participation 0.5
  fedkeel run --config runs/old/config.toml --learning-rate 0.05
  fedkeel run --import my_methods.py --method mine        code of your own, see the page "Command line"
"""

import shlex

import fedkeel
from fedkeel.cli.show import show_run
from fedkeel.cli.terminal.interrupts import interruptible
from fedkeel.cli.terminal.parsing import Arguments, Parser, flags, given_options
from fedkeel.config import from_dict
from fedkeel.runs.trackers import tracked

HELP = "train one federation"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--out", metavar="DIR", help="the run directory (default: a new one in runs/)")
    parser.add_shared("--json", "--quiet", "--track", "--config", "--root", "--tolerate", "--import")
    parser.add_options()


def run(arguments: Arguments) -> int:
    config = from_dict(given_options(arguments))

    from fedkeel.engine.idle import refuse_typed
    from fedkeel.runs.progress import RunProgress
    from fedkeel.simulation import free_directory

    refuse_typed([config], flags(arguments))
    directory = arguments.out or free_directory(config)
    arguments.continue_with = f"fedkeel resume {shlex.quote(str(directory))}"
    progress = RunProgress(quiet=arguments.quiet)
    with interruptible(), progress, tracked(arguments.track, directory, progress) as observer:
        result = fedkeel.simulate(config, directory=directory, observer=observer, verbose=False)
    return show_run(result, as_json=arguments.json)
