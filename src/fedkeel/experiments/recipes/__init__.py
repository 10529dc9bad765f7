"""Every table and figure of the papers as data: what was run, with which settings, and what was published.

A recipe is a TOML file, `recipes/<paper>/<table1|figure3|section5>.toml`, the last for what the text alone has. Its
rows are methods and its columns settings, also where the paper prints them the other way round. A cell's configuration
is made of what the recipe, the column's group, the column and the row set, in this order; `on` in a row is for one
group or column alone. A variant says which recipe it is `like`, and only what differs. `fedkeel.experiments.reproduce`
runs them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from fedkeel.config import Config, from_dict
from fedkeel.errors import FedkeelError, nearest
from fedkeel.options import described

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAPERS = {"greg": "GReg", "hbn": "HBN", "fedwon": "FedWon", "fedcoda": "FedCoda", "univarfl": "UniVarFL"}
PAPERS |= {"fedkeel": "Fedkeel"}  # what is ours and no paper's

# What the figures show besides accuracy, and a few tables too: diagnostics of `fedkeel.analysis`.
DIAGNOSTICS = (
    *("bn-statistics", "calibration", "gradient-norms", "label-distribution", "loss-gap", "nmi", "probability-floor"),
    *("prototype-similarity", "representation-divergence", "singular-values", "statistics-divergence", "tsne"),
)

PERCENT = ("accuracy", "samples", "unseen", "calibration")  # readings whose differences are points

READINGS = ("accuracy", "samples", "unseen", "seconds", *DIAGNOSTICS)
LISTS = ("seeds", "columns", "rows", "decisions", "misprints", "claims", "diagnostics")
NOT_A_CELL = "-"  # the paper's table has no such cell, and it is not run
NOT_PRINTED = "?"  # the paper shows it in a figure, or not at all

READ = ("read", "at", "domain", "statistics")


@dataclass(frozen=True)
class PublishedNumber:
    """A number as it is printed: its text, value and spread. `N/A` has neither value nor spread."""

    text: str
    value: float | None
    spread: float | None = None

    @staticmethod
    def of(text: str) -> PublishedNumber:
        match = re.fullmatch(r"(-?\d+(?:\.\d+)?)(?:±(\d+(?:\.\d+)?))?", text)
        if match is None:
            if text != "N/A":
                raise FedkeelError(f"'{text}' is not a published number: write it like 75.8, 75.8±0.3 or N/A.")
            return PublishedNumber(text, None)
        return PublishedNumber(text, float(match[1]), float(match[2]) if match[2] else None)

    @property
    def decimals(self) -> int:
        """Digits after the point, as printed."""
        return len(self.text.partition("±")[0].partition(".")[2])


@dataclass(frozen=True)
class RecipeColumn:
    """A setting: data, partition, unseen domain, batch size, ..."""

    label: str
    group: str = ""  # heading over several columns, with options of its own
    average: bool = False  # the mean of the group's other columns
    relative_to: str = ""  # the row by whose number the others are divided
    reading: Mapping[str, str] = field(default_factory=dict)  # of a run's result, see `Recipe.reading`
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.group} {self.label}".strip()


@dataclass(frozen=True)
class RecipeRow:
    """A method as the table calls it, with what it sets; `on` for one group or column alone."""

    label: str
    reading: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    on: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A table or figure of a paper."""

    name: str  # as typed, "hbn/table1"
    paper: str
    table: str
    caption: str
    measure: str  # what the numbers are
    protocol: str  # where in the paper the settings are stated
    seeds: tuple[int, ...]
    columns: tuple[RecipeColumn, ...]
    rows: tuple[RecipeRow, ...]
    base: Mapping[str, Any]
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # By row label and column name; a cell without a number is not there.
    published: Mapping[tuple[str, str], PublishedNumber] = field(default_factory=dict)
    absent: frozenset[tuple[str, str]] = frozenset()  # cells that the paper's table does not have, which are not run
    decisions: tuple[str, ...] = ()  # what the paper leaves open, and what was decided
    misprints: tuple[str, ...] = ()  # numbers of the paper that contradict each other
    claims: tuple[str, ...] = ()  # what its text says of it
    substitute: str = ""  # why the published numbers are only a reference; empty when they are the same experiment
    reference: str = ""  # the row from which the others' distance is shown, where a level would say nothing
    diagnostics: tuple[str, ...] = ()  # what is recorded besides accuracy
    order: str = "rows"  # whether the "rows" of a column or the "columns" of a group are what the paper puts in order

    def parts(self, average: RecipeColumn) -> list[RecipeColumn]:
        """The columns of which this one is the mean."""
        return [column for column in self.columns if column.group == average.group and not column.average]

    def cells(self) -> Iterator[tuple[RecipeRow, RecipeColumn]]:
        """Every cell that is run; averages follow from the others."""
        for row in self.rows:
            for column in self.columns:
                if not column.average and (row.label, column.name) not in self.absent:
                    yield row, column

    def options(self, row: RecipeRow, column: RecipeColumn) -> dict[str, Any]:
        """What is set for a cell."""
        own = {**row.on.get(column.group, {}), **row.on.get(column.name, {})}
        shared = {**self.base, **self.groups.get(column.group, {}), **column.options}
        return {**shared, **row.options, **own}

    def config(self, row: RecipeRow, column: RecipeColumn) -> Config:
        """The configuration of a cell, its seed left open."""
        return from_dict(self.options(row, column))

    def reading(self, row: RecipeRow, column: RecipeColumn) -> Mapping[str, str]:
        """What is read of a run: `read` ("accuracy" if not given) or `domain`, under which `statistics`."""
        return {**column.reading, **row.reading}


