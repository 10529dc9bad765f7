"""A run, or a comparison, as it is at this moment: how far it is, who trains, what was noted, and its curves so far."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from fedkeel.core.readable import percent
from fedkeel.engine.executors.flower.executor import STATUS, read_sites
from fedkeel.errors import FedkeelError
from fedkeel.options import as_path
from fedkeel.report.collect import Group, Member, by_federation, find_runs, name_apart, read_member, unique
from fedkeel.runs import live
from fedkeel.runs.intact import how_to_continue
from fedkeel.runs.run import Run
from fedkeel.runs.store import METRICS, SUMMARY
from fedkeel.runs.timing import FILE as TIMING
from fedkeel.runs.timing import read_timing, seconds_of

LATEST = 10  # rounds that say how long one takes
BETWEEN = 60.0  # seconds after the end of a run in which a comparison may begin the next one
WAITING, RUNNING, STOPPED, FINISHED = "waiting", "running", "stopped", "finished"
Document = dict[str, Any]


@dataclass(frozen=True)
class Moment:
    """What there is to see: numbers that JSON can hold, and the runs of each federation for their curves."""

    document: Document
    groups: list[Group] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)


class Watch:
    """Looks at a directory again and again; of a run that has not changed nothing is read twice."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = as_path(directory)
        self._read: dict[Path, tuple[object, Member, list[str]]] = {}
        if not self.directory.is_dir():
            raise FedkeelError(
                f"'{self.directory}' is no directory: give that of a run or a comparison, or an empty one where a run "
                "will begin."
            )
        if not self._has_begun() and any(path.is_file() for path in self.directory.rglob("[!.]*")):
            raise FedkeelError(f"'{self.directory}' holds no run: give a directory that 'fedkeel run' or 'compare' made.")

    def _has_begun(self) -> bool:
        return any(True for name in ("comparison.json", "config.toml") for _ in self.directory.rglob(name))

    def look(self) -> Moment:
        document: Document = {"directory": str(self.directory), "state": WAITING, "share": 0.0, "left": None}
        if not self._has_begun():
            return Moment({**document, "runs": [], "notes": []})
        placed, missing = find_runs([self.directory])
        notices: list[str] = []
        members = [self._member(label, run, notices) for label, run in placed]
        groups = [
            Group(unique(name_apart(own), notices), [], f"g{number}")
            for number, own in enumerate(by_federation(members))
        ]
        members = [member for group in groups for member in group.members]
        runs = [run_row(member) for member in members]
        runs += [{"run": name, "state": WAITING, "share": 0.0, "training": [], "left": None} for name in missing]
        document |= {"state": state_of(runs), "runs": runs, "left": time_left(runs)}
        document |= {"share": fmean(row["share"] for row in runs) if runs else 0.0}
        document["notes"] = [{"at": None, "run": "", "text": text} for text in notices]
        document["notes"] += sorted((note for member in members for note in notes_of(member)), key=lambda n: n["at"])
        if len(members) == 1:
            document |= taking_part(members[0], runs[0]["training"])
        return Moment(document, groups, members)

    def _member(self, label: str, run: Run, notices: list[str]) -> Member:
        files = [run.directory / name for name in (METRICS, TIMING, SUMMARY)]
        stamp = (label, *(file.exists() and (file.stat().st_size, file.stat().st_mtime_ns) for file in files))
        known = self._read.get(run.directory)
        if known is None or known[0] != stamp:
            own: list[str] = []
            known = self._read[run.directory] = (stamp, read_member(label, run, own), own)
        notices += known[2]
        return known[1]


