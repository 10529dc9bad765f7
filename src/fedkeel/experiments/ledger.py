"""The ledger: a line of JSON for every finished cell of a recipe, one seed each, in `results/<paper>-<table>.jsonl`.

Lines are appended, and of several for one experiment the last one counts. A line says what it was run with, so that
whoever reads it later can tell whether it still is what the recipe and the method say: if not, it is stale.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fedkeel import __version__, methods
from fedkeel.config import MACHINE_OPTIONS, Config
from fedkeel.errors import FedkeelError
from fedkeel.experiments.recipes import DIAGNOSTICS, Recipe, RecipeColumn, RecipeRow
from fedkeel.experiments.signature import Signature, same, signature
from fedkeel.files import explained
from fedkeel.runs.origin import Origin, own_code
from fedkeel.runs.run import Run
from fedkeel.runs.summary import BEST_ROUND, EVERY_ROUND, RULES, summarise_run

PLACE = Path("results")

Key = tuple[str, str, str, int, int, str]


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
    method: str
    version: str  # of the recipe's cell, see `version_of`
    signature: Signature  # of method and network, see `fedkeel.experiments.signature`
    domains: Mapping[str, float] = field(default_factory=dict)  # by the recipe's rule
    statistics: Mapping[str, float] = field(default_factory=dict)  # by the recipe's rule, where both were tested
    diverged: tuple[str, ...] = ()  # domains whose test loss is not finite
    dropped: int | None = None  # updates of clients that were of no use; not known of every line
    changes: Mapping[str, Any] = field(default_factory=dict)  # options in place of the recipe's
    substitutes: tuple[str, ...] = ()  # what stands in for something of the paper's
    seconds: float = 0.0
    device: str = ""
    torch: str = ""
    fedkeel: str = ""
    date: str = ""
    commit: str = ""  # at which it was run, where that is known
    doubt: str = ""  # written into it later: why it does not count although nothing else says so

    @property
    def key(self) -> Key:
        """Lines with the same one are of the same experiment."""
        return (*self.cell, self.seed, self.rounds, json.dumps(self.changes, sort_keys=True))

    @property
    def cell(self) -> tuple[str, str, str]:
        return self.recipe, self.row, self.column

    @property
    def value(self) -> float | None:
        """What the recipe's table shows."""
        return self.results.get(self.rule)

    @property
    def is_whole(self) -> bool:
        """With the recipe's rounds, and not a quick look."""
        return self.rounds == self.of

    def stale(self, recipe: Recipe) -> str:
        """Why it is not what would be run today, or nothing."""
        if self.doubt:
            return self.doubt
        cells = {(row.label, column.name): (row, column) for row, column in recipe.cells()}
        if (self.row, self.column) not in cells:
            return "the recipe has no such cell any more"
        row, column = cells[self.row, self.column]
        if version_of(recipe, row, column, self.changes) != self.version:
            return "the recipe has changed"
        model = str(self.changes.get("model", recipe.config(row, column).model))
        return "" if same(self.signature, signature_now(self.method, model)) else "the method computes something else"


def signature_now(method: str, model: str) -> Signature:
    """Nothing of a method that is not there any more."""
    try:
        methods.build(method)
    except FedkeelError:
        return ()
    return signature(method, model)


