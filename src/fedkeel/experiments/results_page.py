"""The page of results, `docs/results.md`: rendered from the ledger and the papers' claims, and from nothing else.

What a reader must know of the data and of a table besides its numbers stands in `remarks.toml` beside the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, mode
from typing import Any

from fedkeel.config import read_table
from fedkeel.experiments.claims import Against, Claim, Verdict, claims_of, judge
from fedkeel.experiments.difference import FEWEST
from fedkeel.experiments.ledger import Ledger, Line
from fedkeel.experiments.paper_table import Cells, PaperCell, Reproduction, derived, markdown_table
from fedkeel.experiments.recipes import PAPERS, PERCENT, Recipe, RecipeColumn, RecipeRow, load, names
from fedkeel.experiments.tables import DASH
from fedkeel.runs.summary import BEST_ROUND, RULES
from fedkeel.spec import parse

REMARKS = "remarks.toml"
SMALL = "-small"  # recipes for two cores
INTRODUCTION = """# Results

Every number below is rendered from the ledger, `results/*.jsonl`, in which a line is one cell of a paper's table, run
with one seed: `fedkeel reproduce NAME --ledger` appends to it, and `fedkeel results --out docs/results.md` makes this
page. [The papers' tables](reproduce.md) says how. What `fedkeel demo` prints is in the README.
"""
COUNTED = {**RULES, BEST_ROUND: "the round that was best in the test itself"}

CLAIM_HEADINGS = ["paper", "claim", "where", "ahead of", "by, in the paper", "by, here", "seeds", "verdict"]


@dataclass(frozen=True)
class Block:
    """The lines of a recipe that belong together: with the same changes, and with all rounds or as many."""

    recipe: Recipe
    changes: Mapping[str, Any]
    lines: Sequence[Line]

    @property
    def is_whole(self) -> bool:
        return all(line.is_whole for line in self.lines)

    def values(self, rule: str | None = None) -> Cells:
        """By row and column, of each seed; averages and shares of another row follow from the others."""
        found: dict[tuple[str, str], dict[int, float]] = {}
        for line in self.lines:
            value = line.value if rule is None else line.results.get(rule)
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


def blocks_of(recipe: Recipe, lines: Sequence[Line]) -> list[Block]:
    """Those with the recipe's rounds first, and of each number of rounds those without changes."""
    groups: dict[tuple[bool, int, bool, str], list[Line]] = {}
    for line in lines:
        key = (not line.is_whole, -line.rounds, bool(line.changes), str(sorted(line.changes.items())))
        groups.setdefault(key if not line.is_whole else (False, 0, *key[2:]), []).append(line)
    return [Block(recipe, group[0].changes, group) for _, group in sorted(groups.items(), key=lambda item: item[0])]


def all_blocks(ledger: Ledger, own: Sequence[Recipe] = ()) -> tuple[list[Block], dict[Line, str]]:
    """What counts, in the order of the papers, and what is stale, with the reason."""
    used = {line.recipe for line in ledger}
    recipes = [*(load(name) for name in names() if name in used), *own]
    blocks: list[Block] = []
    stale: dict[Line, str] = dict.fromkeys(ledger, "there is no such recipe any more")
    for recipe in recipes:
        fresh, outdated = ledger.of(recipe)
        blocks += blocks_of(recipe, fresh)
        stale = {line: why for line, why in stale.items() if line.recipe != recipe.name} | outdated
    return blocks, stale


def verdicts(blocks: Sequence[Block]) -> Iterator[tuple[Claim, Verdict | None]]:
    """Every claim of every paper, from lines without changes if there are any; one whose rows were not run has no
    verdict."""
    whole = {block.recipe.name: block for block in reversed(blocks) if block.is_whole}
    for paper in PAPERS:
        claims = claims_of(paper)
        run = {claim.says for claim in claims if claim.recipe in whole}
        for claim in claims:
            if claim.recipe in whole:
                block = whole[claim.recipe]
                verdict = judge(claim, block.recipe, block.values(claim.rule or None))
                fewest = len(block.recipe.seeds) if claim.recipe.endswith(SMALL) else 1  # no verdict half-way
                yield claim, verdict if len(verdict.decisive.ours.by_seed) >= fewest else None
            elif claim.says not in run:
                run.add(claim.says)
                yield claim, None


def page(ledger: Ledger, own: Sequence[Recipe] = ()) -> str:
    """The whole of it, in Markdown."""
    remarks = read_remarks(ledger.folder)
    blocks, stale = all_blocks(ledger, own)
    sections = {
        f"## All rounds\n\n{ALL}": [block for block in blocks if block.is_whole],
        f"## Quick looks\n\n{QUICK}": [block for block in blocks if not block.is_whole],
    }
    parts = [INTRODUCTION, overview(blocks), claims_table(blocks)]
    for heading, shown in sections.items():
        parts += [heading, *(section(block, remarks) for block in shown)] if shown else []
    if stale:
        parts.append(stale_section(stale))
    return "\n".join(part.rstrip() + "\n" for part in parts)


ALL = (
    "Cells are ours / the paper's / the difference; ours is the mean and the standard deviation over seeds, with their "
    "number in brackets where it is not that of most cells."
)
QUICK = "With another number of rounds than the paper's: where methods stand early on, and no reproduced numbers."


OVERVIEW = (
    "By how much a row is ahead of the nearest of its rivals, in points: as published, here at the papers' own sizes "
    "or nearly so, and here [for two cores](reproduce.md#at-a-size-for-two-cores). What decided each stands below."
)


def overview(blocks: Sequence[Block]) -> str:
    """Every claim on one line, whatever recipes it was judged by."""
    headings = ["paper", "claim", "published", "here, the papers' sizes", "here, two cores"]
    return "\n".join(["## Every claim", "", OVERVIEW, "", *markdown_table(headings, claim_lines(blocks))])


def headlines(blocks: Sequence[Block]) -> list[str]:
    """The claim that each paper is known for, for the README: the lines of a table."""
    known = {claim.says for paper in PAPERS for claim in claims_of(paper) if claim.headline}
    headings = ["paper", "its claim", "published", "here, at the paper's size", "here, on two cores"]
    return markdown_table(headings, [row for row in claim_lines(blocks) if row[1] in known])


def claim_lines(blocks: Sequence[Block]) -> list[list[str]]:
    judged = {claim: verdict for claim, verdict in verdicts(blocks) if verdict}
    found: dict[tuple[str, str], list[Claim]] = {}
    for paper, name in PAPERS.items():
        for claim in claims_of(paper):
            found.setdefault((name, claim.says), []).append(claim)
    rows = []
    for said, claims in found.items():
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


def claims_table(blocks: Sequence[Block]) -> str:
    found = list(verdicts(blocks))
    lines = [
        "## What the papers claim",
        "",
        "A difference is between two rows run with the same seed, averaged over the columns of the table that were "
        "run, with its 95 % interval (Student's t). Above zero a claim holds, below it does not; across it, or with "
        f"fewer than {FEWEST} seeds, it is undecided.",
        "",
        *markdown_table(CLAIM_HEADINGS, [[*row[:-1], f"**{row[-1]}**"] for row in claim_rows(found)]),
    ]
    tried = [verdict for _, verdict in found if verdict and verdict.claim.tried]
    lines += ["", *(f"- *{v.claim.says}* ({v.claim.recipe}): {v.claim.tried}" for v in tried if v.text != "holds")]
    return "\n".join(lines)


def claim_rows(judged: Iterable[tuple[Claim, Verdict | None]]) -> list[list[str]]:
    """A line for each claim, under `CLAIM_HEADINGS`."""
    rows = []
    for claim, verdict in judged:
        said = [PAPERS[claim.recipe.partition("/")[0]], claim.says]
        if verdict is None:
            rows.append([*said, DASH, DASH, DASH, DASH, "0", "not run"])
            continue
        found = verdict.decisive
        digits = digits_of(claim, found)
        paper = DASH if found.paper is None else f"{found.paper:+.{digits}f}"
        seeds = str(len(found.ours.by_seed))
        rows.append([*said, where(verdict), found.over, paper, by(claim, found), seeds, verdict.text])
    return rows


def where(verdict: Verdict) -> str:
    """The recipe, and its columns as far as they were run; of a group that was run whole, its name."""
    recipe, run = load(verdict.claim.recipe), verdict.decisive.columns
    whole = {column.group for column in recipe.columns if all(part.name in run for part in recipe.parts(column))}
    shown = dict.fromkeys(c.group if c.group in whole and c.group else c.name for c in recipe.columns if c.name in run)
    return f"{recipe.name}: {', '.join(shown) or DASH}"


def section(block: Block, remarks: Mapping[str, Any]) -> str:
    """A table with what it was run with, and what it must not be taken for."""
    recipe, table = block.recipe, block.reproduction()
    lines = [f"### {table.title}", ""]
    lines += [f"**Substitute**: {recipe.substitute}", ""] if recipe.substitute else []
    if block.changes:
        lines += [f"**Changed**: {', '.join(f'{k}={v}' for k, v in block.changes.items())}.", ""]
    seeds = "one seed" if len(table.seeds) == 1 else f"{len(table.seeds)} seeds"
    rules = dict.fromkeys(COUNTED.get(line.rule, line.rule) for line in block.lines)
    lines.append(f"`{command(block)}`. {recipe.measure}; {' or '.join(rules)}; {seeds}. {machines(block.lines)}")
    for group, headings, rows in table.tables():
        lines += ["", *([f"**{group}**", ""] if group else []), *markdown_table(headings, rows)]
    data = dict.fromkeys(parse(recipe.config(*cell).data).name for cell in _run_cells(block))
    notes = [*remarks.get("recipes", {}).get(recipe.name, ()), *_other_rules(block)]
    notes += [remarks["data"][name] for name in data if name in remarks.get("data", {})]
    notes += [f"A misprint: {text}" for text in recipe.misprints]
    notes += sorted(
        {f"{line.row}, {line.column} diverged with seed {line.seed}." for line in block.lines if line.diverged}
    )
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)])


