"""Run a table or figure of a paper, and put our numbers beside the published ones.

    reproduce("hbn/table1", root="./data", only=["HBN", "BN", "CIFAR-10"])

A run is kept under its configuration, `runs/reproduce/<method>-<data>-<fingerprint>/seed<k>`. So a cell that is done is
never run again, also where another column or another table asks for the same one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import Any

from fedkeel import analysis, methods
from fedkeel.config import MACHINE_OPTIONS, Config
from fedkeel.core.composition import Composition
from fedkeel.core.naming import slug
from fedkeel.data import partition as partitions
from fedkeel.engine.setup import load_federation
from fedkeel.engine.spawning import leave_if_imported_again
from fedkeel.errors import FedkeelError, nearest
from fedkeel.experiments.comparison import choose_jobs, has_finished
from fedkeel.experiments.jobs import Job, JobsObserver, beside_others, run_all
from fedkeel.experiments.paper_table import Entry, Reproduction
from fedkeel.experiments.recipes import DIAGNOSTICS, Column, Recipe, Row, load
from fedkeel.experiments.rows import read_seeds
from fedkeel.files import explained
from fedkeel.models import MODELS
from fedkeel.options import described
from fedkeel.runs.origin import other_method
from fedkeel.runs.run import Run
from fedkeel.runs.store import fingerprint
from fedkeel.runs.summary import summarise_run
from fedkeel.spec import parse

PLACE = "runs/reproduce"
Key = tuple[str, str]  # a row's label and a column's name


@dataclass
class Plan:
    """The runs behind the cells that were asked for.

    Attributes:
        runs: the directory of each cell's run, without the seed.
        jobs: every run once, though several cells may read it.
        skipped: why a cell is not run.
        diverged: of a cell's runs what became of the test loss, where it is not finite.
    """

    runs: dict[Key, Path] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    skipped: dict[Key, str] = field(default_factory=dict)
    diverged: dict[Path, str] = field(default_factory=dict)


def reproduce(
    name: str | Recipe,
    *,
    root: str | Path | None = None,
    only: Sequence[str] = (),
    seeds: int | str | Sequence[int] | None = None,
    scale: float = 1.0,
    directory: str | Path = PLACE,
    jobs: int | None = None,
    observer: JobsObserver | None = None,
    **changes: Any,
) -> Reproduction:
    """Run what is not done yet of a recipe, and gather ours beside the paper's.

    Args:
        name: of a recipe, "hbn/table1", or the path of a TOML file of one's own.
        root: the folder that has the data sets in it, in place of $FEDKEEL_DATA.
        only: rows, groups or columns by their labels, with `*` for anything; without any, all.
        seeds: how many of the recipe's, or which; by default all of the recipe's.
        scale: share of the rounds to run, for a quick look.
        directory: of the run directories.
        jobs: runs at the same time, as in `compare`.
        observer: is told how it is going.
        changes: options of all runs in place of the recipe's, as in `Config`.

    Raises `fedkeel.stopping.Stopped` when it was asked to stop; the same call then continues it.
    """
    (result,) = reproduce_all(
        [name],
        root=root,
        only=only,
        seeds=seeds,
        scale=scale,
        directory=directory,
        jobs=jobs,
        observer=observer,
        **changes,
    )
    return result


def reproduce_all(
    names: Sequence[str | Recipe],
    *,
    root: str | Path | None = None,
    only: Sequence[str] = (),
    seeds: int | str | Sequence[int] | None = None,
    scale: float = 1.0,
    directory: str | Path = PLACE,
    jobs: int | None = None,
    observer: JobsObserver | None = None,
    **changes: Any,
) -> list[Reproduction]:
    """Several recipes as one: all of their runs in one queue, one that several need run once. Arguments as above.

    A label in `only` need not be one of every recipe; where a recipe has none of them, all of its cells run.
    """
    leave_if_imported_again()
    recipes = [name if isinstance(name, Recipe) else load(name) for name in names]
    only = [only] if isinstance(only, str) else only
    if not isinstance(only, Sequence):
        raise FedkeelError(f"'only' is {described(only)}: give a list of labels, like ['HBN', 'CIFAR-10'].")
    if not isinstance(scale, int | float) or not 0 < scale <= 1:
        raise FedkeelError(f"'scale' is {described(scale)}: give a share of the rounds, above 0 and at most 1.")
    chosen = {recipe.name: choose_seeds(recipe, seeds) for recipe in recipes}
    cells = {recipe.name: select(recipe, _known(only, recipe, recipes)) for recipe in recipes}
    plans: dict[str, Plan] = {}
    with data_at(root):
        for recipe in recipes:
            change = scaled(scale, changes)
            plans[recipe.name] = make_plan(recipe, *cells[recipe.name], chosen[recipe.name], Path(directory), change)
        to_run = [job for plan in plans.values() for job in plan.jobs]
        if not all(has_finished(job.directory) for job in to_run):
            with explained(Path(directory)):  # told once, and not by each of the runs
                Path(directory).mkdir(parents=True, exist_ok=True)
        failures = run_missing(to_run, jobs, observer or JobsObserver())
        undiagnosed = {
            name: diagnose(plan, wanted_diagnostics(recipe, *cells[name]), chosen[name])
            for recipe, (name, plan) in zip(recipes, plans.items(), strict=True)
        }
    return [
        Reproduction(
            recipe=recipe,
            rows=cells[recipe.name][0],
            columns=cells[recipe.name][1],
            entries=gather(recipe, *cells[recipe.name], plans[recipe.name], chosen[recipe.name]),
            seeds=chosen[recipe.name],
            directory=Path(directory),
            marks=marks(recipe, scale, changes),
            skipped=[*dict.fromkeys(plans[recipe.name].skipped.values()), *undiagnosed[recipe.name]],
            diverged=list(plans[recipe.name].diverged.values()),
            failures={
                str(job): failures[job.directory] for job in plans[recipe.name].jobs if job.directory in failures
            },
        )
        for recipe in recipes
    ]


# -- what is asked for ------------------------------------------------------------------------------------------
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


def select(recipe: Recipe, only: Sequence[str]) -> tuple[list[Row], list[Column]]:
    """The rows and columns that the patterns name. Where none names a row, every row; likewise for columns."""
    rows: list[Row] = []
    columns: list[Column] = []
    for pattern in only:
        some_rows = [row for row in recipe.rows if _matches(pattern, row.label)]
        some_columns = [c for c in recipe.columns if _matches(pattern, c.name, c.group, c.label)]
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


def _known(only: Sequence[str], recipe: Recipe, recipes: Sequence[Recipe]) -> list[str]:
    """Those of the patterns that name something in this recipe, and those that name nothing in any, to be refused."""

    def names_something(pattern: str, within: Recipe) -> bool:
        rows = any(_matches(pattern, row.label) for row in within.rows)
        return rows or any(_matches(pattern, c.name, c.group, c.label) for c in within.columns)

    nowhere = [pattern for pattern in only if not any(names_something(pattern, other) for other in recipes)]
    return [pattern for pattern in only if pattern in nowhere or names_something(pattern, recipe)]


def _matches(pattern: str, *labels: str) -> bool:
    return any(label and fnmatchcase(label.lower(), pattern.lower()) for label in labels)


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


def scaled(scale: float, changes: Mapping[str, Any]) -> Callable[[Config], Config]:
    """What becomes of a cell's configuration."""

    def change(config: Config) -> Config:
        config = config.replace(**changes)
        return config.replace(rounds=max(1, round(config.rounds * scale)))

    return change


