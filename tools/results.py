"""The page of results, rendered from the ledger and the papers' claims, and from nothing else.

    python tools/results.py                     # writes docs/results.md
    python tools/results.py --check             # says whether it is what the ledger says

What a reader must know of the data and of a table besides its numbers stands in `results/remarks.toml`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, mode
from typing import Any

from claims import Against, Claim, Verdict, claims_of, judge
from ledger import RESULTS, Ledger, Line

from fedkeel.config import read_table
from fedkeel.experiments.difference import FEWEST
from fedkeel.experiments.paper_table import Cells, PaperCell, Reproduction, derived, markdown_table
from fedkeel.experiments.recipes import PAPERS, PERCENT, Recipe, RecipeColumn, RecipeRow, load, names
from fedkeel.experiments.tables import DASH
from fedkeel.runs.summary import BEST_ROUND, RULES
from fedkeel.spec import parse

PAGE = RESULTS.parent / "docs" / "results.md"
SMALL = "-small"  # recipes for two cores
INTRODUCTION = """# Results

Every number below is rendered from the ledger, `results/*.jsonl`, in which a line is one cell of a paper's table, run
with one seed: `python tools/evidence.py` appends to it, and `python tools/results.py` makes this page.
[The papers' tables](reproduce.md) says how. What `fedkeel demo` prints is in the README.
"""
OVERVIEW = (
    "By how much a row is ahead of the nearest of its rivals, in points: as published, here at the papers' own sizes "
    "or nearly so, and here [for two cores](reproduce.md#at-a-size-for-two-cores). What decided each stands below."
)
CLAIMS = (
    "A difference is between two rows run with the same seed, averaged over the columns of the table that were run, "
    f"with its 95 % interval (Student's t). Above zero a claim holds, below it does not; across it, or with fewer than "
    f"{FEWEST} seeds, it is undecided."
)
ALL = (
    "Cells are ours / the paper's / the difference; ours is the mean and the standard deviation over seeds, with their "
    "number in brackets where it is not that of most cells."
)
STALE = "Lines of the ledger that are not what would be run today, and are in no table above."
COUNTED = {**RULES, BEST_ROUND: "the round that was best in the test itself"}


@dataclass(frozen=True)
class Table:
    """The lines of a recipe that count."""

    recipe: Recipe
    lines: Sequence[Line]

    def values(self, rule: str = "") -> Cells:
        """By row and column, of each seed; averages and shares of another row follow from the others."""
        found: dict[tuple[str, str], dict[int, float]] = {}
        for line in self.lines:
            value = line.results.get(rule or line.rule)
            if value is not None:
                found.setdefault((line.row, line.column), {})[line.seed] = value
        return derived(self.recipe, found)

    def reproduction(self) -> Reproduction:
        """The rows and columns of which something was run."""
        ours, recipe = self.values(), self.recipe
        usual = mode(sorted((len(values) for values in ours.values()), reverse=True)) if ours else 0
        return Reproduction(
            recipe=recipe,
            rows=[row for row in recipe.rows if any(label == row.label for label, _ in ours)],
            columns=[column for column in recipe.columns if any(name == column.name for _, name in ours)],
            cells={
                cell: PaperCell(ours.get(cell, {}), recipe.published.get(cell), usual)
                for row, column in product(recipe.rows, recipe.columns)
                if (cell := (row.label, column.name)) not in recipe.absent
            },
            seeds=range(usual),
            directory=Path(),
        )

    def cells(self) -> list[tuple[RecipeRow, RecipeColumn]]:
        """Those that were run."""
        run = {(line.row, line.column) for line in self.lines}
        return [(row, column) for row, column in self.recipe.cells() if (row.label, column.name) in run]


def tables_of(ledger: Ledger, own: Sequence[Recipe] = ()) -> tuple[list[Table], dict[Line, str]]:
    """What counts, in the order of the papers, and what is stale, with the reason."""
    used = {line.recipe for line in ledger}
    tables, stale = [], dict.fromkeys(ledger, "there is no such recipe any more")
    for recipe in [*(load(name) for name in names() if name in used), *own]:
        fresh, outdated = ledger.of(recipe)
        tables += [Table(recipe, fresh)] if fresh else []
        stale = {line: why for line, why in stale.items() if line.recipe != recipe.name} | outdated
    return tables, stale


# -- claims ----------------------------------------------------------------------------------------------------------
def verdicts(tables: Sequence[Table]) -> Iterator[tuple[Claim, Verdict | None]]:
    """Every claim of every paper; one whose rows were not run has no verdict."""
    run = {table.recipe.name: table for table in tables}
    for paper in PAPERS:
        claims = claims_of(paper)
        told = {claim.says for claim in claims if claim.recipe in run}
        for claim in claims:
            if claim.recipe in run:
                table = run[claim.recipe]
                verdict = judge(claim, table.recipe, table.values(claim.rule))
                fewest = len(table.recipe.seeds) if claim.recipe.endswith(SMALL) else 1  # no verdict half-way
                yield claim, verdict if len(verdict.decisive.ours.by_seed) >= fewest else None
            elif claim.says not in told:
                told.add(claim.says)
                yield claim, None


def claim_lines(tables: Sequence[Table], headlines: bool = False) -> list[list[str]]:
    """Every claim on one line, whatever recipes it was judged by; or those that the papers are known for."""
    judged = {claim: verdict for claim, verdict in verdicts(tables) if verdict}
    found: dict[tuple[str, str], list[Claim]] = {}
    for paper, name in PAPERS.items():
        for claim in claims_of(paper):
            found.setdefault((name, claim.says), []).append(claim)
    rows = []
    for said, claims in found.items():
        if headlines and not claims[0].headline:
            continue
        published = [d.paper for d in judge(claims[0], load(claims[0].recipe), {}).differences if d.paper is not None]
        row = [*said, f"{min(published):+.1f}" if published else DASH]
        for small in (False, True):
            there = [claim for claim in claims if claim.recipe.endswith(SMALL) == small]
            told = [f"**{v.text}** {by(c, v.decisive)} ({c.recipe})" for c in there if (v := judged.get(c))]
            row.append("; ".join(told) or ("not run" if there else DASH))
        rows.append(row)
    return rows


def by(claim: Claim, found: Against) -> str:
    """How far ahead, with the interval."""
    ours, digits = found.ours, digits_of(claim, found)
    spread = "" if math.isinf(ours.half_width) else f" ±{ours.half_width:.{digits}f}"
    return f"{ours.mean:+.{digits}f}{spread}" if ours.by_seed else DASH


def digits_of(claim: Claim, found: Against) -> int:
    """Of numbers that are no shares in %, more."""
    read = {c.reading.get("read", "accuracy") for c in load(claim.recipe).columns if c.name in found.columns}
    return 1 if read <= {*PERCENT} else 3


def claims_section(tables: Sequence[Table]) -> list[str]:
    rows, tried = [], []
    for claim, verdict in verdicts(tables):
        row = [PAPERS[claim.recipe.partition("/")[0]], claim.says]
        if verdict is None:
            rows.append([*row, DASH, DASH, DASH, DASH, "0", "**not run**"])
            continue
        found = verdict.decisive
        paper = DASH if found.paper is None else f"{found.paper:+.{digits_of(claim, found)}f}"
        seeds = str(len(found.ours.by_seed))
        rows.append([*row, where(verdict), found.over, paper, by(claim, found), seeds, f"**{verdict.text}**"])
        if claim.tried and verdict.text != "holds":
            tried.append(f"- *{claim.says}* ({claim.recipe}): {claim.tried}")
    headings = ["paper", "claim", "where", "ahead of", "by, in the paper", "by, here", "seeds", "verdict"]
    return ["## What the papers claim", "", CLAIMS, "", *markdown_table(headings, rows), "", *tried]


def where(verdict: Verdict) -> str:
    """The recipe, and its columns as far as they were run; of a group that was run whole, its name."""
    recipe, run = load(verdict.claim.recipe), verdict.decisive.columns
    whole = {column.group for column in recipe.columns if all(part.name in run for part in recipe.parts(column))}
    shown = dict.fromkeys(c.group if c.group in whole and c.group else c.name for c in recipe.columns if c.name in run)
    return f"{recipe.name}: {', '.join(shown) or DASH}"


# -- tables ----------------------------------------------------------------------------------------------------------
def section(table: Table, remarks: Mapping[str, Any]) -> list[str]:
    """A table with what it was run with, and what it must not be taken for."""
    recipe, shown = table.recipe, table.reproduction()
    lines = [f"### {shown.title}", ""]
    lines += [f"**Substitute**: {recipe.substitute}", ""] if recipe.substitute else []
    seeds = "one seed" if len(shown.seeds) == 1 else f"{len(shown.seeds)} seeds"
    rules = dict.fromkeys(COUNTED.get(line.rule, line.rule) for line in table.lines)
    lines.append(f"`{command(table)}`. {recipe.measure}; {' or '.join(rules)}; {seeds}. {machines(table.lines)}")
    for group, headings, rows in shown.tables():
        lines += ["", *([f"**{group}**", ""] if group else []), *markdown_table(headings, rows)]
    data = dict.fromkeys(parse(recipe.config(*cell).data).name for cell in table.cells())
    notes = [*remarks["recipes"].get(recipe.name, ()), *other_rules(table)]
    notes += [remarks["data"][name] for name in data if name in remarks["data"]]
    notes += [f"A misprint: {text}" for text in recipe.misprints]
    diverged = {f"{line.row}, {line.column} diverged with seed {line.seed}." for line in table.lines if line.diverged}
    return [*lines, "", *(f"- {note}" for note in [*notes, *sorted(diverged)])]


def other_rules(table: Table) -> Iterator[str]:
    """By another rule the same runs may say something else: the mean distance of all cells to the paper by each."""
    run, told = {(row.label, column.name) for row, column in table.cells()}, []
    for rule in (*RULES, BEST_ROUND):
        values = [PaperCell(v, table.recipe.published.get(c)) for c, v in table.values(rule).items() if c in run]
        known = [cell.difference for cell in values if cell.difference is not None]
        told += [f"{fmean(known):+.1f} by {COUNTED[rule]}"] if known else []
    if told and not table.recipe.substitute:
        yield f"Ours minus the paper's, the mean of all cells: {', '.join(told)}."


def command(table: Table) -> str:
    """What runs these cells."""
    recipe, cells = table.recipe, table.cells()
    wanted = list(dict.fromkeys(row.label for row, _ in cells))
    groups = dict.fromkeys(column.group or column.label for _, column in cells)
    every = dict.fromkeys(column.group or column.label for column in recipe.columns if not column.average)
    words = [*(wanted if len(wanted) < len(recipe.rows) else ()), *(groups if len(groups) < len(every) else ())]
    only = " --only " + " ".join(f"'{word}'" for word in words) if words else ""
    seeds = sorted({line.seed for line in table.lines})
    count = f" --seeds {','.join(map(str, seeds))}{',' if len(seeds) == 1 else ''}"
    return f"fedkeel reproduce {recipe.name}{only}{'' if seeds == sorted(recipe.seeds) else count}"


def machines(lines: Sequence[Line]) -> str:
    """Where and when."""
    kinds = dict.fromkeys(f"{line.device}, torch {line.torch}" for line in lines)
    days = sorted({line.date for line in lines})
    period = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{'; '.join(kinds)}; {period}; {fmean(line.seconds for line in lines):.0f} s a run."


def stale_section(stale: Mapping[Line, str]) -> list[str]:
    counted: dict[tuple[str, str, str], int] = {}
    for line, why in stale.items():
        counted[line.recipe, line.row, why] = counted.get((line.recipe, line.row, why), 0) + 1
    rows = [[recipe, row, str(count), why] for (recipe, row, why), count in sorted(counted.items())]
    return ["## Stale", "", STALE, "", *markdown_table(["recipe", "row", "lines", "why"], rows)]


def page(ledger: Ledger, own: Sequence[Recipe] = ()) -> str:
    """The whole of it, in Markdown."""
    remarks, _ = read_table(RESULTS / "remarks.toml", "file of remarks")
    tables, stale = tables_of(ledger, own)
    headings = ["paper", "claim", "published", "here, the papers' sizes", "here, two cores"]
    parts = [INTRODUCTION.splitlines()]
    parts += [["## Every claim", "", OVERVIEW, "", *markdown_table(headings, claim_lines(tables))]]
    parts += [claims_section(tables), ["## All rounds", "", ALL], *(section(table, remarks) for table in tables)]
    parts += [stale_section(stale)] if stale else []
    return "\n".join("\n".join(part).rstrip() + "\n" for part in parts)


def main() -> int:
    text = page(Ledger())
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
