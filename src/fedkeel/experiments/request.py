"""What of a paper's tables is asked for: which cells and seeds, with which data, and what is changed in the runs."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fedkeel.config import MACHINE_OPTIONS, Config
from fedkeel.errors import FedkeelError, nearest
from fedkeel.experiments.jobs import JobsObserver
from fedkeel.experiments.recipes import Recipe, RecipeColumn, RecipeRow
from fedkeel.experiments.rows import read_seeds
from fedkeel.options import described

PLACE = "runs/reproduce"


@dataclass(frozen=True)
class Request:
    """What of the recipes is run, and how."""

    root: str | Path | None = None  # the folder that has the data sets in it, in place of $FEDKEEL_DATA
    only: Sequence[str] = ()  # rows, groups or columns by their labels, with `*` for anything; without any, all
    seeds: int | str | Sequence[int] | None = None  # how many of the recipe's, or which; by default all of them
    scale: float = 1.0  # share of the rounds to run, for a quick look
    directory: str | Path = PLACE  # of the run directories
    jobs: int | None = None  # runs at the same time, as in `compare`
    observer: JobsObserver | None = None  # is told how it is going
    changes: Mapping[str, Any] = field(default_factory=dict)  # options of all runs in place of the recipe's

    def __post_init__(self) -> None:
        if not isinstance(self.only, Sequence):
            raise FedkeelError(f"'only' is {described(self.only)}: give a list of labels, like ['HBN', 'CIFAR-10'].")
        if not isinstance(self.scale, int | float) or not 0 < self.scale <= 1:
            raise FedkeelError(
                f"'scale' is {described(self.scale)}: give a share of the rounds, above 0 and at most 1."
            )

    def changed(self, config: Config) -> Config:
        """What becomes of a cell's configuration."""
        config = config.replace(**self.changes)
        return config.replace(rounds=max(1, round(config.rounds * self.scale)))

    def marks(self, recipe: Recipe) -> list[str]:
        """Whatever makes the numbers something else than the paper's."""
        found = [f"SUBSTITUTE: {recipe.substitute}"] if recipe.substitute else []
        if self.scale != 1:
            share = f"{100 * self.scale:g} %"
            found.append(f"QUICK LOOK: every run has {share} of its rounds, so these are not reproduced numbers.")
        changed = [f"{name}={value}" for name, value in self.changes.items() if name not in MACHINE_OPTIONS]
        if changed:
            found.append(f"CHANGED: {', '.join(changed)}, where the paper's setting is another.")
        return found


def choose_seeds(recipe: Recipe, seeds: int | str | Sequence[int] | None) -> list[int]:
    """The recipe's seeds, the first of them, or those given; when more are asked for, it goes on with 0, 1, ..."""
    if seeds is None:
        return list(recipe.seeds)
    if isinstance(seeds, str) and "," not in seeds:
        seeds = len(read_seeds(seeds))
    if isinstance(seeds, int):
        others = [seed for seed in read_seeds(seeds) if seed not in recipe.seeds]
        return [*recipe.seeds, *others][:seeds]
    return read_seeds(seeds)


def select(
    recipe: Recipe, only: Sequence[str], recipes: Sequence[Recipe] = ()
) -> tuple[list[RecipeRow], list[RecipeColumn]]:
    """The rows and columns that the patterns name. Where none names a row, every row; likewise for columns.

    A pattern that names nothing here must name something in another of the `recipes`.
    """
    rows: list[RecipeRow] = []
    columns: list[RecipeColumn] = []
    for pattern in [only] if isinstance(only, str) else only:
        some_rows, some_columns = _named(pattern, recipe)
        if not any(any(_named(pattern, other)) for other in (recipe, *recipes)):
            known = {row.label for row in recipe.rows} | {n for c in recipe.columns for n in (c.name, c.group, c.label)}
            raise FedkeelError(
                f"'{pattern}' is no row and no column of '{recipe.name}': {nearest(pattern, known - {''})}"
            )
        rows += some_rows
        columns += some_columns
    return (
        [row for row in recipe.rows if row in rows or not rows],
        [column for column in recipe.columns if column in columns or not columns],
    )


def _named(pattern: str, recipe: Recipe) -> tuple[list[RecipeRow], list[RecipeColumn]]:
    def matches(*labels: str) -> bool:
        return any(label and fnmatchcase(label.lower(), pattern.lower()) for label in labels)

    return (
        [row for row in recipe.rows if matches(row.label)],
        [column for column in recipe.columns if matches(column.name, column.group, column.label)],
    )


@contextmanager
def data_at(root: str | Path | None) -> Iterator[None]:
    """While inside, data sets are looked for in `root`. A run's configuration does not say where they lie."""
    if root is None:
        yield
        return
    if not Path(root).is_dir():
        raise FedkeelError(f"The root '{root}' is not a folder: give the one that has the data sets in it.")
    before = os.environ.get("FEDKEEL_DATA")
    os.environ["FEDKEEL_DATA"] = str(Path(root).absolute())
    try:
        yield
    finally:
        del os.environ["FEDKEEL_DATA"]
        if before is not None:
            os.environ["FEDKEEL_DATA"] = before