def _run_cells(block: Block) -> list[tuple[RecipeRow, RecipeColumn]]:
    run = {(line.row, line.column) for line in block.lines}
    return [(row, column) for row, column in block.recipe.cells() if (row.label, column.name) in run]


def _other_rules(block: Block) -> Iterator[str]:
    """By another rule the same runs may say something else: the mean distance of all cells to the paper by each."""
    recipe, told = block.recipe, []
    for rule in (*RULES, BEST_ROUND):
        cells = [
            PaperCell(values, recipe.published.get(cell)).difference
            for cell, values in block.values(rule).items()
            if any((line.row, line.column) == cell for line in block.lines)
        ]
        known = [difference for difference in cells if difference is not None]
        if known:
            told.append(f"{fmean(known):+.1f} by {COUNTED[rule]}")
    if told and not recipe.substitute:
        yield f"Ours minus the paper's, the mean of all cells: {', '.join(told)}."


def command(block: Block) -> str:
    """What runs these cells."""
    recipe = block.recipe
    cells = _run_cells(block)
    wanted = list(dict.fromkeys(row.label for row, _ in cells))
    groups = dict.fromkeys(column.group or column.label for _, column in cells)
    every = dict.fromkeys(column.group or column.label for column in recipe.columns if not column.average)
    words = [*(wanted if len(wanted) < len(recipe.rows) else ()), *(groups if len(groups) < len(every) else ())]
    only = " --only " + " ".join(f"'{word}'" for word in words) if words else ""
    seeds = sorted({line.seed for line in block.lines})
    usual = seeds == sorted(recipe.seeds)
    count = "" if usual else f" --seeds {','.join(map(str, seeds))}{',' if len(seeds) == 1 else ''}"
    rounds = {line.rounds for line in block.lines}
    share = "" if block.is_whole else f" --scale {block.lines[0].rounds / block.lines[0].of:g}"
    share = f" --rounds {max(rounds)}" if any(line.rounds > line.of for line in block.lines) else share
    changes = "".join(f" --{k.replace('_', '-')} {v}" for k, v in block.changes.items())
    return f"fedkeel reproduce {recipe.name}{only}{count}{share}{changes} --ledger"


def machines(lines: Sequence[Line]) -> str:
    """Where and when."""
    kinds = dict.fromkeys(f"{line.device}, torch {line.torch}" for line in lines)
    days = sorted({line.date for line in lines})
    period = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    seconds = fmean({(line.row, line.column, line.seed): line.seconds for line in lines}.values())
    return f"{'; '.join(kinds)}; {period}; {seconds:.0f} s a run."


def stale_section(stale: Mapping[Line, str]) -> str:
    counted: dict[tuple[str, str, str], int] = {}
    for line, why in stale.items():
        counted[line.recipe, line.row, why] = counted.get((line.recipe, line.row, why), 0) + 1
    rows = [[recipe, row, str(count), why] for (recipe, row, why), count in sorted(counted.items())]
    text = "Lines of the ledger that are not what would be run today, and are in no table above."
    return "\n".join(["## Stale", "", text, "", *markdown_table(["recipe", "row", "lines", "why"], rows)])


def read_remarks(folder: Path) -> dict[str, Any]:
    path = folder / REMARKS
    return read_table(path, "file of remarks")[0] if path.exists() else {}
