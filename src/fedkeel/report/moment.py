"""A run, or a comparison, as it is at this moment: how far it is, what was noted, and its curves so far."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedkeel.config import from_one
from fedkeel.errors import FedkeelError
from fedkeel.experiments.comparison import FILE as COMPARISON
from fedkeel.files import below
from fedkeel.options import as_path
from fedkeel.report.clients import Contribution
from fedkeel.report.collect import Collected, Group, Member, by_federation, find_runs, name_apart, read_member, unique
from fedkeel.report.page import heading, told_apart
from fedkeel.report.sections import federation_names
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
        if not self._places() and any(path.is_file() for path in self.directory.rglob("[!.]*")):
            raise FedkeelError(
                f"'{self.directory}' holds no run: give the directory of one, or an empty one where a run will begin."
            )

    def _places(self) -> list[Path]:
        """The comparisons, which know of runs to come, and the directory itself where a run has begun."""
        comparisons = [path.parent for path in below(self.directory, COMPARISON)]
        return [*dict.fromkeys([*comparisons, *(self.directory for _ in below(self.directory, "config.toml"))])]

    def look(self) -> tuple[Document, list[Group]]:
        """What there is to tell, as JSON can hold it, and the runs of each federation, for their curves."""
        notices: list[str] = []
        placed, missing = find_runs(self._places())
        found = by_federation([self._member(label, run, notices) for label, run in placed])
        groups = [Group(unique(name_apart(own), notices), [], f"g{number}") for number, own in enumerate(found)]
        members = [member for group in groups for member in group.members]
        named = zip(federation_names(groups), groups, strict=True)
        places = [f" ({name})" * (len(groups) > 1) for name, group in named for _ in group.members]
        runs = [progress(member, place) for member, place in zip(members, places, strict=True)]
        runs += [{"run": name, "state": WAITING, "share": 0.0} for name in missing]
        notes = [{"at": None, "run": "", "text": text} for text in notices]
        noted = ((row["run"], live.read(m.run.directory)) for row, m in zip(runs, members, strict=False))
        notes += [{**note, "run": run} for run, now in noted for note in now.get("notes", ())]
        document = {
            "title": title(groups, runs),
            "directory": str(self.directory),
            "state": state_of(runs),
            "share": fmean(row["share"] for row in runs) if runs else 0.0,
            "left": time_left(runs),
            "runs": runs,
            "notes": sorted(notes, key=lambda note: note["at"] or 0),
        }
        return document | (taking_part(members[0]) if len(members) == 1 else {}), groups

    def _member(self, label: str, run: Run, notices: list[str]) -> Member:
        files = [run.directory / name for name in (METRICS, TIMING, SUMMARY)]
        stamp = (label, *(file.exists() and (file.stat().st_size, file.stat().st_mtime_ns) for file in files))
        known = self._read.get(run.directory)
        if known is None or known[0] != stamp:
            own: list[str] = []
            known = self._read[run.directory] = (stamp, read_member(label, run, own), own)
        notices += known[2]
        return known[1]


def title(groups: list[Group], runs: Sequence[Document]) -> str:
    methods = {row["run"].rpartition(" seed ")[0] for row in runs}  # those to come, too
    if len(groups) == 1 and len(methods) > 1:
        return f"{len(methods)} methods on {told_apart(groups)[0]}"
    return heading(Collected([], groups)) if groups else "Nothing has begun yet"


def progress(member: Member, place: str = "") -> Document:
    """How far one run is. `round` is the one that is under way, or the last, from 1; 0 while it is being prepared."""
    directory, summary = member.run.directory, member.summary or {}
    now, rounds = live.read(directory), summary.get("rounds", member.config.rounds)
    state = FINISHED if summary else RUNNING if live.is_running(now) else STOPPED
    done, round = float(member.rounds_done), member.rounds_done
    if state == RUNNING:
        at = max(now["round"] or 0, member.rounds_done)  # the records may be ahead
        done = at + (now["done"] / now["clients"] if now["clients"] and at == now["round"] else 0)
        round = 0 if now["round"] is None else min(from_one(at), rounds)
    share = 1.0 if summary else min(done / rounds, 1.0)
    times = [seconds_of(line) for line in read_timing(directory)[-LATEST:]]
    whole = fmean(times) * rounds if times else None
    curve = next((curve for metric, curve in member.curves.items() if metric.key == "average"), {})
    return {
        "run": f"{member.label} seed {member.seed}{place}",
        "state": state,
        "round": round,
        "rounds": rounds,
        "share": share,
        "accuracy": summary["accuracy"] if summary else curve[max(curve)] if curve else None,
        "clients": [now["done"], now["clients"]] if state == RUNNING else [],
        "seconds": whole,  # of all its rounds, about
        "left": whole * (1 - share) if whole is not None and state == RUNNING else None,
        "reason": (now.get("ended") or "") if state == STOPPED else "",
        "ended": now["at"] if now.get("ended") == "" else None,
        "continue": how_to_continue(directory) if state == STOPPED else "",
    }


def state_of(runs: Sequence[Document]) -> str:
    states = {row["state"] for row in runs}
    if states <= {WAITING} or states == {FINISHED}:
        return FINISHED if states == {FINISHED} else WAITING
    # A comparison begins the next run a moment after one has ended.
    just_now = any(time.time() - row["ended"] < BETWEEN for row in runs if row.get("ended") is not None)
    goes_on = RUNNING in states or (just_now and WAITING in states and STOPPED not in states)
    return RUNNING if goes_on else STOPPED


def time_left(runs: Sequence[Document]) -> float | None:
    """Seconds, of as many at once as there are now; None where there is nothing to go by."""
    running = [row for row in runs if row["state"] == RUNNING]
    known = [row["seconds"] for row in runs if row.get("seconds") is not None]
    if not running or not known:
        return None
    todo = [row.get("left") for row in runs if row["state"] in (RUNNING, WAITING)]
    return sum(fmean(known) if left is None else left for left in todo) / len(running)


def taking_part(member: Member) -> Document:
    """The clients of a run, what they gave and lost; over a network its sites, and what each does."""
    sites = live.read(member.run.directory).get("sites", {})
    names = sorted(sites) or [*member.clients]
    found: dict[str, Document] = {}
    for name in names:
        one = member.clients.get(name, Contribution())
        gave = {"updates": one.updates, "dropped": one.dropped, "reason": one.reason, "loss": one.loss}
        last = one.seconds[-1] if one.seconds else None
        found[name] = {**sites.get(name, {}), **gave, "seconds": last}
    return {"sites" if sites else "clients": found}
