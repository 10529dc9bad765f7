"""Run a table or figure of a paper, and put our numbers beside the published ones.

    reproduce("hbn/table1", root="./data", only=["HBN", "BN", "CIFAR-10"])

A run is kept under its configuration, `runs/reproduce/<method>-<data>-<fingerprint>/seed<k>`. So a cell that is done is
never run again, also where another column or another table asks for the same one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from fedkeel import __version__, analysis, methods
from fedkeel.analysis.diagnostic import FOLDER
from fedkeel.config import Config
from fedkeel.core import imports
from fedkeel.core.naming import slug
from fedkeel.data import partition as partitions
from fedkeel.data.load import refuse_missing
from fedkeel.engine.idle import settled
from fedkeel.errors import FedkeelError, nearest
from fedkeel.experiments.jobs import Job, JobsObserver, beside_others, choose_jobs, run_all
from fedkeel.experiments.paper_table import PaperCell, Reproduction, derived
from fedkeel.experiments.recipes import DIAGNOSTICS, Recipe, RecipeColumn, RecipeRow, load
from fedkeel.experiments.request import Request, choose_seeds, data_at, select
from fedkeel.files import explained
from fedkeel.models import MODELS
from fedkeel.runs.intact import refuse_to_hide
from fedkeel.runs.origin import Origin, commit
from fedkeel.runs.run import Run
from fedkeel.runs.store import fingerprint, has_finished
from fedkeel.runs.summary import summarise_run
from fedkeel.runs.timing import read_timing
from fedkeel.spec import parse

OWN_OPTIONS = [entry.name for entry in fields(Request) if entry.name != "changes"]


def reproduce(name: str | Recipe, **options: Any) -> Reproduction:
    """Run what is not done yet of a recipe, and put ours beside the paper's.

    Args:
        name: of a recipe, "hbn/table1", or the path of a TOML file of one's own.
        options: `root`, `only`, `seeds`, `scale`, `directory`, `jobs` and `observer`, see `request.Request`; any other
            is one of all runs in place of the recipe's, as in `Config`.

    Raises `fedkeel.stopping.Stopped` when it was asked to stop; the same call then continues it.
    """
    return reproduce_all([name], **options)[0]


def reproduce_all(names: Sequence[str | Recipe], **options: Any) -> list[Reproduction]:
    """Several recipes as one: all of their runs in one queue, one that several need run once. Options as above.

    A label in `only` need not be one of every recipe; where a recipe has none of them, all of its cells run.
    """
    imports.refuse_while_importing()
    recipes = [name if isinstance(name, Recipe) else load(name) for name in names]
    own = {name: options.pop(name) for name in OWN_OPTIONS if name in options}
    request = Request(**own, changes=options)
    tables = [TableRuns(recipe, request, *select(recipe, request.only, recipes)) for recipe in recipes]
    directory = Path(request.directory)
    refuse_to_hide(directory, own="")
    with data_at(request.root):
        for table in tables:
            table.plan()
        jobs = [job for table in tables for job in table.jobs]
        if not all(has_finished(job.directory) for job in jobs):
            with explained(directory):  # told once, and not by each of the runs
                directory.mkdir(parents=True, exist_ok=True)
        failures = run_missing(jobs, request.jobs, request.observer or JobsObserver())
        for table in tables:
            table.diagnose()
    return [table.reproduction(failures) for table in tables]


class TableRuns:
    """The runs behind the cells that were asked for."""

    def __init__(
        self, recipe: Recipe, request: Request, rows: Sequence[RecipeRow], columns: Sequence[RecipeColumn]
    ) -> None:
        self.recipe, self.request, self.rows, self.columns = recipe, request, rows, columns
        self.seeds = choose_seeds(recipe, request.seeds)
        self.runs: dict[tuple[str, str], Path] = {}  # of a cell, by its row's label and its column's name; all seeds
        self.jobs: list[Job] = []  # every run once, though several cells may read it
        self.skipped: dict[str, None] = {}  # why a cell is not run or a diagnostic not made, a sentence each
        self.diverged: dict[Path, str] = {}  # what became of a run's test loss, where it is not finite
        read = [recipe.reading(row, column).get("read", "") for row in rows for column in columns]
        # Those that the recipe names, and those that a cell reads.
        self.diagnostics = list(dict.fromkeys([*recipe.diagnostics, *(name for name in read if name in DIAGNOSTICS)]))

    def plan(self) -> None:
        """Which runs the cells need. A cell that cannot be run here is left out, with a sentence that says why."""
        checked: dict[str, FedkeelError | None] = {}
        parts = {part.name for column in self.columns if column.average for part in self.recipe.parts(column)}
        # Recorded while it trains; the data can be looked at at any time.
        record = [name for name in self.diagnostics if name != "label-distribution"]
        planned: set[Path] = set()
        configs: dict[tuple[str, str], Config] = {}
        for row, column in self.recipe.cells():
            is_reference = column.relative_to == row.label
            if (row in self.rows or is_reference) and (column in self.columns or column.name in parts):
                config = self.request.changed(self.recipe.config(row, column))
                configs[row.label, column.name] = config.replace(record=",".join(record)) if record else config
        for (row, column), config in settled(configs).items():
            directory = Path(self.request.directory) / directory_name(config)
            self.runs[row, column] = directory
            if directory in planned:
                continue
            try:
                if len(self._finished(directory)) < len(self.seeds):
                    refuse_unusable(config, checked)
            except FedkeelError as error:
                self.skipped[f"Skipped: {error}"] = None
                continue
            planned.add(directory)
            self.jobs += [
                Job(f"{row}, {column}", seed, directory / f"seed{seed}", config.replace(seed=seed))
                for seed in self.seeds
            ]

    def _finished(self, directory: Path) -> dict[int, Path]:
        runs = {seed: directory / f"seed{seed}" for seed in self.seeds}
        return {seed: run for seed, run in runs.items() if has_finished(run)}

    def diagnose(self) -> None:
        """Make the diagnostics of every finished run that lacks them."""
        for directory in dict.fromkeys(self.runs.values()):
            for run in self._finished(directory).values():
                for name in self.diagnostics:
                    if (run / FOLDER / f"{name}.json").exists():
                        continue
                    try:
                        analysis.run(name, run)
                    except FedkeelError as error:
                        self.skipped[f"The diagnostic '{name}' is not shown: {error}"] = None

    def reproduction(self, failures: Mapping[Path, str]) -> Reproduction:
        """Every cell that was asked for, in the order of the table."""
        run = {(row.label, column.name): self._read(row, column) for row, column in self.recipe.cells()}
        ours = derived(self.recipe, run)
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
            directory=Path(self.request.directory),
            marks=self.request.marks(self.recipe),
            skipped=list(self.skipped),
            diverged=list(self.diverged.values()),
            failures={str(job): failures[job.directory] for job in self.jobs if job.directory in failures},
        )

    def _read(self, row: RecipeRow, column: RecipeColumn) -> dict[int, float]:
        """By seed, of the runs that were asked for and are finished."""
        cell = (row.label, column.name)
        found = {}
        for seed, directory in (self._finished(self.runs[cell]) if cell in self.runs else {}).items():
            run = Run(directory)
            try:
                value = read(run, self.recipe.reading(row, column))
            except FedkeelError as error:
                self.skipped[str(error)] = None
                continue
            if value is not None:
                found[seed] = value
            if where := (run.summary or {}).get("diverged_domains"):
                which = f"{row.label}, {column.name}, seed {seed}"
                self.diverged.setdefault(
                    directory, f"{which} diverged: its test loss is not finite on {', '.join(where)}."
                )
        return found


def directory_name(config: Config) -> str:
    """The same for equal configurations, whatever their seed."""
    return f"{slug(config.method)[:60]}-{slug(parse(config.data).name)}-{fingerprint(config.replace(seed=0))}"


def refuse_unusable(config: Config, checked: dict[str, FedkeelError | None]) -> None:
    """An error where the method, network, partition or data cannot be had; of each data set it is found out once."""
    methods.build(config.method)
    partitions.build(config.partition)
    model = parse(config.model)
    if ":" not in model.name:  # what comes after timm: only timm knows
        MODELS.entry(model.name).check_options("model", model.options)
    if config.data not in checked:
        checked[config.data] = None
        try:
            refuse_missing(config.data)
        except FedkeelError as error:
            checked[config.data] = error
    if problem := checked[config.data]:
        raise problem


def run_missing(planned: Sequence[Job], jobs: int | None, observer: JobsObserver) -> dict[Path, str]:
    """Run what is not finished; returns why a run failed, by its directory."""
    planned = list({job.directory: job for job in reversed(planned)}.values())[::-1]  # two recipes may need one run
    finished = [job for job in planned if has_finished(job.directory)]
    tell_of_other_code(finished, observer.note)
    todo = [job for job in planned if job not in finished]
    processes = choose_jobs(jobs, [job.config for job in todo])
    if not todo:
        return {}
    observer.planned(planned, finished)
    if processes > 1:
        todo = [replace(job, config=beside_others(job.config)) for job in todo]
    failures = run_all(todo, min(processes, len(todo)), observer)
    return {job.directory: problem for job, problem in failures.items()}


def tell_of_other_code(finished: Sequence[Job], note: Callable[[str], None]) -> None:
    """What took days on a GPU is not thrown away for a changed line; but nobody must take it for the present code's."""
    told: set[str] = set()
    now = Origin(__version__, commit()).version
    for job in finished:
        origin = Origin.load(job.directory)
        if origin is not None and origin.version not in (now, *told):
            told.add(origin.version)
            note(f"'{job.directory}' is used again, though fedkeel {origin.version} made it: remove it to train anew.")


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
