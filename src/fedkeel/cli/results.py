"""What the ledger says: which of the papers' claims hold here, and our numbers beside theirs.

examples:
  fedkeel results                                 the claims, and how much of each table has been run
  fedkeel results --out docs/results.md           the whole page
  fedkeel results --check docs/results.md         is the page what the ledger says?
"""

from __future__ import annotations

from pathlib import Path

from fedkeel.cli.terminal.output import Line, Table, show
from fedkeel.cli.terminal.parsing import Arguments, Parser
from fedkeel.errors import FedkeelError

HELP = "which of the papers' claims hold, from the ledger"
USAGE = "[FILE.toml...] [options]"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("recipes", nargs="*", metavar="FILE.toml", help="recipes of your own whose lines are there too")
    parser.add_argument("--ledger", default="results", metavar="DIR", help="folder of the ledger (default: results)")
    parser.add_argument("--out", metavar="FILE.md", help="write the page of results")
    parser.add_argument("--check", metavar="FILE.md", help="compare a page with the ledger; exits with 2 if it differs")
    parser.add_shared("--json")


def text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise FedkeelError(
            f"The page '{path}' cannot be read ({error}): write it with 'fedkeel results --out'."
        ) from error


def run(arguments: Arguments) -> int:
    if not Path(arguments.ledger).is_dir():
        raise FedkeelError(f"There is no ledger in '{arguments.ledger}': 'fedkeel reproduce NAME --ledger' makes one.")

    from fedkeel.experiments import results_page
    from fedkeel.experiments.ledger import Ledger
    from fedkeel.experiments.recipes import load
    from fedkeel.files import explained

    ledger, own = Ledger(arguments.ledger), [load(name) for name in arguments.recipes]
    if arguments.out or arguments.check:
        text = results_page.page(ledger, own)
        if arguments.out:
            with explained(Path(arguments.out), ""):
                Path(arguments.out).write_text(text, encoding="utf-8")
            print(arguments.out)
        elif text_of(arguments.check) != text:
            raise FedkeelError(
                f"'{arguments.check}' is not what the ledger says: write it with 'fedkeel results --out'."
            )
        return 0
    blocks, stale = results_page.all_blocks(ledger, own)
    claims = results_page.claim_rows(results_page.verdicts(blocks))
    runs = [[b.recipe.name, "all" if b.is_whole else "a part", str(len(b.lines))] for b in blocks]
    lines: list[Line] = [
        Table(results_page.CLAIM_HEADINGS, claims),
        Table(["recipe", "rounds", "cells in the ledger, each with one seed"], runs),
    ]
    lines += [f"{len(stale)} lines are stale: 'fedkeel results --out FILE.md' says why."] if stale else []
    document = {
        "claims": [dict(zip(results_page.CLAIM_HEADINGS, row, strict=True)) for row in claims],
        "stale": [
            {**{name: getattr(line, name) for name in ("recipe", "row", "column", "seed")}, "why": why}
            for line, why in stale.items()
        ],
    }
    show(lines, document, as_json=arguments.json)
    return 0