def marks(recipe: Recipe, scale: float, changes: Mapping[str, Any]) -> list[str]:
    """Whatever makes the numbers something else than the paper's."""
    found = []
    if recipe.substitute:
        found.append(f"SUBSTITUTE: {recipe.substitute}")
    if scale != 1:
        found.append(f"QUICK LOOK: every run has {100 * scale:g} % of its rounds, so these are not reproduced numbers.")
    changed = [f"{name}={value}" for name, value in changes.items() if name not in MACHINE_OPTIONS]
    if changed:
        found.append(f"CHANGED: {', '.join(changed)}, where the paper's setting is another.")
    return found


# -- from cells to runs -----------------------------------------------------------------------------------------
def make_plan(
    recipe: Recipe,
    rows: Sequence[Row],
    columns: Sequence[Column],
    seeds: Sequence[int],
    place: Path,
    change: Callable[[Config], Config],
) -> Plan:
    """Which runs the cells need. A cell that cannot be run here is left out, with a sentence that says why."""
    plan = Plan()
    problems: dict[str, str] = {}  # what is wrong with a data set is found out once
    parts = {part.name for column in columns if column.average for part in recipe.parts(column)}
    planned: set[Path] = set()
    for row, column in recipe.cells():
        is_reference = column.relative_to == row.label
        if not (row in rows or is_reference) or not (column in columns or column.name in parts):
            continue
        config = recording(change(recipe.config(row, column)), wanted_diagnostics(recipe, rows, columns))
        directory = place / directory_name(config)
        plan.runs[row.label, column.name] = directory
        if directory in planned:
            continue
        finished = all(has_finished(directory / f"seed{seed}") for seed in seeds)
        problem = "" if finished else unusable(config) or _unreadable(config, problems)
        if problem:
            plan.skipped[row.label, column.name] = problem
            continue
        planned.add(directory)
        label = f"{row.label}, {column.name}"
        plan.jobs += [Job(label, seed, config.replace(seed=seed), directory / f"seed{seed}") for seed in seeds]
    return plan


