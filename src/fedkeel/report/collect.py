"""What a report shows, read from run directories.

Runs that were made on the same federation form a group: one table, one set of curves. Runs on different data are never
put into one table, and the report says so. What cannot be read or is not finished is named and left out of the means;
the rounds that an interrupted run has done are still in the curves.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedkeel.config import Config
from fedkeel.errors import FedkeelError
from fedkeel.experiments.comparison import find_trials, labels
from fedkeel.experiments.tables import Results
from fedkeel.report.diagnostics import ALL_RUNS, Diagnostic, Source, read_diagnostics
from fedkeel.runs.run import PYTHON_OBJECT, Run
from fedkeel.runs.store import fingerprint

FEDERATION = ("data", "partition", "unseen", "subsample")  # runs that share these were made on the same data
COUNTED = ("seconds", "rounds", "bytes_up", "bytes_down", "questions", "epsilon")  # of a summary
MOST_NUMBERS = 240_000  # of all curves together: about two megabytes


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


@dataclass(frozen=True)
class Curve:
    """One method's curve: mean and spread over seeds at each round, and of how many seeds."""

    rounds: list[int]
    mean: list[float]
    std: list[float | None]
    seeds: list[int]


@dataclass(frozen=True)
class Group:
    """The runs of one federation."""

    members: list[Member]
    diagnostics: list[Diagnostic]

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(member.label for member in self.members))

    @property
    def results(self) -> Results:
        """Of the finished runs."""
        return Results.of((m.label, m.seed, m.summary) for m in self.members if m.summary is not None)

    @property
    def metrics(self) -> list[Metric]:
        return list(dict.fromkeys(metric for member in self.members for metric in member.curves))

    def of(self, label: str) -> list[Member]:
        return [member for member in self.members if member.label == label]

    def curve(self, label: str, metric: Metric) -> Curve:
        """Over the seeds that have that round, so that a run that was interrupted counts as far as it came."""
        mine = [member.curves[metric] for member in self.of(label) if metric in member.curves]
        rounds = sorted({round for curve in mine for round in curve})
        at = [[curve[round] for curve in mine if round in curve] for round in rounds]
        spread = [statistics.stdev(values) if len(values) > 1 else None for values in at]
        return Curve(rounds, [statistics.fmean(values) for values in at], spread, [len(values) for values in at])


@dataclass(frozen=True)
class Collected:
    """All that a report shows."""

    directories: list[Path]
    groups: list[Group]
    notices: list[str] = field(default_factory=list)

    @property
    def members(self) -> list[Member]:
        return [member for group in self.groups for member in group.members]


def collect(directories: Sequence[str | Path]) -> Collected:
    """From run directories, directories of `fedkeel compare`, and folders that hold run directories."""
    if not directories:
        raise FedkeelError("There is nothing to report: give a run directory or one that 'fedkeel compare' made.")
    notices: list[str] = []
    placed, missing = find_runs(directories)
    if missing:
        notices.append(f"Not started yet: {', '.join(missing)}.")
    members = [read_member(label, run, notices) for label, run in placed]
    if not members:
        raise FedkeelError(f"No run of '{directories[0]}' has started yet: there is nothing to report.")
    groups = []
    for runs in by_federation(members):
        named = unique(name_apart(runs), notices)
        groups.append(Group(named, diagnostics_of(named, notices)))
    notices += unfinished([member for group in groups for member in group.members if member.summary is None])
    if len(groups) > 1:
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
    for trial in (trial for directory in directories for trial in find_trials(directory)):
        if trial.label and not (trial.directory / "config.toml").exists():
            missing.append(str(trial))
        else:
            found.setdefault(trial.directory.resolve(), (trial.label, Run(trial.directory)))
    return list(found.values()), missing


class ReadOnce(Run):
    """A run whose metrics are parsed a single time, though they are asked for again and again."""

    def readable(self) -> tuple[list[dict[str, Any]], int]:
        return self._read

    @cached_property
    def _read(self) -> tuple[list[dict[str, Any]], int]:
        return super().readable()


def read_member(label: str, run: Run, notices: list[str]) -> Member:
    reading = ReadOnce(run.directory)  # forgotten when this is done: the metrics of forty runs are large
    summary: dict[str, Any] | None = None
    curves: dict[Metric, dict[int, float]] = {}
    try:
        found = run.summary
        summary = usable(found) if found is not None else None
    except (ValueError, KeyError, TypeError) as error:  # the first is also a `FedkeelError`
        notices.append(f"{unreadable(run.directory / 'summary.json', error)} The run is shown as not finished.")
    path = run.directory / "metrics.jsonl"
    try:
        curves = read_curves(reading)
        if lost := reading.readable()[1]:
            lines = "a line" if lost == 1 else f"{lost} lines"
            notices.append(f"'{path}' has {lines} that cannot be read: the curves have a gap there.")
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # the first is also a `FedkeelError`
        notices.append(f"{unreadable(path, error)} The run has no curves here.")
    if summary and not any(metric.is_percent for metric in curves):
        notices.append(f"'{path}' has no evaluated round: the run is in the table and has no curve of accuracy.")
    domains = tuple(summary["domains"]) if summary else ()
    return Member(label, run, summary, curves, domains or tuple(_domains_of(reading, bool(curves))))


