"""Train each method with each seed and print a table: method by domain, mean and spread.
The same command again continues: what is finished is not trained again.

examples:
  fedkeel compare fedavg fedbn gn
  fedkeel compare fedavg 'fedprox(mu=0.1)' fedprox+gn --seeds 5 --rounds 50
  fedkeel compare fedavg gn@learning_rate=0.05,batch_size=16 --seeds 0,7
  fedkeel compare fedavg fedbn --json > table.json
  fedkeel compare fedavg mine --import my_methods.py
  fedkeel compare fedavg fedbn --metric balanced-accuracy
"""

from collections.abc import Container
from typing import Any

import fedkeel
from fedkeel.cli.show import show_comparison
from fedkeel.cli.terminal.interrupts import interruptible
from fedkeel.cli.terminal.parsing import Arguments, Parser, flags, given_options
from fedkeel.config import option_names
from fedkeel.experiments.rows import SET_BY_COMPARISON, read_methods

HELP = "train several methods over several seeds and print a table"
USAGE = "METHOD... [options]"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("methods", nargs="+", metavar="METHOD", help="a method; its own options after an @")
    parser.add_shared("--seeds", "--jobs")
    parser.add_argument("--out", metavar="DIR", help="where the run directories go (default: runs/compare-DATA)")
    parser.add_shared("--metric", "--json", "--quiet", "--track", "--config", "--root", "--tolerate")
    parser.add_shared("--import")
    parser.add_options({*option_names()}.difference(SET_BY_COMPARISON))


def options_of_all(arguments: Arguments, without: Container[str]) -> dict[str, Any]:
    """The options of all rows; refused where a row cannot be read, or has not what is to be shown of it."""
    options = given_options(arguments, without)
    configs = read_methods(arguments.methods, options)

    from fedkeel.engine.idle import refuse_typed
    from fedkeel.engine.measuring import refuse_unmeasured

    for config in configs.values():
        refuse_unmeasured(arguments.metric, config)
    refuse_typed(configs.values(), flags(arguments))
    return options


def run(arguments: Arguments) -> int:
    options = options_of_all(arguments, SET_BY_COMPARISON)

    from fedkeel.experiments.progress import ComparisonProgress

    with interruptible(), ComparisonProgress(quiet=arguments.quiet) as progress:
        own = {name: getattr(arguments, name) for name in ("methods", "seeds", "jobs", "track")}
        comparison = fedkeel.compare(**own, directory=arguments.out, observer=progress, verbose=False, **options)
    return show_comparison(comparison, as_json=arguments.json, metric=arguments.metric)