def names() -> list[str]:
    """Every recipe of the package, by paper, tables before figures, in the order of their numbers."""
    found = [
        f"{paper}/{file.name.removesuffix('.toml')}"
        for paper in PAPERS
        for file in resources.files(__name__).joinpath(paper).iterdir()
        if file.name.endswith(".toml")
    ]
    return sorted(found, key=_in_order)


def load(name: str) -> Recipe:
    """A recipe by its name, "hbn/table1", or by the path of a TOML file of one's own."""
    if not isinstance(name, str):
        raise FedkeelError(f"The recipe is {described(name)}: give its name, like 'hbn/table1'.")
    if name.endswith(".toml"):
        try:
            return parse(Path(name).stem, Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            what = error.strerror if isinstance(error, OSError) else error
            raise FedkeelError(f"The recipe '{name}' cannot be read: {what}.") from error
    if name not in names():
        close = nearest(name, names())
        ending = close if close.startswith("did") else "'fedkeel reproduce --list' shows what there is."
        raise FedkeelError(f"There is no recipe named '{name}': {ending}")
    paper, _, table = name.partition("/")
    return parse(name, resources.files(__name__).joinpath(paper, f"{table}.toml").read_text(encoding="utf-8"))


def parse(name: str, text: str) -> Recipe:
    """A recipe from its text; whatever in it cannot be meant is refused."""
    try:
        return _recipe(name, tomllib.loads(text))
    except RecursionError:
        raise FedkeelError(f"The recipe '{name}' is like itself: name another one there.") from None
    except (FedkeelError, ValueError, TypeError, AttributeError, KeyError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise FedkeelError(f"The recipe '{name}' is none: {what}.") from error


def _recipe(name: str, table: dict[str, Any]) -> Recipe:
    entries: dict[str, Any] = {"base": {}, "groups": {}}
    if "like" in table:
        entries |= vars(load(table["like"]))
    known = [entry.name for entry in fields(Recipe) if entry.name not in ("name", "absent")]
    for key, value in table.items():
        _refuse_unknown([key], "entry", [*known, "like"])
        if isinstance(value, list) != (key in LISTS):
            raise FedkeelError(f"'{key}' is {described(value)}: give {'a list' if key in LISTS else 'no list'}")
        if key == "base":
            entries[key] = {**entries[key], **value}
        elif key == "groups":
            inherited = entries[key]
            entries[key] = {g: {**inherited.get(g, {}), **value.get(g, {})} for g in {**inherited, **value}}
        elif key not in ("like", "columns", "rows", "published"):
            entries[key] = tuple(value) if isinstance(value, list) else value
    for key, kind in (("columns", RecipeColumn), ("rows", RecipeRow)):
        if key in table:
            entries[key] = tuple(_part(kind, part) for part in table[key])
    columns, rows = entries["columns"], entries["rows"]
    for what, given in (("column", [column.name for column in columns]), ("row", [row.label for row in rows])):
        if twice := next((label for label in given if given.count(label) > 1), ""):
            raise FedkeelError(f"the {what} '{twice}' is there twice: name them differently")
    if "published" in table:
        entries |= _numbers(table["published"], rows, columns)
    elif "like" in table:  # of the numbers that it takes over those whose row and column it keeps
        cells = {(row.label, column.name) for row in rows for column in columns}
        entries["published"] = {cell: number for cell, number in entries["published"].items() if cell in cells}
        entries["absent"] &= cells
    recipe = Recipe(**{**entries, "name": name})
    _refuse_unknown(
        [*table.get("groups", ()), *(place for row in rows for place in row.on)],
        "group or column",
        {n for c in columns for n in (c.group, c.name)},
    )
    _refuse_unknown(
        [recipe.reference, *(column.relative_to for column in columns)], "row", {"", *(row.label for row in rows)}
    )
    _refuse_unknown(recipe.diagnostics, "diagnostic", DIAGNOSTICS)
    for row, column in recipe.cells():
        config, reading = recipe.config(row, column), recipe.reading(row, column)
        _refuse_unknown([reading.get("read", "accuracy")], "reading", READINGS)
        _refuse_unknown([reading.get("statistics", config.statistics[0])], "evaluation under", config.statistics)
    return recipe


def _refuse_unknown(given: Iterable[str], what: str, known: Iterable[str]) -> None:
    if wrong := next((name for name in given if name not in known), ""):
        raise FedkeelError(f"there is no {what} '{wrong}': {nearest(wrong, sorted(known))}")


def _part(kind: type[Any], entry: Mapping[str, Any]) -> Any:
    """A row or a column: what it says of itself, what is read of its runs, and the options that they are run with."""
    own = {field.name: entry[field.name] for field in fields(kind) if field.name in entry}
    reading = {key: entry[key] for key in READ if key in entry}
    options = {key: value for key, value in entry.items() if key not in own and key not in reading}
    return kind(**own, reading=reading, options=options)


def _numbers(lines: Mapping[str, str], rows: Sequence[RecipeRow], columns: Sequence[RecipeColumn]) -> dict[str, Any]:
    """The published numbers, a line of text for each row with a number for each column; and the cells without one."""
    published: dict[tuple[str, str], PublishedNumber] = {}
    absent = set()
    if {*lines} != {row.label for row in rows} and lines:
        raise FedkeelError(
            f"its published lines are of {', '.join(lines)}: give one for each row, with ? for what is not printed"
        )
    for row in rows if lines else ():
        numbers = lines[row.label].split()
        if len(numbers) != len(columns):
            raise FedkeelError(f"'{row.label}' has {len(numbers)} published numbers for {len(columns)} columns")
        for column, text in zip(columns, numbers, strict=True):
            if text == NOT_A_CELL:
                absent.add((row.label, column.name))
            elif text != NOT_PRINTED:
                published[row.label, column.name] = PublishedNumber.of(text)
    return {"published": published, "absent": frozenset(absent)}


def _in_order(name: str) -> tuple[int, bool, bool, int, str]:
    paper, _, table = name.partition("/")
    number = re.search(r"\d+", table)
    others = not table.startswith("table"), not table.startswith("figure")
    return list(PAPERS).index(paper), *others, int(number[0]) if number else 0, table
