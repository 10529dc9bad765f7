"""What a report shows, read from run directories.

Runs that were made on the same federation form a group: one table, one set of curves. Runs on different data are never
put into one table, and the report says so. What cannot be read or is not finished is named and left out of the means;
the rounds that an interrupted run has done are still in the curves.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fedkeel.config import Config
from fedkeel.errors import FedkeelError
from fedkeel.experiments.comparison import comparisons_in, find_trials, labels
from fedkeel.experiments.difference import Cell
from fedkeel.experiments.tables import Results
from fedkeel.report.clients import Contribution, read_clients
from fedkeel.report.diagnostics import ALL_RUNS, DiagnosticFigures, read_diagnostics
from fedkeel.runs.run import PYTHON_OBJECT, Run
from fedkeel.runs.store import fingerprint
from fedkeel.runs.summary import IF_THERE, RESULTS, SUMMARY, tested_images

BESIDE = {"batch": "accuracy with batch statistics", "site": "accuracy, calibrated to each site"}
FEDERATION = ("data", "partition", "unseen", "subsample")  # runs that share these were made on the same data


@dataclass(frozen=True)
class Metric:
    """Something that has a curve."""

    key: str
    name: str
    is_percent: bool = True


@dataclass(frozen=True)
class Member:
    """One run in a report. `summary` is None while it is not finished."""

    label: str
    run: Run
    summary: dict[str, Any] | None
    curves: dict[Metric, dict[int, float]]
    domains: tuple[str, ...]
    test_images: dict[str, int] = field(default_factory=dict)  # by domain
    clients: dict[str, Contribution] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        return self.run.config

    @property
    def seed(self) -> int:
        return self.run.config.seed

    @property
    def rounds_done(self) -> int:
        return 1 + max((round for curve in self.curves.values() for round in curve), default=-1)

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}"


class Curve(NamedTuple):
    """One method's curve: mean and spread over seeds at each round, and of how many seeds."""

    rounds: list[int]
    mean: list[float]
    std: list[float | None]
    seeds: list[int]

    def thinned(self, most: int) -> Curve:
        """At most about `most` rounds, evenly spaced, the last among them."""
        count = len(self.rounds)
        if count <= most:
            return self
        shown = sorted({round(step * (count - 1) / (most - 1)) for step in range(most)})
        return Curve(*([column[i] for i in shown] for column in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Group:
    """The runs of one federation."""

    members: list[Member]
    diagnostics: list[DiagnosticFigures]
    anchor: str = "g0"  # its place on the page
    metric: str = "accuracy"  # of its table

    @cached_property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(member.label for member in self.members))

    @cached_property
    def results(self) -> Results:
        """Of the finished runs."""
        found = Results.of((m.label, m.seed, m.summary) for m in self.members if m.summary is not None)
        return replace(found, images=self.test_images)

    @cached_property
    def table(self) -> Results:
        """By another metric, where one was chosen."""
        finished = [(member.label, member.run) for member in self.members if member.summary is not None]
        return self.results if self.metric == "accuracy" else Results.by(self.metric, finished)

    @cached_property
    def measured(self) -> list[Member]:
        """Of every method, the first run that has measures by site and class."""
        having = (next((m for m in self.of(label) if m.summary and m.run.has_measures), None) for label in self.labels)
        return [member for member in having if member is not None]

    @cached_property
    def test_images(self) -> dict[str, int]:
        """By domain, of the first run that knows."""
        return next((member.test_images for member in self.members if member.test_images), {})

    @cached_property
    def metrics(self) -> list[Metric]:
        return list(dict.fromkeys(metric for member in self.members for metric in member.curves))

    def of(self, label: str) -> list[Member]:
        return [member for member in self.members if member.label == label]

    def curve(self, label: str, metric: Metric) -> Curve:
        """Over the seeds that have that round, so that a run that was interrupted counts as far as it came."""
        mine = [member.curves[metric] for member in self.of(label) if metric in member.curves]
        rounds = sorted({round for curve in mine for round in curve})
        at = [[curve[round] for curve in mine if round in curve] for round in rounds]
        cells = [Cell(dict(enumerate(values))) for values in at]
        return Curve(rounds, [cell.mean for cell in cells], [cell.std for cell in cells], [len(v) for v in at])


@dataclass(frozen=True)
class Collected:
    """All that a report shows."""

    directories: list[Path]
    groups: list[Group]
    notices: list[str] = field(default_factory=list)

    @property
    def members(self) -> list[Member]:
        return [member for group in self.groups for member in group.members]


def collect(directories: Sequence[str | Path], *, metric: str = "accuracy") -> Collected:
    """From run directories, directories of `fedkeel compare`, and folders that hold run directories.

    No example here: see `write_tables`, which takes what it returns.
    """
    if not directories:
        raise FedkeelError("There is nothing to report: give a run directory or one that 'fedkeel compare' made.")
    notices: list[str] = []
    placed, missing = find_runs(directories)
    if missing:
        notices.append(f"Not started yet: {', '.join(missing)}.")
    members = [read_member(label, run, notices) for label, run in placed]
    if not members:
        raise FedkeelError(f"No run of '{directories[0]}' has started yet: there is nothing to report.")
    groups: list[Group] = []
    for runs in by_federation(members):
        named = unique(name_apart(runs), notices)
        groups.append(Group(named, diagnostics_of(named, notices), f"g{len(groups)}", metric))
        notices += remarks(groups[-1])
    notices += unfinished([member for group in groups for member in group.members if member.summary is None])
    if len(groups) > 1 and (len(directories) > 1 or comparisons_in(directories[0]) == [Path(directories[0])]):
        differ = ", ".join(name for name in FEDERATION if len({getattr(m.config, name) for m in members}) > 1)
        notices.insert(
            0,
            f"These runs were made on {len(groups)} different federations ({differ or 'domains'} differ): each has its "
            "own part of this page, and their numbers are not compared.",
        )
    return Collected([Path(directory) for directory in directories], groups, notices)


def find_runs(directories: Iterable[str | Path]) -> tuple[list[tuple[str, Run]], list[str]]:
    """Each run with its name in a comparison (empty where it is in none), and the names of those not started."""
    found: dict[Path, tuple[str, Run]] = {}
    missing: list[str] = []
    places = dict.fromkeys(place for directory in directories for place in comparisons_in(directory))
    for trial in (trial for place in places for trial in find_trials(place)):
        if trial.label and not (trial.directory / "config.toml").exists():
            missing.append(str(trial))
        else:
            found.setdefault(trial.directory.resolve(), (trial.label, Run(trial.directory)))
    return list(found.values()), missing


def read_member(label: str, run: Run, notices: list[str]) -> Member:
    summary: dict[str, Any] | None = None
    curves: dict[Metric, dict[int, float]] = {}
    path = run.directory / "metrics.jsonl"

    def tell(file: str, error: Exception, then: str) -> None:
        """A damaged file says itself what is to be done."""
        problem = str(error) if isinstance(error, FedkeelError) else f"'{run.directory / file}' cannot be read."
        notices.append(f"{problem} {then}")

    try:
        summary = usable(run.summary)
    except (ValueError, KeyError, TypeError) as error:  # the first is also a `FedkeelError`
        tell("summary.json", error, "The run is shown as not finished.")
    tested: list[dict[str, Any]] = []
    sizes: dict[str, int] = {}
    clients: dict[str, Contribution] = {}
    try:
        # Parsed once, and forgotten when this is done: the metrics of forty runs are large.
        parsed, reading = run.readable(), copy(run)
        reading.readable = lambda: parsed  # type: ignore[method-assign]
        curves, tested = read_curves(reading), reading.scores()[-1:]
        sizes, clients = tested_images(reading), read_clients(reading)
        if lost := parsed[1]:
            lines = "a line" if lost == 1 else f"{lost} lines"
            notices.append(f"'{path}' has {lines} that cannot be read: the curves have a gap there.")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        tell(path.name, error, "The run has no curves here.")
    if summary and not any(metric.is_percent for metric in curves):
        notices.append(f"'{path}' has no evaluated round: the run is in the table and has no curve of accuracy.")
    domains = tuple(name for entry in ([summary] if summary else tested) for name in entry["domains"])
    return Member(label, run, summary, curves, domains, sizes, clients)


def usable(summary: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What of a summary can be shown: without results it is none, and of the rest what is not as a run writes it is
    left out."""
    if summary is None:
        return None
    rules = {**SUMMARY, **IF_THERE}
    sound = {name: value for name, value in summary.items() if name not in rules or rules[name](value)}
    if not sound.get("domains") or not sound.keys() >= RESULTS.keys():
        raise ValueError("no accuracy")
    if sound.get("rounds") == 0:
        del sound["rounds"]
    return sound


def read_curves(run: Run) -> dict[Metric, dict[int, float]]:
    """By round. A round that was not evaluated, or whose value is not a number, has no entry."""
    tested, rounds = run.scores(), run.records("round")
    beside = {kind: run.scores(statistics=kind) for kind in run.config.statistics[1:]}
    on = run.config.evaluate_on.capitalize()
    curves = {
        Metric("average", f"{on} accuracy, mean over domains"): {e["round"]: e["average"] for e in tested},
        Metric("unseen", f"{on} accuracy, mean over unseen domains"): {e["round"]: e.get("unseen") for e in tested},
    }
    for name in dict.fromkeys(name for entry in tested for name in entry["domains"]):
        domain = Metric(f"domain {name}", f"{on} accuracy, {name}")
        curves[domain] = {e["round"]: e["domains"].get(name) for e in tested}
    validation = Metric("validation", "Validation accuracy, mean over domains")
    curves |= {
        **{
            Metric(kind, f"{on} {BESIDE[kind]}"): {e["round"]: e["average"] for e in scores}
            for kind, scores in beside.items()
        },
        validation: {e["round"]: e["average"] for e in run.scores("validation") if on == "Test"},
        Metric("test-loss", f"{on} loss", is_percent=False): {e["round"]: e.get("loss") for e in tested},
        Metric("train-loss", "Training loss", is_percent=False): {e["round"]: e.get("loss") for e in rounds},
    }
    finite = {
        metric: {int(r): float(v) for r, v in curve.items() if v is not None and math.isfinite(v)}
        for metric, curve in curves.items()
    }
    return {metric: curve for metric, curve in finite.items() if curve}


def by_federation(members: Sequence[Member]) -> list[list[Member]]:
    groups: dict[tuple[Any, ...], list[Member]] = {}
    for member in members:
        config = member.config
        # What was given in Python has no name to compare: its domains must do.
        domains = frozenset(member.domains) if config.data == PYTHON_OBJECT else frozenset()
        groups.setdefault((*(getattr(config, name) for name in FEDERATION), domains), []).append(member)
    return list(groups.values())


def name_apart(members: Sequence[Member]) -> list[Member]:
    """Names from the comparison, or the method; all made anew when one name would stand for two configurations."""
    loose = [member for member in members if not member.label]
    fresh = iter(labels([member.run for member in loose]))
    named = [replace(member, label=member.label or next(fresh)) for member in members]
    configurations: dict[str, set[str]] = {}
    for member in named:
        objects = "".join(f" {thing['name']} {thing['digest']}" for thing in member.run.given.values())
        configurations.setdefault(member.label, set()).add(fingerprint(member.config.replace(seed=0)) + objects)
    if all(len(different) == 1 for different in configurations.values()):
        return named
    return [replace(m, label=label) for m, label in zip(members, labels([m.run for m in members]), strict=True)]


def unique(members: Sequence[Member], notices: list[str]) -> list[Member]:
    """One run for each name and seed: a copy must not count as one more seed."""
    kept: dict[str, Member] = {}
    for member in members:
        other = kept.get(str(member))
        if other is None:
            kept[str(member)] = member
            continue
        first, second = (other, member) if other.summary or not member.summary else (member, other)
        kept[str(member)] = first
        notices.append(f"{member} is there twice: '{first.run.directory}' counts, '{second.run.directory}' does not.")
    return list(kept.values())


def diagnostics_of(members: Sequence[Member], notices: list[str]) -> list[DiagnosticFigures]:
    """The first seed of every method first: what the page has no room for is then a further seed's."""
    seeds_before = {str(m): sum(o.label == m.label for o in members[:place]) for place, m in enumerate(members)}
    first_seeds_first = sorted(members, key=lambda member: seeds_before[str(member)])
    found = read_diagnostics({str(member): member.run.directory for member in first_seeds_first}, notices)
    order = [ALL_RUNS, *map(str, members)]
    return [replace(d, runs=dict(sorted(d.runs.items(), key=lambda item: order.index(item[0])))) for d in found]


def remarks(group: Group) -> list[str]:
    """What is remarkable about the resulting models, or why that is not known."""
    found = []
    for member in group.measured:
        try:
            found += [f"{member}: {sentence}" for sentence in member.run.measures.notes()]
        except FedkeelError as error:
            found.append(str(error))
            group.measured.remove(member)
    return found


def unfinished(members: Sequence[Member]) -> list[str]:
    names = "; ".join(f"{member} ({member.rounds_done} of {member.config.rounds} rounds)" for member in members)
    continues = "continues it" if len(members) == 1 else "continues the first of them"
    return [
        f"Not finished: {names}. What was recorded is in the curves; nothing of it counts in the table. "
        f"{shlex.join(['fedkeel', 'resume', str(member.run.directory)])} {continues}."
        for member in members[:1]
    ]
