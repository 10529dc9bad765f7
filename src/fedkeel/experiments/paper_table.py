"""Our numbers beside a paper's: the difference in every cell, and whether the methods come in the same order.

Numbers and text only; `fedkeel.experiments.reproduce` runs the cells.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import Any

from fedkeel.experiments.recipes import PublishedNumber, Recipe, RecipeColumn, RecipeRow
from fedkeel.experiments.tables import DASH

Cells = Mapping[tuple[str, str], Mapping[int, float]]  # ours by seed, by a cell's row and column


def derived(recipe: Recipe, run: Cells) -> Cells:
    """What was run and what follows from it, seed by seed: a group's average, and shares of another row's number."""
    found = dict(run)
    for row, column in product(recipe.rows, recipe.columns):
        cell = row.label, column.name
        if column.average:
            parts = [run.get((row.label, part.name), {}) for part in recipe.parts(column)]
            complete = [seed for seed in parts[0] if all(seed in part for part in parts)]
            found[cell] = {seed: statistics.fmean(part[seed] for part in parts) for seed in complete}
        elif column.relative_to:
            reference = run.get((column.relative_to, column.name), {})
            found[cell] = {s: value / reference[s] for s, value in run.get(cell, {}).items() if s in reference}
    return {cell: values for cell, values in found.items() if values}


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (headings, ["---"] * len(headings), *rows)]


@dataclass(frozen=True)
class PaperCell:
    """Ours by seed, as the paper counts (accuracies in %), beside what is published."""

    ours: Mapping[int, float]
    paper: PublishedNumber | None = None
    usual: int | None = None  # seeds of most cells: another number is shown

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.ours.values()) if self.ours else None

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.ours.values()) if len(self.ours) > 1 else None

    @property
    def published(self) -> float | None:
        return None if self.paper is None else self.paper.value

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        return None if self.mean is None or self.published is None else self.mean - self.published

    @property
    def decimals(self) -> int:
        return self.paper.decimals if self.paper is not None and self.paper.value is not None else 1

    def __str__(self) -> str:
        paper = DASH if self.paper is None else self.paper.text
        return self._text(paper, self._signed(self.difference))

    def from_reference(self, other: PaperCell) -> str:
        """Where levels say nothing: ours, its distance to another row with the same seeds, and the paper's to it."""
        common = [self.ours[seed] - other.ours[seed] for seed in self.ours if seed in other.ours]
        one, two = self.published, other.published
        published = None if one is None or two is None else one - two
        return self._text(self._signed(statistics.fmean(common) if common else None), self._signed(published))

    def _signed(self, distance: float | None) -> str:
        # Adding 0.0 turns the -0.0 of a rounded -0.04 into 0.0.
        return DASH if distance is None else f"{round(distance, self.decimals) + 0.0:+.{self.decimals}f}"

    def _text(self, *others: str) -> str:
        ours = DASH if self.mean is None else f"{self.mean:.{self.decimals}f}"
        spread = "" if self.std is None else f"±{self.std:.{self.decimals}f}"
        seeds = "" if not self.ours or self.usual in (None, len(self.ours)) else f" ({len(self.ours)})"
        return " / ".join((f"{ours}{spread}", *others)) + seeds

    def to_dict(self) -> dict[str, Any]:
        return {
            "ours": None if self.mean is None else {"mean": self.mean, "std": self.std, "seeds": sorted(self.ours)},
            "paper": None if self.paper is None else {"value": self.paper.value, "spread": self.paper.spread},
            "difference": self.difference,
        }