def version_of(recipe: Recipe, row: RecipeRow, column: RecipeColumn, changes: Mapping[str, Any] | None = None) -> str:
    """The same as long as a cell is run and read in the same way."""
    options = {**recipe.options(row, column), **(changes or {})}
    own = {name: value for name, value in options.items() if name not in (*MACHINE_OPTIONS, "seed")}
    text = json.dumps([own, dict(recipe.reading(row, column))], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def changes_of(planned: Config, run: Config) -> dict[str, Any]:
    """Options that a run has in place of the recipe's."""
    other, skipped = run.to_dict(), {*MACHINE_OPTIONS, "seed", "rounds"}
    return {k: other[k] for k, v in planned.to_dict().items() if k not in skipped and v != other[k]}


def line_of(recipe: Recipe, row: RecipeRow, column: RecipeColumn, run: Run, number: float | None) -> Line:
    """Of a finished run; `number` is what the cell reads of it, where that is no accuracy by some rule."""
    reading, config = recipe.reading(row, column), recipe.config(row, column)
    stored = run.sound_summary()
    assert stored is not None
    statistics = reading.get("statistics")
    summary = summarise_run(run, stored["unseen_domains"], statistics)
    kind, rule = reading.get("read", "accuracy"), summary["result"]
    results: dict[str, float | None] = {kind: _kept(number)}
    if kind not in (*DIAGNOSTICS, "seconds"):
        results = {
            name: accuracy(summarise_run(run, summary["unseen_domains"], statistics, name), reading)
            for name in (*RULES, BEST_ROUND, EVERY_ROUND)
            if name != "best-validation" or run.scores("validation")
        }
    tested = {record["statistics"] for record in run.records("scores") if record["split"] == "test"}
    by_statistics = {
        name: accuracy(summarise_run(run, summary["unseen_domains"], name), reading) for name in sorted(tested)
    }
    origin, model = Origin.load(run.directory), run.config.model
    machine = origin.machine if origin else {}
    return Line(
        recipe=recipe.name,
        row=row.label,
        column=column.name,
        seed=run.config.seed,
        rounds=summary["rounds"],
        of=config.rounds,
        rule=kind if kind in results else rule,
        results=results,
        method=config.method,
        version=version_of(recipe, row, column, changes := changes_of(config, run.config)),
        signature=() if _changed_since(origin, config) else signature_now(config.method, model),
        domains={name: _kept(100 * value) or 0.0 for name, value in summary["domains"].items() if value is not None},
        statistics={k: v for k, v in by_statistics.items() if v is not None} if len(tested) > 1 else {},
        diverged=tuple(summary["diverged_domains"]),
        dropped=summary["dropped_updates"],
        changes=changes,
        substitutes=(recipe.substitute,) if recipe.substitute else (),
        seconds=round(stored["seconds"], 1),
        device=machine.get("gpu") or machine.get("cpu", ""),
        torch=machine.get("torch", "").removeprefix("torch "),
        fedkeel=origin.fedkeel if origin else __version__,
        date=_day(run.directory),
    )


def _changed_since(origin: Origin | None, config: Config) -> bool:
    """Whether a run is of other code than there is now, whose signature is then not its own."""
    return bool(origin and origin.changed_code(own_code(config)))


def accuracy(summary: Mapping[str, Any], reading: Mapping[str, str]) -> float | None:
    """In %: of the domain, the unseen ones, all samples together, or the mean over domains."""
    kind = reading.get("read", "accuracy")
    value = (
        summary["domains"].get(reading["domain"])
        if "domain" in reading
        else summary["samples_accuracy" if kind == "samples" else kind if kind == "unseen" else "accuracy"]
    )
    return None if value is None else _kept(100 * value)


def _kept(value: float | None) -> float | None:
    return None if value is None else round(float(value), 4)


def _day(directory: Path) -> str:
    when = (directory / "summary.json").stat().st_mtime
    return datetime.fromtimestamp(when, tz=timezone.utc).date().isoformat()


class Ledger:
    """The lines of a folder; of several for one experiment the last."""

    def __init__(self, folder: str | Path = PLACE) -> None:
        self.folder = Path(folder)
        self._lines: dict[Key, Line] = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            self._lines |= {line.key: line for line in _read(path)}

    def __iter__(self) -> Iterator[Line]:
        return iter(self._lines.values())

    def add(self, lines: Iterable[Line]) -> int:
        """Append those that say something new; returns how many. What was written survives any end of this process.

        A run of other code than there is now becomes no line: nobody could tell any more what it had computed.
        """
        written = 0
        for line in lines:
            if not line.signature or self._has(line):
                continue
            path = self.folder / f"{line.recipe.replace('/', '-')}.jsonl"
            with explained(path):
                self.folder.mkdir(parents=True, exist_ok=True)
                _append(path, json.dumps(asdict(line)) + "\n")
            self._lines[line.key] = line
            written += 1
        return written

    def _has(self, line: Line) -> bool:
        known = self._lines.get(line.key)
        return (
            known is not None
            and (known.version, known.results) == (line.version, dict(line.results))
            and same(known.signature, line.signature)
            # What is in doubt counts again when it was run again, by the same numbers too; not the same run once more.
            and (not known.doubt or known.seconds == line.seconds)
        )

    def of(self, recipe: Recipe) -> tuple[list[Line], dict[Line, str]]:
        """What counts of a recipe's lines, and what does not any more, with the reason."""
        reasons = {line: line.stale(recipe) for line in self if line.recipe == recipe.name}
        return [line for line, why in reasons.items() if not why], {line: why for line, why in reasons.items() if why}


def _append(path: Path, text: str) -> None:
    """In one write, in the place of a line that a kill has cut off, if there is one; one writer at a time."""
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        whole = file.read()
        last = whole[whole.rfind(b"\n") + 1 :]
        if last and _is_json(last):
            text = "\n" + text
        elif last:
            file.truncate(len(whole) - len(last))
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


KINDS: Mapping[type | tuple[type, ...], Sequence[str]] = {
    str: (
        *("recipe", "row", "column", "rule", "method", "version"),
        *("device", "torch", "fedkeel", "date", "commit", "doubt"),
    ),
    int: ("seed", "rounds", "of"),
    (int, float): ("seconds",),
    dict: ("results", "domains", "statistics", "changes"),
    tuple: ("signature", "diverged", "substitutes"),
}


def _read(path: Path) -> Iterator[Line]:
    known = {entry.name for entry in fields(Line)}
    with explained(path):
        texts = path.read_bytes().split(b"\n")
    for number, text in enumerate(texts, start=1):
        if not text.strip() or (number == len(texts) and not _is_json(text)):  # cut off by a kill: written again
            continue
        try:
            entries: dict[str, Any] = {k: v for k, v in json.loads(text).items() if k in known}
            entries |= {k: tuple(v) for k, v in entries.items() if isinstance(v, list)}
            line = Line(**entries)
            _check(line)
        except (ValueError, TypeError, AttributeError) as error:
            raise FedkeelError(f"Line {number} of '{path}' is no result ({error}): take it out.") from error
        yield line


def _check(line: Line) -> None:
    for kind, names in KINDS.items():
        for name in names:
            if not isinstance(getattr(line, name), kind):
                raise TypeError(f"its {name} is {getattr(line, name)!r}")
    numbers = [*line.results.values(), *line.signature, *line.domains.values(), *line.statistics.values()]
    if not all(number is None or isinstance(number, int | float) for number in numbers):
        raise TypeError("not all of its results are numbers")
