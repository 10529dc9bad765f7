"""Run a table or figure of a paper, and put our numbers beside the published ones.

    reproduce("hbn/table1", only=["HBN", "BN", "CIFAR-10"])

A run is kept under its configuration, `runs/reproduce/<method>-<data>-<fingerprint>/seed<k>`. So a cell that is done is
never run again, also where another column or another table asks for the same one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from fedkeel import analysis, methods
from fedkeel.analysis.diagnostic import FOLDER
from fedkeel.config import MACHINE_OPTIONS, Config
from fedkeel.core import imports
from fedkeel.core.naming import slug
from fedkeel.data.load import refuse_missing
from fedkeel.engine.idle import settled
from fedkeel.errors import FedkeelError, nearest
from fedkeel.experiments.jobs import Job, JobsObserver, beside_others, choose_jobs, run_all
from fedkeel.experiments.paper_table import PaperCell, Reproduction, derived
from fedkeel.experiments.recipes import DIAGNOSTICS, Recipe, RecipeColumn, RecipeRow, load
from fedkeel.experiments.rows import read_seeds
from fedkeel.files import explained
from fedkeel.options import described
from fedkeel.runs.intact import refuse_to_hide
from fedkeel.runs.run import Run
from fedkeel.runs.store import fingerprint, has_finished
from fedkeel.runs.summary import summarise_run
from fedkeel.runs.timing import read_timing
from fedkeel.spec import parse

PLACE = "runs/reproduce"


def reproduce(
    name: str | Recipe,
    *,
    only: Sequence[str] = (),
    seeds: int | str | Sequence[int] | None = None,
    directory: str | Path = PLACE,
    **options: Any,
) -> Reproduction:
    """Run what is not done yet of a recipe, and put ours beside the paper's.

    Args:
        name: of a recipe, "hbn/table1", or the path of a TOML file of one's own.
        only: rows, groups or columns by their labels, with `*` for anything; without any, all.
        seeds: how many of the recipe's, or which; by default all of them.
        directory: of the run directories.
        options: `jobs` and `observer` as in `compare`; others are of all runs in place of the recipe's, as in `Config`.

    Raises `fedkeel.stopping.Stopped` when it was asked to stop; the same call then continues it.
    """
    imports.refuse_while_importing()
    jobs, observer = options.pop("jobs", None), options.pop("observer", None)
    table = TableRuns(name if isinstance(name, Recipe) else load(name), only, seeds, Path(directory))
    refuse_to_hide(table.directory, own="")
    table.plan(options)
    failures = table.run(jobs, observer or JobsObserver())
    return table.reproduction(marks(table.recipe, options), failures)


class TableRuns:
    """The runs behind the cells that were asked for."""

    def __init__(
        self, recipe: Recipe, only: Sequence[str], seeds: int | str | Sequence[int] | None, directory: Path
    ) -> None:
        self.recipe, self.seeds, self.directory = recipe, choose_seeds(recipe, seeds), directory
        self.rows, self.columns = select(recipe, only)
        self.runs: dict[tuple[str, str], Path] = {}  # of a cell, by its row's label and its column's name; all seeds
        self.jobs: list[Job] = []  # every run once, though several cells may read it
        self.skipped: dict[str, None] = {}  # why a cell is not run or a diagnostic not made, a sentence each
        read = [recipe.reading(row, column).get("read", "") for row in self.rows for column in self.columns]
        # Those that the recipe names, and those that a cell reads.
        self.diagnostics = list(dict.fromkeys([*recipe.diagnostics, *(name for name in read if name in DIAGNOSTICS)]))

    def plan(self, changes: Mapping[str, Any]) -> None:
        """Which runs the cells need. A cell that cannot be run here is left out, with a sentence that says why."""
        parts = {part.name for column in self.columns if column.average for part in self.recipe.parts(column)}
        # Recorded while it trains; the data can be looked at at any time.
        record = ",".join(name for name in self.diagnostics if name != "label-distribution")
        configs: dict[tuple[str, str], Config] = {}
        for row, column in self.recipe.cells():
            is_reference = column.relative_to == row.label
            if (row in self.rows or is_reference) and (column in self.columns or column.name in parts):
                config = self.recipe.config(row, column).replace(**changes)
                configs[row.label, column.name] = config.replace(record=record) if record else config
        jobs: dict[Path, Job] = {}
        for (row_label, column_name), config in settled(configs).items():
            directory = self.runs[row_label, column_name] = self.directory / directory_name(config)
            for seed in self.seeds:
                place = directory / f"seed{seed}"
                jobs.setdefault(place, Job(f"{row_label}, {column_name}", seed, place, config.replace(seed=seed)))
        for job in jobs.values():
            if has_finished(job.directory) or not (problem := unusable(job.config.method, job.config.data)):
                self.jobs.append(job)
            else:
                self.skipped[f"Skipped: {problem}"] = None

    def run(self, jobs: int | None, observer: JobsObserver) -> dict[Job, str]:
        """What is not finished, and the diagnostics of what is; returns what went wrong."""
        finished = [job for job in self.jobs if has_finished(job.directory)]
        todo = [job for job in self.jobs if job not in finished]
        processes = min(choose_jobs(jobs, [job.config for job in todo]), max(1, len(todo)))
        if todo:
            with explained(self.directory):  # told once, and not by each of the runs
                self.directory.mkdir(parents=True, exist_ok=True)
            observer.planned(self.jobs, finished)
        todo = [replace(job, config=beside_others(job.config)) for job in todo] if processes > 1 else todo
        failures = run_all(todo, processes, observer)
        for job in self.jobs:
            for name in self.diagnostics if has_finished(job.directory) else ():
                try:
                    if not (job.directory / FOLDER / f"{name}.json").exists():
                        analysis.run(name, job.directory)
                except FedkeelError as error:
                    self.skipped[f"The diagnostic '{name}' is not shown: {error}"] = None
        return failures

    def reproduction(self, marks: Sequence[str], failures: Mapping[Job, str]) -> Reproduction:
        """Every cell that was asked for, in the order of the table."""
        ours = derived(self.recipe, {(row.label, c.name): self._read(row, c) for row, c in self.recipe.cells()})
        cells = {
            cell: PaperCell(ours.get(cell, {}), self.recipe.published.get(cell))
            for row, column in product(self.rows, self.columns)
            if (cell := (row.label, column.name)) not in self.recipe.absent
        }
        return Reproduction(
            recipe=self.recipe,
            rows=self.rows,
            columns=self.columns,
            cells=cells,
            seeds=self.seeds,
            directory=self.directory,
            marks=marks,
            skipped=list(self.skipped),
            failures={str(job): problem for job, problem in failures.items()},
        )

    def _read(self, row: RecipeRow, column: RecipeColumn) -> dict[int, float]:
        """By seed, of the runs that were asked for and are finished."""
        found, cell = dict[int, float](), (row.label, column.name)
        for seed in self.seeds if cell in self.runs else ():
            try:
                place = self.runs[cell] / f"seed{seed}"
                value = read(Run(place), self.recipe.reading(row, column)) if has_finished(place) else None
            except FedkeelError as error:
                self.skipped[str(error)] = None
                continue
            found |= {} if value is None else {seed: value}
        return found


@lru_cache(maxsize=256)
def unusable(method: str, data: str) -> str:
    """Why a cell cannot be run here, or nothing."""
    try:
        methods.build(method)
        refuse_missing(data)
    except FedkeelError as error:
        return str(error)
    return ""


def directory_name(config: Config) -> str:
    """The same for equal configurations, whatever their seed."""
    return f"{slug(config.method)[:60]}-{slug(parse(config.data).name)}-{fingerprint(config.replace(seed=0))}"


def marks(recipe: Recipe, changes: Mapping[str, Any]) -> list[str]:
    """Whatever makes the numbers something else than the paper's."""
    found = [f"SUBSTITUTE: {recipe.substitute}"] if recipe.substitute else []
    changed = [f"{name}={value}" for name, value in changes.items() if name not in MACHINE_OPTIONS]
    return found + ([f"CHANGED: {', '.join(changed)}, where the paper's setting is another."] if changed else [])


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