@dataclass(frozen=True)
class Reproduction:
    """A recipe's cells as far as they were asked for, and sentences about them."""

    recipe: Recipe
    rows: Sequence[RecipeRow]
    columns: Sequence[RecipeColumn]
    cells: Mapping[tuple[str, str], PaperCell]  # by row label and column name, as far as the paper's table has them
    seeds: Sequence[int]
    directory: Path
    marks: Sequence[str] = ()  # what makes this something else than the paper's experiment
    skipped: Sequence[str] = ()  # why cells were not run
    failures: Mapping[str, str] = field(default_factory=dict)  # why a run is missing, by the run's name

    @property
    def missing(self) -> list[str]:
        """The cells that have no number of ours though the paper's table has them."""
        return [f"{row}, {column}" for (row, column), cell in self.cells.items() if not cell.ours]

    @property
    def title(self) -> str:
        return f"{self.recipe.paper}, {self.recipe.table}: {self.recipe.caption}"

    @property
    def legend(self) -> str:
        seeds = "one seed" if len(self.seeds) == 1 else f"mean±standard deviation over {len(self.seeds)} seeds"
        reference = self.recipe.reference
        shown = f"ours / ahead of {reference}, here / in the paper" if reference else "ours / paper / difference"
        return f"{self.recipe.measure}: {shown}; ours is {seeds}."

    def tables(self) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """For each group of columns its name, the headings and the lines."""
        for group in dict.fromkeys(column.group for column in self.columns):
            columns = [column for column in self.columns if column.group == group]
            texts = {row.label: [self._text(row.label, column.name) for column in columns] for row in self.rows}
            lines = [[row, *cells] for row, cells in texts.items() if any(cells)]
            yield group, ["method", *(column.label for column in columns)], lines

    def _text(self, row: str, column: str) -> str:
        cell, reference = self.cells.get((row, column)), self.recipe.reference
        if cell is None or not reference:
            return str(cell or "")
        return cell.from_reference(self.cells.get((reference, column), PaperCell({})))

    def orders(self) -> dict[str, tuple[list[str], list[str], bool]]:
        """The methods of each column, or the columns of each row and group, highest first, in the paper and here, and
        whether no two of them are the other way round, as they would be printed."""
        ranked: dict[str, dict[str, PaperCell]] = {}
        for row, column in product(self.rows, self.columns):
            by_rows = self.recipe.order == "rows"
            where, name = (column.name, row.label) if by_rows else (f"{row.label} {column.group}".strip(), column.label)
            ranked.setdefault(where, {})[name] = self.cells.get((row.label, column.name), PaperCell({}))
        found = {}
        for where, cells in ranked.items():
            both = {
                name: (cell.published, round(cell.mean, cell.decimals))
                for name, cell in cells.items()
                if cell.mean is not None and cell.published is not None
            }
            if len(both) > 1:
                paper, ours = (sorted(both, key=lambda name: -both[name][place]) for place in (0, 1))
                same = all((a[0] - b[0]) * (a[1] - b[1]) >= 0 for a, b in combinations(both.values(), 2))
                found[where] = (paper, ours, same)
        return found

    def sentences(self) -> list[str]:
        """What the comparison with the paper says."""
        orders = self.orders()
        if not orders:
            return ["No two methods have both a published number and one of ours yet, so there is no order to compare."]
        alike = [where for where, (_, _, same) in orders.items() if same]
        best = sum(paper[0] == ours[0] for paper, ours, _ in orders.values())
        what, places = ("methods", "columns") if self.recipe.order == "rows" else ("columns", "rows")
        where = f" ({', '.join(alike)})" if alike else ""
        summary = (
            f"The order of {what} is the paper's in {len(alike)} of {len(orders)} {places}{where}; "
            f"the best one is the paper's in {best} of {len(orders)}."
        )
        others = [
            f"{where}: another order; the paper has {' > '.join(paper)}, ours is {' > '.join(ours)}."
            for where, (paper, ours, same) in orders.items()
            if not same
        ]
        return [summary, *others]

    def notes(self) -> list[str]:
        """What the paper says of this table or figure besides its numbers, and where the same is of ours."""
        return [
            *(f"The paper: {claim}" for claim in self.recipe.claims),
            *(f"A misprint: {misprint}" for misprint in self.recipe.misprints),
            *(f"Ours: diagnostics/{name}.json of each run." for name in self.recipe.diagnostics),
        ]

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", *(f"**{mark}**" for mark in self.marks), "", self.legend]
        for group, headings, rows in self.tables():
            lines += ["", f"**{group}**", ""] if group else [""]
            lines += markdown_table(headings, rows)
        notes = [*self.sentences(), *self.skipped, *(f"{name}: {why}" for name, why in self.failures.items())]
        return "\n".join([*lines, "", *(f"- {sentence}" for sentence in notes)])

    def to_dict(self) -> dict[str, Any]:
        recipe = self.recipe
        about = {name: getattr(recipe, name) for name in ("paper", "table", "caption", "measure", "protocol")}
        cells = [{"row": row, "column": name, **cell.to_dict()} for (row, name), cell in self.cells.items()]
        told = {name: list(getattr(self, name)) for name in ("marks", "seeds", "skipped")}
        failures = {"failures": dict(self.failures), "directory": str(self.directory)}
        return {"recipe": recipe.name, **about, "cells": cells, "sentences": self.sentences(), **told, **failures}
