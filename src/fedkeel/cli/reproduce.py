"""Run the cells of a paper's table or figure and print ours / paper / difference.
The same command again continues: a cell that is done is never run again.

examples:
  fedkeel reproduce --list
  FEDKEEL_DATA=./data fedkeel reproduce hbn/table1 --only CIFAR-10
  fedkeel reproduce fedwon/table1 --only FedBN FedWon Office-Caltech-10 --seeds 1
  fedkeel reproduce hbn/table6 --rounds 5        a quick look
  fedkeel reproduce greg/small                   all of a paper's tables at a size for two cores
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fedkeel.cli.terminal.interrupts import interruptible
from fedkeel.cli.terminal.output import Line, Table, show
from fedkeel.cli.terminal.parsing import SEEDS, Arguments, Parser, given_options
from fedkeel.config import RAY_OPTIONS
from fedkeel.core.naming import visible
from fedkeel.errors import FedkeelError

if TYPE_CHECKING:
    from fedkeel.experiments.paper_table import Reproduction

HELP = "run a table or figure of a paper and print ours beside it"
USAGE = "NAME [options]"
CHANGEABLE = (
    *("rounds", "model", "weights", "executor", "workers", "device", "precision", "checkpoint_every"),
    *RAY_OPTIONS,
)

OF_RUNS = ("only", "seeds", "markdown", "jobs", "out", *CHANGEABLE)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("recipe", nargs="?", metavar="NAME", help="see --list, or a TOML file of your own")
    parser.add_argument("--list", action="store_true", help="every recipe and what it is")
    parser.add_argument("--only", nargs="+", default=[], metavar="LABEL", help="rows, groups or columns; * is anything")
    parser.add_argument("--seeds", metavar="N", help=f"{SEEDS} (default: the recipe's)")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_shared("--jobs")
    parser.add_argument("--out", metavar="DIR", help="where the run directories go (default: runs/reproduce)")
    parser.add_shared("--json", "--quiet", "--import")
    parser.add_options(CHANGEABLE, default="the recipe's")


def run(arguments: Arguments) -> int:
    if arguments.list:
        refuse_beside_list(arguments)
        return list_recipes(as_json=arguments.json)
    if arguments.markdown and arguments.json:
        raise FedkeelError("'--markdown' and '--json' are two ways to print the same: keep one.")
    if not arguments.recipe:
        raise FedkeelError("'fedkeel reproduce' lacks NAME: 'fedkeel reproduce --list' shows what there is.")
    from fedkeel.experiments.progress import ComparisonProgress
    from fedkeel.experiments.reproduce import PLACE, reproduce

    options = {name: getattr(arguments, name) for name in ("only", "seeds", "jobs")}
    options |= {"directory": arguments.out or PLACE, **given_options(arguments)}
    results = []
    for name in recipes_of(arguments.recipe):
        with interruptible(), ComparisonProgress(quiet=arguments.quiet) as progress:
            results.append(reproduce(name, observer=progress, **options))
        if not arguments.json:
            print_result(results[-1], markdown=arguments.markdown)
    if arguments.json:
        documents = [result.to_dict() for result in results]
        print(json.dumps(documents if len(documents) > 1 else documents[0], indent=1))
    return 1 if any(result.missing for result in results) else 0


def recipes_of(name: str) -> list[str]:
    """The recipe of this name, or for `PAPER/small` all of a paper's at a size for two cores."""
    from fedkeel.experiments.recipes import names

    paper, _, kind = name.partition("/")
    small = [other for other in names() if other.startswith(f"{paper}/") and other.endswith("-small")]
    return small if kind == "small" and small else [name]


def print_result(result: Reproduction, *, markdown: bool) -> None:
    if markdown:
        print(result.markdown())
        return
    show([*lines_of(result), f"The run directories are in {result.directory}/"])
    failures = [f"{name} failed: {why}" for name, why in result.failures.items()]
    for sentence in (*result.skipped, *failures):
        print(f"fedkeel: {visible(sentence)}", file=sys.stderr)


def lines_of(result: Reproduction) -> Iterator[Line]:
    marks = [f"*** {mark} ***" for mark in result.marks]
    yield from (result.title, *marks, result.legend)
    for group, headings, rows in result.tables():
        if group:
            yield f"\n{group}"
        yield Table(headings, rows)
    yield from (f"- {sentence}" for sentence in [*result.sentences(), *result.notes()])
    yield from marks


def refuse_beside_list(arguments: Arguments) -> None:
    names = {"recipe": "NAME", **{name: f"--{name.replace('_', '-')}" for name in OF_RUNS}}
    given = [flag for name, flag in names.items() if getattr(arguments, name)]
    if given:
        raise FedkeelError(f"'--list' shows every recipe and runs none: leave '{given[0]}' out.")


def list_recipes(*, as_json: bool) -> int:
    from fedkeel.experiments.recipes import load, names

    recipes = [load(name) for name in names()]
    keys = ("name", "paper", "table", "caption", "protocol", "substitute")
    document = [{key: getattr(recipe, key) for key in keys} for recipe in recipes]
    # The name says paper and table already, and a terminal of 80 columns has no room to say it twice.
    table = Table(["paper/table", "what"], [(recipe.name, recipe.caption) for recipe in recipes])
    show([table], document, as_json=as_json)
    return 0