def select(recipe: Recipe, only: Sequence[str]) -> tuple[list[RecipeRow], list[RecipeColumn]]:
    """The rows and columns that the patterns name. Where none names a row, every row; likewise for columns."""
    if isinstance(only, str) or not isinstance(only, Sequence):
        raise FedkeelError(f"'only' is {described(only)}: give a list of labels, like ['HBN', 'CIFAR-10'].")
    rows: list[RecipeRow] = []
    columns: list[RecipeColumn] = []
    for pattern in only:
        some_rows = [row for row in recipe.rows if _fits(pattern, row.label)]
        some_columns = [c for c in recipe.columns if any(_fits(pattern, name) for name in (c.name, c.group, c.label))]
        if not some_rows and not some_columns:
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


def _fits(pattern: str, label: str) -> bool:
    return bool(label) and fnmatchcase(label.lower(), pattern.lower())


def read(run: Run, reading: Mapping[str, str], rule: str | None = None) -> float | None:
    """The number of a finished run that a cell shows: accuracies in %, times in seconds. `rule`: another than the
    run's."""
    kind = reading.get("read", "accuracy")
    if kind in DIAGNOSTICS:
        path = run.directory / FOLDER / f"{kind}.json"
        at = " ".join(reading[key] for key in ("domain", "at") if key in reading)
        return analysis.number(json.loads(path.read_text()), at) if path.exists() else None
    if kind == "seconds":
        return epoch_seconds(run)
    summary: dict[str, Any] = run.summary or {}
    if "statistics" in reading or rule:
        summary = summarise_run(run, summary["unseen_domains"], reading.get("statistics"), rule)
    if "domain" in reading:
        domain, there = reading["domain"], summary["domains"]
        if domain not in there:
            raise FedkeelError(f"The data '{run.config.data}' has no domain '{domain}': {nearest(domain, there)}")
        value = there[domain]
    else:
        value = summary["samples_accuracy" if kind == "samples" else kind]
    return None if value is None else 100 * float(value)


def epoch_seconds(run: Run) -> float | None:
    """Mean time of one client's local epoch. The first round is left out: it also prepares the device."""
    times = read_timing(run.directory)[1:]
    clients = {record["round"]: record["clients"] for record in run.records("round")}
    return fmean(t["train"] / clients[t["round"]] for t in times) / run.config.local_epochs if times else None