def unreadable(path: Path, error: Exception) -> str:
    """A damaged file says itself what is to be done."""
    return str(error) if isinstance(error, FedkeelError) else f"'{path}' cannot be read."


def usable(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary whose numbers are numbers. Without an accuracy it is none; what else is not a number is left out."""
    accuracy = float(summary["accuracy"])
    domains = {str(name): float(value) for name, value in summary["domains"].items() if is_number(value)}
    if not 0 <= accuracy <= 1 + 1e-9 or not domains:
        raise ValueError("no accuracy")
    kept = {name: value for name, value in summary.items() if name not in COUNTED or is_number(value)}
    for name in ("unseen_domains", "untested_domains", "diverged_domains"):
        listed = kept.get(name)
        kept[name] = [entry for entry in listed if isinstance(entry, str)] if isinstance(listed, list) else []
    if kept.get("rounds") == 0:
        del kept["rounds"]
    return {**kept, "accuracy": accuracy, "domains": domains, "result": str(summary["result"])}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _domains_of(run: Run, readable: bool) -> list[str]:
    return [name for entry in (run.scores()[-1:] if readable else []) for name in entry["domains"]]


def read_curves(run: Run) -> dict[Metric, dict[int, float]]:
    """By round. A round that was not evaluated, or whose value is not a number, has no entry."""
    curves: dict[Metric, dict[int, float]] = {}

    def add(metric: Metric, round: int, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            curves.setdefault(metric, {})[int(round)] = float(value)

    tested = run.scores()
    shown = tested[-1]["statistics"] if tested else "global"
    for entry in tested:
        add(Metric("average", "Test accuracy, mean over domains"), entry["round"], entry["average"])
    for entry in tested:
        add(Metric("unseen", "Test accuracy, mean over unseen domains"), entry["round"], entry.get("unseen"))
    for domain in dict.fromkeys(name for entry in tested for name in entry["domains"]):
        for entry in tested:
            add(Metric(f"domain {domain}", f"Test accuracy, {domain}"), entry["round"], entry["domains"].get(domain))
    if shown == "global":
        for entry in run.scores(statistics="batch"):
            add(Metric("batch", "Test accuracy with batch statistics"), entry["round"], entry["average"])
    for entry in run.scores("validation"):
        add(Metric("validation", "Validation accuracy, mean over domains"), entry["round"], entry["average"])
    for entry in tested:
        add(Metric("test-loss", "Test loss", is_percent=False), entry["round"], entry.get("loss"))
    for entry in run.records("round"):
        add(Metric("train-loss", "Training loss", is_percent=False), entry["round"], entry.get("loss"))
    return curves


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


def diagnostics_of(members: Sequence[Member], notices: list[str]) -> list[Diagnostic]:
    """The first seed of every method first: what the page has no room for is then a further seed's."""
    turn = {str(m): sum(o.label == m.label for o in members[:place]) for place, m in enumerate(members)}
    ordered = sorted(members, key=lambda member: turn[str(member)])
    sources = [Source(str(member), member.run.directory) for member in ordered]
    order = [str(member) for member in members]
    return [
        replace(found, runs=dict(sorted(found.runs.items(), key=lambda item: order.index(item[0]))))
        if ALL_RUNS not in found.runs
        else found
        for found in read_diagnostics(sources, notices)
    ]


def unfinished(members: Sequence[Member]) -> list[str]:
    if not members:
        return []
    names = "; ".join(f"{member} ({member.rounds_done} of {member.config.rounds} rounds)" for member in members)
    continues = "continues it" if len(members) == 1 else "continues the first of them"
    return [
        f"Not finished: {names}. What was recorded is in the curves; nothing of it counts in the table. "
        f"{shlex.join(['fedkeel', 'resume', str(members[0].run.directory)])} {continues}."
    ]


def thinned(curve: Curve, most: int) -> Curve:
    """At most about `most` rounds, evenly spaced, the last among them."""
    count = len(curve.rounds)
    if count <= most:
        return curve
    steps = range(most)
    chosen = sorted({round(step * (count - 1) / (most - 1)) for step in steps})
    return Curve(
        [curve.rounds[i] for i in chosen],
        [curve.mean[i] for i in chosen],
        [curve.std[i] for i in chosen],
        [curve.seeds[i] for i in chosen],
    )


def most_rounds(groups: Sequence[Group]) -> int:
    """How many rounds of a curve the page has room for."""
    curves = sum(len(group.labels) * len(group.metrics) for group in groups)
    return max(50, MOST_NUMBERS // (2 * max(1, curves)))
