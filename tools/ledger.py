"""The ledger: a line of JSON for every finished cell of a recipe, one seed each, in `results/<paper>-<table>.jsonl`.

Lines are appended, and of several for one cell and seed the last one counts. A line names the commit that it was run
at and has a hash of its cell's settings: one whose recipe has changed since is stale, and so is one with a `doubt`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fedkeel.config import MACHINE_OPTIONS
from fedkeel.errors import FedkeelError
from fedkeel.experiments.recipes import DIAGNOSTICS, Recipe, RecipeColumn, RecipeRow
from fedkeel.experiments.reproduce import read
from fedkeel.runs.origin import Origin
from fedkeel.runs.run import Run
from fedkeel.runs.summary import BEST_ROUND, EVERY_ROUND, RULES, summarise_run

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True, eq=False)
class Line:
    """One cell of a recipe, run with one seed. Accuracies are in %."""

    recipe: str
    row: str
    column: str
    seed: int
    rounds: int  # that were run
    of: int  # as the recipe has them
    rule: str  # by which the recipe counts
    results: Mapping[str, float | None]  # by each rule; of what is no accuracy, by its own name
    version: str  # see `version_of`
    domains: Mapping[str, float | None] = field(default_factory=dict)  # by the recipe's rule
    diverged: list[str] = field(default_factory=list)  # domains whose test loss is not finite
    dropped: int | None = None  # updates of clients that were of no use
    seconds: float = 0.0
    device: str = ""
    torch: str = ""
    date: str = ""
    commit: str = ""  # at which it was run
    doubt: str = ""  # written into it later: why it does not count

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.recipe, self.row, self.column, self.seed

    @property
    def value(self) -> float | None:
        """What the recipe's table shows."""
        return self.results.get(self.rule)

    def stale(self, recipe: Recipe) -> str:
        """Why it is not what would be run today, or nothing."""
        cells = {(row.label, column.name): (row, column) for row, column in recipe.cells()}
        if self.doubt:
            return self.doubt
        if (self.row, self.column) not in cells:
            return "the recipe has no such cell any more"
        if version_of(recipe, *cells[self.row, self.column]) != self.version:
            return "the recipe has changed"
        return "" if self.rounds == self.of else "it has another number of rounds than the recipe"


def version_of(recipe: Recipe, row: RecipeRow, column: RecipeColumn, **changes: Any) -> str:
    """The same as long as a cell is run and read in the same way."""
    options = {**recipe.options(row, column), **changes}
    own = {name: value for name, value in options.items() if name not in (*MACHINE_OPTIONS, "seed")}
    text = json.dumps([own, dict(recipe.reading(row, column))], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def line_of(recipe: Recipe, row: RecipeRow, column: RecipeColumn, run: Run, version: str, commit: str) -> Line:
    """Of a finished run."""
    reading, stored = recipe.reading(row, column), run.result()
    kind = reading.get("read", "accuracy")
    if kind in (*DIAGNOSTICS, "seconds"):
        results = {kind: rounded(read(run, reading))}
    else:
        rules = [*RULES, BEST_ROUND, EVERY_ROUND]
        rules = [name for name in rules if name != "best-validation" or run.scores("validation")]
        results = {name: rounded(read(run, reading, name)) for name in rules}
    summary, origin = (
        summarise_run(run, stored["unseen_domains"], reading.get("statistics")),
        Origin.load(run.directory),
    )
    machine = origin.machine if origin else {}
    finished = datetime.fromtimestamp((run.directory / "summary.json").stat().st_mtime, tz=timezone.utc)
    return Line(
        recipe=recipe.name,
        row=row.label,
        column=column.name,
        seed=run.config.seed,
        rounds=summary["rounds"],
        of=recipe.config(row, column).rounds,
        rule=kind if kind in results else summary["result"],
        results=results,
        version=version,
        domains={name: rounded(value and 100 * value) for name, value in summary["domains"].items()},
        diverged=summary["diverged_domains"],
        dropped=summary["dropped_updates"],
        seconds=round(stored["seconds"], 1),
        device=machine.get("gpu") or machine.get("cpu", ""),
        torch=machine.get("torch", "").removeprefix("torch "),
        date=finished.date().isoformat(),
        commit=commit,
    )


def rounded(value: float | None) -> float | None:
    return None if value is None else round(float(value), 4)


class Ledger:
    """The lines of a folder; of several for one cell and seed the last."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self.folder = folder
        self.lines = {line.key: line for path in sorted(folder.glob("*.jsonl")) for line in lines_in(path)}

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines.values())

    def add(self, lines: Iterable[Line]) -> None:
        for line in lines:
            append(self.folder / f"{line.recipe.replace('/', '-')}.jsonl", asdict(line))
            self.lines[line.key] = line

    def of(self, recipe: Recipe) -> tuple[list[Line], dict[Line, str]]:
        """What counts of a recipe's lines, and what does not any more, with the reason."""
        reasons = {line: line.stale(recipe) for line in self if line.recipe == recipe.name}
        return [line for line, why in reasons.items() if not why], {line: why for line, why in reasons.items() if why}


def append(path: Path, entry: Mapping[str, Any]) -> None:
    """A line of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def lines_in(path: Path) -> Iterator[Line]:
    known = {entry.name for entry in fields(Line)}
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            yield Line(**{name: value for name, value in json.loads(text).items() if name in known})
        except (ValueError, TypeError, AttributeError) as error:
            raise FedkeelError(f"Line {number} of '{path}' is no result ({error}): take it out.") from error
