"""What a report shows, read from run directories.

Runs that were made on the same federation form a group: one table, one set of curves. Runs on different data are never
put into one table, and the report says so. What cannot be read or is not finished is named and left out of the means;
the rounds that an interrupted run has done are still in the curves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import stdev
from typing import Any, NamedTuple

from fedkeel.config import Config, first_of
from fedkeel.drawing.theme import COLOURS
from fedkeel.errors import FedkeelError
from fedkeel.experiments.comparison import comparisons_in, find_trials, labels
from fedkeel.experiments.difference import Cell
from fedkeel.experiments.tables import Results
from fedkeel.report.clients import Contribution, read_clients
from fedkeel.report.diagnostics import DiagnosticFigures, read_diagnostics
from fedkeel.runs.intact import how_to_continue
from fedkeel.runs.run import PYTHON_OBJECT, Run
from fedkeel.runs.timing import read_timing, seconds_of

BESIDE = {"batch": "accuracy with batch statistics", "site": "accuracy, calibrated to each site"}
BASELINES = ("central", "fedavg")
FEDERATION = ("data", "partition", "unseen", "subsample")  # runs that share these were made on the same data
Record = dict[str, Any]
ByRound = dict[int, float]


class Metric(NamedTuple):
    """Something that has a curve."""

    key: str
    name: str
    is_percent: bool = True


@dataclass(frozen=True)
class Member:
    """One run in a report. `summary` is None while it is not finished."""

    label: str
    run: Run
    summary: dict[str, Any] | None = None
    curves: dict[Metric, ByRound] = field(default_factory=dict)
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
        recorded = (curve for metric, curve in self.curves.items() if metric.key != "seconds")
        return 1 + max((round for curve in recorded for round in curve), default=-1)

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}"


@dataclass(frozen=True)
class Group:
    """The runs of one federation."""

    members: list[Member]
    diagnostics: list[DiagnosticFigures] = field(default_factory=list)
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

    @cached_property
    def ranked(self) -> list[str]:
        """The methods, the best first."""
        average = {row.method: row.average.mean for row in self.results.rows}
        return sorted(self.labels, key=lambda label: -average.get(label, -1.0))

    @cached_property
    def shown(self) -> list[str]:
        """The methods that are seen at first, each with a colour of its own: the best, and the baselines."""
        baselines = (next((x for x in self.ranked if x.partition("@")[0] == name), "") for name in BASELINES)
        best = dict.fromkeys([*filter(None, baselines), *self.ranked])
        return sorted([*best][: len(COLOURS["light"])], key=self.labels.index)

    @cached_property
    def names(self) -> dict[str, str]:
        """Of methods by their labels, in the order of their colours."""
        short = {row.method: self.results.name(row) for row in self.results.rows}
        return {label: short.get(label, label) for label in dict.fromkeys([*self.shown, *self.labels])}

    def two_of(self, runs: Iterable[str]) -> list[int]:
        """The places of two of these runs that are beside each other at first: of the two best methods."""
        methods, first = {str(member): member.label for member in self.members}, dict[str, int]()
        for place, run in enumerate(runs):
            first.setdefault(methods.get(run, ""), place)
        return [first[label] for label in self.ranked if label in first][:2] or [0]

    def of(self, label: str) -> list[Member]:
        return [member for member in self.members if member.label == label]

    def curve(self, label: str, metric: Metric) -> dict[int, Cell]:
        """Over the seeds that have that round, so that a run that was interrupted counts as far as it came."""
        mine = {member.seed: member.curves[metric] for member in self.of(label) if metric in member.curves}
        rounds = sorted({round for curve in mine.values() for round in curve})
        return {round: Cell({seed: curve[round] for seed, curve in mine.items() if round in curve}) for round in rounds}


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
    members = [read_member(label, run, notices) for label, run in placed]
    if not members:
        raise FedkeelError(f"No run of '{directories[0]}' has started yet: there is nothing to report.")
    groups = []
    for runs in grouped(members):
        found = read_diagnostics({str(member): member.run.directory for member in runs}, notices)
        groups.append(Group(runs, found, metric))
        notices += remarks(groups[-1])
    if missing:
        notices.append(f"Not started yet: {', '.join(missing)}.")
    if unfinished := [member for group in groups for member in group.members if member.summary is None]:
        first = how_to_continue(unfinished[0].run.directory)
        done = (f"{member} ({member.rounds_done} of {member.config.rounds} rounds)" for member in unfinished)
        told = "what was recorded is in the curves, and nothing of it counts in the table"
        notices.append(f"Not finished: {'; '.join(done)}: {told}; '{first}' continues the first.")
    if len(groups) > 1 and (len(directories) > 1 or comparisons_in(directories[0]) == [Path(directories[0])]):
        differ = ", ".join(name for name in FEDERATION if len({getattr(m.config, name) for m in members}) > 1)
        told = f"These runs were made on {len(groups)} different federations ({differ or 'domains'} differ)"
        notices.insert(0, f"{told}: each has its own part of this page, and their numbers are not compared.")
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
    """What cannot be read is told, and the run is shown without it."""
    found: dict[str, Any] = {}
    for read in (_summary, _records):
        try:
            found |= read(run, notices)
        except FedkeelError as error:
            notices.append(f"{error} The run is shown without it.")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            notices.append(f"'{run.directory}' has records that no run writes ({error!r}), and is shown without them.")
    return Member(label, run, **found)


def _summary(run: Run, _: list[str]) -> Record:
    return {"summary": run.sound_summary()}


def _records(run: Run, notices: list[str]) -> Record:
    records, lost = run.readable()
    if lost:
        notices.append(f"'{run.directory}' has {lost} lines of metrics that cannot be read: the curves have a gap.")
    timing = read_timing(run.directory)
    curves, clients = read_curves(run.config, records, timing), read_clients(records, timing)
    return {"curves": curves, "clients": clients, "test_images": tested_images(records)}


def scores(records: Sequence[Record], split: str = "test", statistics: str | None = None) -> list[Record]:
    """One of each evaluated round; under the statistics that results are told of, unless others are named."""
    found = [record for record in records if record["kind"] == "scores" and record["split"] == split]
    wanted = statistics or first_of(record["statistics"] for record in found)
    return [record for record in found if record["statistics"] == wanted]


def tested_images(records: Sequence[Record]) -> dict[str, int]:
    """How many images each domain was tested on, in the last round that was evaluated."""
    sizes: dict[str, int] = {}
    last = {(entry["round"], "test", entry["statistics"]) for entry in scores(records)[-1:]}
    for record in (r for r in records if r["kind"] == "evaluation" and "samples" in r):
        if (record["round"], record["split"], record["statistics"]) in last:
            sizes[record["domain"]] = sizes.get(record["domain"], 0) + int(record["samples"])
    return sizes


def read_curves(
    config: Config, records: Sequence[Record], timing: Sequence[Mapping[str, Any]]
) -> dict[Metric, ByRound]:
    """By round. A round that was not evaluated, or whose value is not a number, has no entry."""
    tested, on = scores(records), config.evaluate_on.capitalize()
    rounds = [record for record in records if record["kind"] == "round"]
    unseen = {name.strip() for name in config.unseen.split(",")}
    trained = {e["round"]: [v for n, v in e["domains"].items() if v is not None and n not in unseen] for e in tested}
    curves: dict[Metric, dict[int, Any]] = {
        Metric("average", f"{on} accuracy, mean over domains"): {e["round"]: e["average"] for e in tested},
        Metric("unseen", f"{on} accuracy, mean over unseen domains"): {e["round"]: e.get("unseen") for e in tested},
    }
    for name in dict.fromkeys(name for entry in tested for name in entry["domains"]):
        domain = Metric(f"domain {name}", f"{on} accuracy, {name}")
        curves[domain] = {e["round"]: e["domains"].get(name) for e in tested}
    if any(len(values) > 1 for values in trained.values()):
        spread = Metric("spread", f"{on} accuracy, standard deviation over trained domains")
        curves[Metric("worst", f"{on} accuracy, worst trained domain")] = {r: min(v) for r, v in trained.items() if v}
        curves[spread] = {r: stdev(v) for r, v in trained.items() if len(v) > 1}
    for kind in config.statistics[1:]:
        beside = scores(records, statistics=kind)
        curves[Metric(kind, f"{on} {BESIDE[kind]}")] = {e["round"]: e["average"] for e in beside}
    validation = scores(records, "validation") if on == "Test" else []
    traffic = {r["round"]: (r["bytes_up"] + r["bytes_down"]) / 1e6 for r in rounds if "bytes_up" in r}
    curves |= {
        Metric("validation", "Validation accuracy, mean over domains"): {e["round"]: e["average"] for e in validation},
        Metric("test-loss", f"{on} loss", False): {e["round"]: e.get("loss") for e in tested},
        Metric("train-loss", "Training loss", False): {e["round"]: e.get("loss") for e in rounds},
        Metric("traffic", "MB of a round, up and down, all clients", False): traffic,
        Metric("seconds", "Seconds of a round", False): {line["round"]: seconds_of(line) for line in timing},
    }
    finite = {
        metric: {int(r): float(v) for r, v in curve.items() if v is not None and math.isfinite(v)}
        for metric, curve in curves.items()
    }
    return {metric: curve for metric, curve in finite.items() if curve}


def grouped(members: Sequence[Member]) -> list[list[Member]]:
    """The runs of each federation, each with the name that it has in a comparison; where some are in none, or one name
    stands for two configurations, all with names that say in what they differ."""
    groups: dict[tuple[Any, ...], list[Member]] = {}
    for member in members:
        # What was given in Python has no name to compare: its domains must do.
        domains = frozenset(member.test_images) if member.config.data == PYTHON_OBJECT else frozenset()
        groups.setdefault((*(getattr(member.config, name) for name in FEDERATION), domains), []).append(member)
    found = []
    for group in groups.values():
        fresh = labels([member.run for member in group])
        names = {(member.label, name) for member, name in zip(group, fresh, strict=True)}
        keep = all(member.label for member in group) and len(names) == len({label for label, _ in names})
        found.append(group if keep else [replace(m, label=name) for m, name in zip(group, fresh, strict=True)])
    return found


def remarks(group: Group) -> list[str]:
    """What is remarkable about the resulting models, or why that is not known."""
    found = []
    for member in list(group.measured):
        try:
            found += [f"{member}: {sentence}" for sentence in member.run.measures.notes()]
        except FedkeelError as error:
            found.append(str(error))
            group.measured.remove(member)
    return found
