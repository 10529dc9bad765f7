"""The command that runs the papers' tables and figures: reproduce."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

from fedkeel.cli.interrupts import interruptible
from fedkeel.cli.parsing import add_options, examples, given_options
from fedkeel.cli.training import add_jobs, add_place, stopped, whole_jobs
from fedkeel.core.naming import visible
from fedkeel.errors import FedkeelError
from fedkeel.stopping import Stopped

if TYPE_CHECKING:
    from fedkeel.experiments.paper_table import Reproduction

CHANGEABLE = ("rounds", "model", "weights", "executor", "workers", "device", "precision", "checkpoint_every")


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "reproduce",
        usage="%(prog)s NAME... [options]",
        help="run a table or figure of a paper and print ours beside it",
        description="Run the cells of a paper's table or figure and print ours / paper / difference.\n"
        "The same command again continues: a cell that is done is never run again.",
        epilog=examples(
            [
                "fedkeel reproduce --list",
                "fedkeel reproduce hbn/table1 --root ./data --only CIFAR-10",
                "fedkeel reproduce fedwon/table1 --only FedBN FedWon Office-Caltech-10 --seeds 1",
                "fedkeel reproduce hbn/table6 --root ./data --scale 0.1       a quick look",
                "fedkeel reproduce hbn                                        all of a paper's tables and figures",
            ]
        ),
    )
    parser.add_argument(
        "recipes", nargs="*", metavar="NAME", help="recipes, see --list, a paper, or a TOML file of your own"
    )
    parser.add_argument("--list", action="store_true", help="every recipe and what it is")
    parser.add_argument("--root", metavar="DIR", help="folder that has the data sets in it (default: $FEDKEEL_DATA)")
    parser.add_argument("--only", nargs="+", default=[], metavar="LABEL", help="rows, groups or columns; * is anything")
    parser.add_argument("--seeds", metavar="N", help="how many, or which, like 0,1,5 (default: the recipe's)")
    parser.add_argument("--scale", metavar="X", help="share of the rounds, e.g. 0.1, for a quick look (default: 1)")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    add_jobs(parser)
    add_place(parser, "where the run directories go (default: runs/reproduce)")
    add_options(parser, only=CHANGEABLE)
    parser.set_defaults(act=reproduce_one)


def reproduce_one(arguments: argparse.Namespace) -> int:
    if arguments.list:
        return list_recipes(arguments)
    if not arguments.recipes:
        raise FedkeelError("'fedkeel reproduce' lacks NAME: 'fedkeel reproduce --list' shows what there is.")
    from fedkeel.experiments.recipes import load, matching

    recipes = [load(name) for name in dict.fromkeys(name for word in arguments.recipes for name in matching(word))]
    scale, jobs = share(arguments.scale), whole_jobs(arguments)
    root, arguments.root = arguments.root, None  # here it is the folder above the data sets, not that of one of them
    changes = given_options(arguments)

    from fedkeel.cli.console import ComparisonProgress
    from fedkeel.experiments.reproduce import reproduce_all
    from fedkeel.experiments.request import PLACE

    try:
        with interruptible(), ComparisonProgress(quiet=arguments.quiet) as progress:
            results = reproduce_all(
                recipes,
                root=root,
                only=arguments.only,
                seeds=arguments.seeds,
                scale=scale,
                directory=arguments.out or PLACE,
                jobs=jobs,
                observer=progress,
                **changes,
            )
    except Stopped:
        return stopped(shlex.join(["fedkeel", *arguments.typed]))
    if arguments.json:
        told = [result.to_dict() for result in results]
        print(json.dumps(told if len(told) > 1 else told[0], indent=1))
    elif arguments.markdown:
        print("\n".join(result.markdown() for result in results))
    else:
        for number, result in enumerate(results):
            print_reproduction(result, space=number > 0)
        print(f"The run directories are in {results[0].directory}/")
    return 1 if any(result.missing for result in results) else 0


def share(text: str | None) -> float:
    try:
        return 1.0 if text is None else float(text)
    except ValueError:
        raise FedkeelError(f"'scale' is '{text}': give a share of the rounds, like 0.1.") from None


def print_reproduction(result: Reproduction, space: bool) -> None:
    from fedkeel.cli.console import console, plain_table

    out = console(sys.stdout)

    def say(text: str) -> None:
        out.print(text, markup=False)

    say(f"\n{result.title}" if space else result.title)
    for mark in result.marks:
        say(f"*** {mark} ***")
    say(result.legend)
    for group, headings, rows in result.tables():
        if group:
            say(f"\n{group}")
        out.print(plain_table(headings, rows))
    for sentence in [*result.sentences(), *result.notes()]:
        say(f"- {sentence}")
    for mark in result.marks:
        say(f"*** {mark} ***")
    for sentence in [*result.skipped, *(f"{name} failed: {why}" for name, why in (result.failures or {}).items())]:
        print(f"fedkeel: {visible(sentence)}", file=sys.stderr)


def list_recipes(arguments: argparse.Namespace) -> int:
    from fedkeel.experiments.recipes import load, names

    recipes = [load(name) for name in names()]
    if arguments.json:
        keys = ("name", "paper", "table", "caption", "protocol", "substitute")
        print(json.dumps([{key: getattr(recipe, key) for key in keys} for recipe in recipes], indent=1))
        return 0
    from fedkeel.cli.console import console, plain_table

    # The name says paper and table already, and a terminal of 80 columns has no room to say it twice.
    rows = [(recipe.name, recipe.caption) for recipe in recipes]
    console(sys.stdout).print(plain_table(["paper/table", "what"], rows))
    return 0