def run_row(member: Member) -> Document:
    """How far one run is. `round` is the one that is under way, or the last, from 1; 0 while it is being prepared."""
    now, config = live.read(member.run.directory), member.config
    state = FINISHED if member.summary else RUNNING if live.is_running(now) else STOPPED
    done = float(member.rounds_done)
    if state == RUNNING:
        done = (now["round"] or 0) + (now["done"] / now["clients"] if now["clients"] else 0)
    rounds = member.summary.get("rounds", config.rounds) if member.summary else config.rounds
    times = [seconds_of(line) for line in read_timing(member.run.directory)[-LATEST:]]
    whole = fmean(times) * rounds if times else None
    curve = next((curve for metric, curve in member.curves.items() if metric.key == "average"), {})
    accuracy = member.summary["accuracy"] if member.summary else curve[max(curve)] if curve else None
    share = 1.0 if state == FINISHED else min(done / rounds, 1.0)
    return {
        "run": f"{member.label} seed {member.seed}",
        "state": state,
        "round": min(int(done) + (state == RUNNING and now["round"] is not None), rounds),
        "rounds": rounds,
        "share": share,
        "accuracy": accuracy,
        "training": now.get("training", []) if state == RUNNING else [],
        "seconds": whole,  # of all its rounds, about
        "left": whole * (1 - share) if whole is not None and state == RUNNING else None,
        "reason": (now.get("ended") or "").replace(live.STOPPED, "") if state == STOPPED else "",
        "ended": now.get("at") if now.get("ended") == "" else None,
        "directory": str(member.run.directory),
    }


def state_of(runs: Sequence[Document]) -> str:
    states = {row["state"] for row in runs}
    if states <= {WAITING} or states == {FINISHED}:
        return FINISHED if states == {FINISHED} else WAITING
    # A comparison begins the next run a moment after one has ended.
    just_now = any(time.time() - row["ended"] < BETWEEN for row in runs if row.get("ended") is not None)
    going_on = RUNNING in states or (just_now and WAITING in states and STOPPED not in states)
    return RUNNING if going_on else STOPPED


def time_left(runs: Sequence[Document]) -> float | None:
    """Seconds, of as many at once as there are now; None where there is nothing to go by."""
    running = [row for row in runs if row["state"] == RUNNING]
    known = [row["seconds"] for row in runs if row.get("seconds") is not None]
    if not running or not known:
        return None
    typical = fmean(known)
    todo = [row["left"] if row["left"] is not None else typical for row in runs if row["state"] in (RUNNING, WAITING)]
    return sum(todo) / len(running)


def notes_of(member: Member) -> Iterator[Document]:
    for note in live.read(member.run.directory).get("notes", []):
        yield {"at": float(note["at"]), "run": f"{member.label} seed {member.seed}", "text": str(note["text"])}


def taking_part(member: Member, training: Sequence[str]) -> Document:
    """The clients of a run, what they gave and lost; over a network its sites, and what each does."""
    given = {
        name: {
            "training": name in training,
            "updates": one.updates,
            "dropped": one.dropped,
            "reason": one.reason,
            "loss": one.loss,
            "seconds": one.seconds[-1] if one.seconds else None,
        }
        for name, one in member.clients.items()
    }
    nothing = {"updates": 0, "dropped": 0, "reason": "", "loss": None, "seconds": None}
    given |= {name: {"training": True, **nothing} for name in training if name not in given}
    if not (member.run.directory / STATUS).exists():
        return {"clients": given}
    sites = read_sites(member.run.directory)
    return {"sites": {name: {**given.get(name, {"training": False, **nothing}), **sites[name]} for name in sorted(sites)}}


def told(moment: Moment) -> str:
    """Where it stands, in a sentence that changes when something has happened, and not with every second."""
    document, runs = moment.document, moment.document["runs"]
    if document["state"] == WAITING:
        return "Nothing has begun here yet. This page waits."
    if len(runs) > 1:
        states = [row["state"] for row in runs]
        over = f"{states.count(FINISHED)} of {len(runs)} runs are finished"
        going = f", {states.count(RUNNING)} under way" if RUNNING in states else ""
        return f"{over}{going}." if document["state"] != STOPPED else f"Stopped: {over}."
    (row,) = runs
    if row["state"] == RUNNING and row["round"] == 0:
        here = [site["connected"] for site in document.get("sites", {}).values()]
        return f"Waiting for sites: {sum(here)} of {len(here)} are connected." if here else "It is being prepared."
    if row["state"] == RUNNING:
        return f"Round {row['round']} of {row['rounds']}."
    if row["state"] == FINISHED:
        return f"Finished after {row['rounds']} rounds: {percent(row['accuracy'])} %."
    reason = f": {row['reason'].rstrip('.')}" if row["reason"] else ""
    again = how_to_continue(row["directory"])
    return f"Stopped after {row['round']} of {row['rounds']} rounds{reason}. '{again}' continues it."
