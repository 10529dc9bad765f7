"""Choose each method's settings on validation data, with the same number of trials, then compare the methods with
what was chosen: a table of test results, printed once, with seeds that the search has not seen.
The same command again continues. Needs Optuna: pip install 'fedkeel[tune]'.

examples:
  fedkeel tune fedavg greg fedwon
  fedkeel tune fedavg greg --space 'learning_rate=log(0.001, 0.3), greg.alpha=[0.3, 1, 3]' --trials 20
  fedkeel tune fedprox+greg --space 'fedprox.mu=log(0.001, 1)' --space 'batch_size=[16, 32]' --seeds 5
  fedkeel tune fedavg --space 'optimizer=[sgd, adamw], local_epochs=int(1, 5)' --no-prune --out runs/search
"""

from __future__ import annotations

import argparse

import fedkeel
from fedkeel.cli.compare import options_of_all
from fedkeel.cli.show import comparison_lines, tell_failures
from fedkeel.cli.terminal.interrupts import interruptible
from fedkeel.cli.terminal.output import Line, Table, show
from fedkeel.cli.terminal.parsing import Arguments, Parser, whole
from fedkeel.config import option_names
from fedkeel.experiments.rows import SET_BY_COMPARISON

HELP = "choose each method's settings on validation data, then compare them"
USAGE = "METHOD... [options]"
SET_BY_SEARCH = (*SET_BY_COMPARISON, "evaluate_on")


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("methods", nargs="+", metavar="METHOD", help="a method; its own options after an @")
    space = "what to try, NAME=log(A, B), uniform(A, B), int(A, B) or [A, B, ...]; NAME is an option or METHOD.OPTION; "
    add("--space", action="append", metavar="TEXT", help=f"{space}may be given again (default: the learning rate)")
    add("--trials", type=whole("trials", 1), default=20, metavar="N", help="of each method (default: 20)")
    seeds = "of the comparison, none of them the search's: how many, or which, like 1,2,5 (default: 3)"
    add("--seeds", default="3", metavar="N", help=seeds)
    seed = "of the search, and of the runs in it (default: 0)"
    add("--search-seed", type=whole("search_seed", 0), default=0, metavar="N", help=seed)
    prune = "end trials early that fall behind (default: yes)"
    add("--prune", action=argparse.BooleanOptionalAction, default=True, help=prune)
    parser.add_shared("--jobs")
    add("--out", metavar="DIR", help="where it all goes (default: runs/tune-DATA)")
    parser.add_shared("--metric", "--json", "--quiet", "--config", "--root", "--tolerate", "--import")
    parser.add_options({*option_names()}.difference(SET_BY_SEARCH))


def run(arguments: Arguments) -> int:
    options = options_of_all(arguments, SET_BY_SEARCH)

    from fedkeel.experiments.progress import ComparisonProgress

    with interruptible(), ComparisonProgress(quiet=arguments.quiet) as progress:
        own = {name: getattr(arguments, name) for name in ("space", "trials", "seeds", "jobs", "prune", "search_seed")}
        tuning = fedkeel.tune(
            arguments.methods, **own, directory=arguments.out, observer=progress, verbose=False, **options
        )
    return show_tuning(tuning, as_json=arguments.json, metric=arguments.metric)


def show_tuning(tuning: fedkeel.Tuning, *, as_json: bool, metric: str = "accuracy") -> int:
    chosen = Table(*tuning.table(), "Chosen on validation data.")
    lines: list[Line] = [chosen, *comparison_lines(tuning.comparison, metric)]
    lines.append(f"The trials and the run directories are in {tuning.directory}/")
    show(lines, tuning.to_dict(metric), as_json=as_json)
    return tell_failures(tuning.comparison)
