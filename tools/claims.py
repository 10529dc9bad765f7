"""What the papers claim, as data, and whether it holds here.

    [[claim]]                                   # results/claims/<paper>.toml
    says = "HBN is ahead of batch norm under label shift."
    recipe = "hbn/table1"                       # or several: each gets a verdict of its own
    row = "HBN"
    over = ["BN"]                               # with several, it is ahead of every one of them
    columns = ["CIFAR-10"]                      # names or groups, with * for anything; by default all
    than = ["CIFAR-100"]                        # it is further ahead than in these columns
    margin = 0.2                                # it may be so far behind
    lower = true                                # less is ahead: seconds, gaps
    rule = "every-round"                        # by another rule than the recipe's: here, ahead all along
    tried = "..."                               # where it does not hold: what was looked at
    headline = true                             # what the paper is known for: in the README

`over = ["zero"]` is a claim of the row's own numbers: of their sign, or, with `than`, of some columns against others.

A claim holds where the row is ahead by the rule of `experiments.difference`, averaged over the columns, does not where
it is behind, and is undecided else. Columns with too few seeds wait until they have them, unless all have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any

from ledger import RESULTS

from fedkeel.config import read_table
from fedkeel.errors import FedkeelError
from fedkeel.experiments.difference import AHEAD, BEHIND, FEWEST, Difference
from fedkeel.experiments.paper_table import Cells
from fedkeel.experiments.recipes import Recipe

ZERO = "zero"  # in the place of another row
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"


@dataclass(frozen=True)
class Claim:
    """One row of a recipe is ahead of others in some of its columns; see above."""

    says: str
    recipe: str
    row: str
    over: tuple[str, ...]
    columns: tuple[str, ...] = ("*",)
    than: tuple[str, ...] = ()
    margin: float = 0.0
    lower: bool = False
    rule: str = ""
    tried: str = ""
    headline: bool = False

    def chosen(self, recipe: Recipe, patterns: Sequence[str]) -> list[str]:
        """The columns that the patterns name."""
        columns = [column for column in recipe.columns if not column.average]
        named = [c.name for c in columns if any(fnmatchcase(n, p) for n in (c.name, c.group) for p in patterns)]
        if not named:
            raise FedkeelError(f"'{self.says}' is of {', '.join(patterns)}, no column of '{recipe.name}'.")
        return named

    def gain(self, over: str, column: str, cells: Cells) -> dict[int, float]:
        """How far the row is ahead of another one in a column, by seed."""
        row = cells.get((self.row, column), {})
        other = dict.fromkeys(row, 0.0) if over == ZERO else cells.get((over, column), {})
        return {seed: (-1 if self.lower else 1) * (row[seed] - other[seed]) for seed in row.keys() & other.keys()}


@dataclass(frozen=True)
class Against:
    """A row minus another one: ours by seed and the paper's, in points, both means over the same columns."""

    over: str
    columns: tuple[str, ...]
    ours: Difference
    paper: float | None

    @property
    def verdict(self) -> str:
        return {AHEAD: HOLDS, BEHIND: FAILS}.get(self.ours.verdict, UNDECIDED)


@dataclass(frozen=True)
class Verdict:
    """What came out of a claim, which the `decisive` difference says: of those that fail, else of those that decide
    nothing, else of all, the smallest."""

    claim: Claim
    differences: tuple[Against, ...]

    @property
    def decisive(self) -> Against:
        ranks = (FAILS, UNDECIDED, HOLDS)
        return min(self.differences, key=lambda d: (ranks.index(d.verdict), bool(d.ours.by_seed), d.ours.mean))

    @property
    def text(self) -> str:
        return self.decisive.verdict


def claims_of(paper: str) -> list[Claim]:
    """Those of one paper, in its order; every recipe that a claim names makes one."""
    table, _ = read_table(RESULTS / "claims" / f"{paper}.toml", "list of claims")
    return [claim for entry in table["claim"] for claim in read_claim(entry)]


def read_claim(entry: Mapping[str, Any]) -> list[Claim]:
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    named = given.pop("recipe")
    return [Claim(recipe=recipe, **given) for recipe in ([named] if isinstance(named, str) else named)]


def judge(claim: Claim, recipe: Recipe, cells: Cells) -> Verdict:
    """Over the columns in which both rows have been run, with the seeds that they have in all of these; where there are
    columns with enough seeds for a verdict, over these alone."""
    for label in (claim.row, *claim.over):
        if label not in (*(row.label for row in recipe.rows), ZERO):
            raise FedkeelError(f"'{claim.says}' is of '{label}', no row of '{recipe.name}'.")
    return Verdict(claim, tuple(_difference(claim, other, recipe, cells) for other in claim.over))


def _difference(claim: Claim, over: str, recipe: Recipe, cells: Cells) -> Against:
    sides = [claim.chosen(recipe, patterns) for patterns in (claim.columns, claim.than) if patterns]
    gains = {name: claim.gain(over, name, cells) for side in sides for name in side}
    fewest = FEWEST if any(len(seeds) >= FEWEST for seeds in gains.values()) else 1
    run = [[name for name in side if len(gains[name]) >= fewest] for side in sides]
    seeds = sorted(set.intersection(*(set(gains[name]) for side in run for name in side))) if all(run) else []
    ours = {seed: claim.margin + _apart([[gains[name][seed] for name in side] for side in run]) for seed in seeds}
    # What is printed is by the paper's rule.
    printed = {} if claim.rule else {c: {0: n.value} for c, n in recipe.published.items() if n.value is not None}
    shown = run if all(run) else sides
    known = [[gain for name in side for gain in claim.gain(over, name, printed).values()] for side in shown]
    label = over + (f" {'+' if claim.lower else '-'} {claim.margin:g}" if claim.margin else "")
    label += f", more than in {', '.join(claim.than).replace('* ', '')}" if claim.than else ""
    return Against(label, tuple(run[0]), Difference(ours), claim.margin + _apart(known) if all(known) else None)


def _apart(sides: Sequence[Sequence[float]]) -> float:
    """The mean of the first side, less that of the second if there is one."""
    return fmean(sides[0]) - sum(map(fmean, sides[1:]))
