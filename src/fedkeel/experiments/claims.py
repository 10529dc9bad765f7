"""What the papers claim, as data, and whether it holds here.

    [[claim]]                                   # recipes/<paper>/claims.toml
    says = "HBN is ahead of batch norm under label shift."
    recipe = "hbn/table1"                       # or several: each gets a verdict of its own
    row = "HBN"
    over = ["BN"]                               # with several, it is ahead of every one of them
    columns = ["CIFAR-10"]                      # names or groups, with * for anything; by default all
    tried = "..."                               # where it does not hold: what was looked at

A claim holds where the row is ahead by the rule of `experiments.difference`, averaged over the columns, does not where
it is behind, and is undecided else. Columns with too few seeds wait until they have them, unless all have.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from importlib import resources
from statistics import fmean
from typing import Any

from fedkeel.errors import FedkeelError, nearest
from fedkeel.experiments import recipes
from fedkeel.experiments.difference import AHEAD, BEHIND, FEWEST, Difference
from fedkeel.experiments.paper_table import Cells
from fedkeel.experiments.recipes import Recipe, RecipeColumn

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"


@dataclass(frozen=True)
class Claim:
    """One row of a recipe is ahead of others in some of its columns."""

    says: str
    recipe: str
    row: str
    over: tuple[str, ...]
    columns: tuple[str, ...] = ("*",)
    tried: str = ""

    def chosen(self, recipe: Recipe) -> list[RecipeColumn]:
        named = [
            column
            for column in recipe.columns
            if not column.average
            if any(fnmatchcase(name, pattern) for name in (column.name, column.group) for pattern in self.columns)
        ]
        if not named:
            raise FedkeelError(f"'{self.says}' is of {', '.join(self.columns)}, no column of '{recipe.name}'.")
        return named


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
        """Ahead of each: holds. Behind one: does not."""
        return self.decisive.verdict


def claims_of(paper: str) -> list[Claim]:
    """Those of one paper, in its order; every recipe that a claim names makes one."""
    text = resources.files(recipes.__name__).joinpath(paper, "claims.toml").read_text(encoding="utf-8")
    return [claim for entry in tomllib.loads(text).get("claim", ()) for claim in read_claim(entry, paper)]


def read_claim(entry: Mapping[str, Any], paper: str) -> list[Claim]:
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    keys = [field.name for field in fields(Claim)]
    for key in given:
        if key not in keys:
            raise FedkeelError(f"A claim of '{paper}' has no '{key}': {nearest(key, keys)}")
    for key in ("says", "recipe", "row", "over"):
        if not given.get(key):
            raise FedkeelError(f"A claim of '{paper}' lacks '{key}': it has {', '.join(given) or 'nothing'}.")
    named = given.pop("recipe")
    return [Claim(recipe=recipe, **given) for recipe in ([named] if isinstance(named, str) else named)]


def judge(claim: Claim, recipe: Recipe, cells: Cells) -> Verdict:
    """Over the columns in which both rows have been run, with the seeds that they have in all of these; where there are
    columns with enough seeds for a verdict, over these alone."""
    labels = [row.label for row in recipe.rows]
    for label in (claim.row, *claim.over):
        if label not in labels:
            raise FedkeelError(f"'{claim.says}' is of '{label}', no row of '{recipe.name}': {nearest(label, labels)}")
    columns = [column.name for column in claim.chosen(recipe)]
    return Verdict(claim, tuple(_difference(claim.row, other, columns, recipe, cells) for other in claim.over))


def _difference(row: str, over: str, columns: Sequence[str], recipe: Recipe, cells: Cells) -> Against:
    pairs = {name: (cells.get((row, name), {}), cells.get((over, name), {})) for name in columns}
    common = {name: a.keys() & b.keys() for name, (a, b) in pairs.items()}
    fewest = FEWEST if any(len(seeds) >= FEWEST for seeds in common.values()) else 1
    pairs = {name: pair for name, pair in pairs.items() if len(common[name]) >= fewest}
    seeds = sorted(set.intersection(*(set(common[name]) for name in pairs))) if pairs else []
    ours = {seed: fmean(a[seed] - b[seed] for a, b in pairs.values()) for seed in seeds}
    numbers = [(recipe.published.get((row, name)), recipe.published.get((over, name))) for name in pairs or columns]
    known = [a.value - b.value for a, b in numbers if a and b and a.value is not None and b.value is not None]
    return Against(over, tuple(pairs), Difference(ours), fmean(known) if known else None)