def directory_name(config: Config) -> str:
    """The same for equal configurations, whatever their seed."""
    return f"{slug(config.method)[:60]}-{slug(parse(config.data).name)}-{fingerprint(config.replace(seed=0))}"


def unusable(config: Config) -> str:
    """One sentence if there is no such method, network or partition, or one of them does not have that option."""
    try:
        methods.build(config.method)
        partitions.build(config.partition)
        model = parse(config.model)
        if ":" not in model.name:  # what comes after timm: only timm knows
            MODELS.entry(model.name).check_options("model", model.options)
    except FedkeelError as error:
        return f"Skipped: {error}"
    return ""


def _unreadable(config: Config, problems: dict[str, str]) -> str:
    if config.data not in problems:
        try:
            # Whether it can be read at all: a partition that fails is the failure of that cell alone.
            load_federation(config.replace(partition="domains", unseen="", subsample=0))
            problems[config.data] = ""
        except FedkeelError as error:
            problems[config.data] = f"Skipped: {error}"
    return problems[config.data]


def run_missing(planned: Sequence[Job], jobs: int | None, observer: JobsObserver) -> dict[Path, str]:
    """Run what is not finished; returns why a run failed, by its directory."""
    planned = list({job.directory: job for job in reversed(planned)}.values())[::-1]  # two recipes may need one run
    finished = [job for job in planned if has_finished(job.directory)]
    tell_of_other_code(finished, observer.note)
    todo = [job for job in planned if job not in finished]
    processes = choose_jobs(jobs, {str(job): job.config for job in todo})
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
    for job in finished:
        what = ""
        with suppress(FedkeelError):  # a method that is no more: its run is shown all the same
            what = other_method(job.directory, Composition.of(methods.build(job.config.method)))
        if what and what not in told:
            told.add(what)
            note(f"'{job.directory}' is used again, though the code of {what} has changed: remove it to train anew.")


