"""A run, or a comparison, as it is at this moment: how far it is, what was noted, and its curves so far."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from fedkeel.config import from_one
from fedkeel.errors import FedkeelError
from fedkeel.experiments.comparison import FILE as COMPARISON
from fedkeel.files import below
from fedkeel.report.collect import Group, Member, find_runs, grouped, read_member
from fedkeel.runs import live
from fedkeel.runs.intact import how_to_continue
from fedkeel.runs.run import Run
from fedkeel.runs.timing import read_timing, seconds_of

LATEST = 10  # rounds that say how long one takes
STATES = STOPPED, RUNNING, WAITING, FINISHED = "stopped", "running", "waiting", "finished"
Document = dict[str, Any]


def checked(directory: Path) -> Path:
    """A folder that has runs, or that is empty where one will begin."""
    if directory.is_dir() and (
        below(directory, "config.toml") or not any(p.is_file() for p in directory.rglob("[!.]*"))
    ):
        return directory
    raise FedkeelError(
        f"'{directory}' holds no run: give the directory of one, or an empty one where a run will begin."
    )


def look(directory: Path) -> tuple[Document, list[Group]]:
    """What there is to tell, as JSON can hold it, and the runs of each federation; nothing where none has begun."""
    # A comparison knows of runs to come; a folder is asked itself once a run has begun.
    places = [path.parent for path in below(directory, COMPARISON)]
    placed, missing = find_runs([*places, *([directory] if below(directory, "config.toml") else [])])
    found = [_member(label, str(run.directory), _stamp(run.directory)) for label, run in placed]
    groups = [Group(members) for members in grouped([member for member, _ in found])]
    members = [member for group in groups for member in group.members]
    runs: list[Document] = [progress(member) for member in members]
    runs += [{"run": name, "state": WAITING, "share": 0.0, "seconds": None} for name in missing]
    notes: list[Document] = [{"at": 0, "run": "", "text": text} for _, texts in found for text in texts]
    sites: Document = {}
    for member in members:
        now = live.read(member.run.directory)
        notes += [{**note, "run": str(member)} for note in now.get("notes", ())]
        sites |= now.get("sites", {})
    document = {
        "directory": str(directory),
        "state": next((state for state in STATES if state in {row["state"] for row in runs}), WAITING),
        "share": fmean(row["share"] for row in runs) if runs else 0.0,
        "left": time_left(runs),
        "runs": runs,
        "notes": sorted(notes, key=lambda note: note["at"]),
        "sites": sites,
    }
    return document, groups


def _stamp(directory: Path) -> tuple[tuple[str, int, int], ...]:
    """Another one as soon as something was written there."""
    return tuple((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(directory.glob("[mst]*.json*")))


@lru_cache(maxsize=1000)
def _member(label: str, directory: str, _: object) -> tuple[Member, list[str]]:
    """Of a run that has not changed nothing is read twice."""
    notices: list[str] = []
    return read_member(label, Run(directory), notices), notices


def progress(member: Member) -> Document:
    """How far one run is. `round` is the one that is under way, or the last, from 1; 0 while it is being prepared."""
    directory, summary = member.run.directory, member.summary or {}
    now, rounds = live.read(directory), summary.get("rounds", member.config.rounds)
    state = FINISHED if summary else RUNNING if live.is_running(now) else STOPPED
    done, round = float(member.rounds_done), member.rounds_done
    if state == RUNNING:
        at = max(now["round"] or 0, member.rounds_done)  # the records may be ahead
        done = at + (now["done"] / now["clients"] if now["clients"] and at == now["round"] else 0)
        round = 0 if now["round"] is None else min(from_one(at), rounds)
    times = [seconds_of(line) for line in read_timing(directory)[-LATEST:]]
    curve = next((curve for metric, curve in member.curves.items() if metric.key == "average"), {})
    return {
        "run": str(member),
        "state": state,
        "round": round,
        "rounds": rounds,
        "share": 1.0 if summary else min(done / rounds, 1.0),
        "accuracy": summary["accuracy"] if summary else curve[max(curve)] if curve else None,
        "clients": [now["done"], now["clients"]] if state == RUNNING else [],
        "seconds": fmean(times) * rounds if times else None,  # of all its rounds, about
        "reason": (now.get("ended") or "") if state == STOPPED else "",
        "continue": how_to_continue(directory) if state == STOPPED else "",
    }


def time_left(runs: list[Document]) -> float | None:
    """Seconds, of as many at once as there are now; None where there is nothing to go by."""
    running = [row for row in runs if row["state"] == RUNNING]
    known = [row["seconds"] for row in runs if row["seconds"] is not None]
    todo = sum(1 - row["share"] for row in runs if row["state"] in (RUNNING, WAITING))
    return fmean(known) * todo / len(running) if known and running else None