# -- from runs to numbers ---------------------------------------------------------------------------------------
def gather(
    recipe: Recipe, rows: Sequence[Row], columns: Sequence[Column], plan: Plan, seeds: Sequence[int]
) -> dict[Key, Entry]:
    """Every cell that was asked for, in the order of the table."""

    def ours(row: Row, column: Column) -> dict[int, float]:
        if column.average:
            parts = [ours(row, part) for part in recipe.parts(column)]
            return {seed: fmean(part[seed] for part in parts) for seed in seeds if all(seed in part for part in parts)}
        directory = plan.runs.get((row.label, column.name))
        if directory is None:
            return {}
        runs = {seed: directory / f"seed{seed}" for seed in seeds if has_finished(directory / f"seed{seed}")}
        found = {}
        for seed, run in runs.items():
            try:
                value = read(Run(run), recipe.reading(row, column))
            except FedkeelError as error:
                plan.skipped[row.label, column.name] = str(error)
                continue
            if value is not None:
                found[seed] = value
            if where := (Run(run).summary or {}).get("diverged_domains"):
                cell = f"{row.label}, {column.name}, seed {seed}"
                plan.diverged.setdefault(run, f"{cell} diverged: its test loss is not finite on {', '.join(where)}.")
        if not column.relative_to:
            return found
        reference = ours(
            next(other for other in recipe.rows if other.label == column.relative_to), replace(column, relative_to="")
        )
        return {seed: value / reference[seed] for seed, value in found.items() if seed in reference}

    return {
        (row.label, column.name): Entry(ours(row, column), recipe.published.get((row.label, column.name)))
        for row in rows
        for column in columns
    }


def read(run: Run, reading: Mapping[str, str]) -> float | None:
    """The number of a finished run that a cell shows: accuracies in %, times in seconds."""
    kind = reading.get("read", "accuracy")
    if kind in DIAGNOSTICS:
        path = run.directory / analysis.FOLDER / f"{kind}.json"
        return analysis.number(json.loads(path.read_text())) if path.exists() else None
    if kind == "seconds":
        return epoch_seconds(run)
    summary: dict[str, Any] = run.summary or {}
    if "statistics" in reading:
        summary = summarise_run(run, summary["unseen_domains"], reading["statistics"])
    if "domain" in reading:
        domain, there = reading["domain"], summary["domains"]
        if domain not in there:
            raise FedkeelError(f"The data '{run.config.data}' has no domain '{domain}': {nearest(domain, there)}")
        value = there[domain]
    else:
        value = summary[{"accuracy": "accuracy", "samples": "samples_accuracy", "unseen": "unseen"}[kind]]
    return None if value is None else 100 * float(value)


def epoch_seconds(run: Run) -> float | None:
    """Mean time of one client's local epoch. The first round is left out: it also prepares the device."""
    path = run.directory / "timing.jsonl"
    times = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    clients = {record["round"]: record["clients"] for record in run.records("round")}
    return fmean(t["train"] / clients[t["round"]] for t in times[1:]) / run.config.local_epochs if times[1:] else None


# -- what else the paper shows ----------------------------------------------------------------------------------
def wanted_diagnostics(recipe: Recipe, rows: Sequence[Row], columns: Sequence[Column]) -> list[str]:
    """Those that the recipe names, and those that a cell reads."""
    read_here = [recipe.reading(row, column).get("read", "") for row in rows for column in columns]
    return list(dict.fromkeys([*recipe.diagnostics, *(name for name in read_here if name in DIAGNOSTICS)]))


def recording(config: Config, diagnostics: Sequence[str]) -> Config:
    """The same run, with what is recorded while it trains; its own records can be looked at at any time."""
    names = [name for name in diagnostics if not analysis.build(name).of_records]
    return config.replace(record=",".join(names)) if names else config


def diagnose(plan: Plan, diagnostics: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Make the diagnostics of every finished run that lacks them; returns a sentence for what could not be made."""
    problems: dict[str, None] = {}
    for directory in dict.fromkeys(plan.runs.values()):
        for run in (directory / f"seed{seed}" for seed in seeds):
            for name in diagnostics if has_finished(run) else ():
                if (run / analysis.FOLDER / f"{name}.json").exists():
                    continue
                try:
                    analysis.run(name, run)
                except FedkeelError as error:
                    problems[f"The diagnostic '{name}' is not shown: {error}"] = None
    return list(problems)
