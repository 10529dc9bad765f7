"""The queue: what the ledger lacks, in order of priority, run in slices of time.

    [[block]]                                   # results/queue.toml; the first block is the most wanted
    recipe = "hbn/table1"
    only = ["CIFAR-10"]                         # as in `fedkeel reproduce`
    seeds = 3
    with = { precision = "bf16" }               # options in place of the recipe's, if any

Several runs share a card. A cell that is finished is in the ledger at once; one that is not can be resumed, so that a
slice may end, or be ended, at any moment.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from fedkeel.config import read_table
from fedkeel.errors import FedkeelError, nearest
from fedkeel.experiments.jobs import Job, JobsObserver, JobsObservers, uses_gpu
from fedkeel.experiments.ledger import PLACE, Ledger, Line, changes_of
from fedkeel.experiments.recipes import load
from fedkeel.experiments.reproduce import Bookkeeper, TableRuns, run_missing
from fedkeel.experiments.request import Request, data_at, select
from fedkeel.files import explained
from fedkeel.options import described
from fedkeel.runs.store import has_finished
from fedkeel.runs.timing import read_timing
from fedkeel.stopping import Stopped, stop_requested

FILE = "queue.toml"  # in the ledger's folder
ON_A_CARD = 6  # runs at the same time, if not told otherwise
AT_LEAST = 24  # runs that are planned together, so that a card stays full from one block to the next
UNITS = {"s": 1, "m": 60, "h": 3600}
LEAVE = 0.1  # of the time, before its end: for the runs under way to write down where they are
LEAVE_SECONDS = 30.0  # that this takes at most


@dataclass(frozen=True)
class Block:
    """Cells of a recipe with as many seeds as are wanted."""

    recipe: str
    only: Sequence[str] = ()
    seeds: int | Sequence[int] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)

    def table(self, request: Request) -> TableRuns:
        """Its runs, none of them planned yet; `request` says where they go, and on which machine."""
        recipe = load(self.recipe)
        changes = {**self.changes, **request.changes}
        own = Request(directory=request.directory, only=self.only, seeds=self.seeds, changes=changes)
        return TableRuns(recipe, own, *select(recipe, self.only))


@dataclass(frozen=True)
class Progress:
    """What a slice did."""

    written: int = 0  # cells that are in the ledger now and were not
    left: int = 0  # runs, of the blocks that were looked into
    blocks_left: int = 0  # that there was no time to look into
    seconds_left: float | None = 0.0  # of these runs together, as the ledger knows runs like them, if it does
    failures: Mapping[str, str] = field(default_factory=dict)
    skipped: Sequence[str] = ()


def read_queue(path: str | Path) -> list[Block]:
    """The blocks of a file, the most wanted first."""
    table, _ = read_table(path, "queue")
    entries = table.get("block")
    if not isinstance(entries, list) or not entries or len(table) > 1:
        raise FedkeelError(
            f"'{path}' is no queue: give it one [[block]] or more, each with a recipe, and nothing else."
        )
    return [_block(entry, f"Block {number} of '{path}'") for number, entry in enumerate(entries, start=1)]


def _block(entry: Any, where: str) -> Block:
    if not isinstance(entry, dict) or not isinstance(entry.get("recipe"), str):
        raise FedkeelError(f'{where} needs a recipe, like recipe = "hbn/table1".')
    for name in entry:
        if name not in ("recipe", "only", "seeds", "with"):
            raise FedkeelError(f"{where} has no '{name}': {nearest(name, ('recipe', 'only', 'seeds', 'with'))}")
    only, changes = entry.get("only", []), entry.get("with", {})
    if not isinstance(only, list) or not all(isinstance(label, str) for label in only):
        raise FedkeelError(f"{where}: 'only' is {described(only)}: give a list of labels, like [\"CIFAR-10\"].")
    if not isinstance(changes, dict) or "seed" in changes:
        raise FedkeelError(f"{where}: 'with' is {described(changes)}: give a table of options, without a seed.")
    return Block(entry["recipe"], only, entry.get("seeds"), changes)


def read_seconds(text: str) -> float:
    """`25m`, `1h30m` or `90s` as seconds.

    >>> read_seconds("1h30m")
    5400.0
    """
    if not re.fullmatch(r"(\d+(\.\d+)?[hms])+", text):
        raise FedkeelError(f"'budget' is {described(text)}: give a time like 25m, 90s or 1h30m.")
    return sum(float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+)([hms])", text))


def leave_what_is_missing(table: TableRuns, ledger: Ledger) -> None:
    """Of the table's runs those whose cells the ledger lacks, or has only from before something changed."""
    recipe = table.recipe
    table.plan()
    there = {(*line.key, line.of) for line in ledger.of(recipe)[0]}
    lacking: set[tuple[Path, int]] = set()
    for row, column in recipe.cells():
        if (row.label, column.name) in table.runs:
            planned = recipe.config(row, column)
            config = table.request.changed(planned)
            changes = json.dumps(changes_of(planned, config), sort_keys=True)
            for seed in table.seeds:
                key = (recipe.name, row.label, column.name, seed, config.rounds, changes, planned.rounds)
                lacking |= {(table.runs[row.label, column.name], seed)} if key not in there else set()
    table.jobs = [job for job in table.jobs if (job.directory.parent, job.seed) in lacking]
    # Seed by seed: methods can be compared as soon as each has one.
    table.jobs.sort(key=lambda job: table.seeds.index(job.seed))


class Budget(JobsObserver):
    """Asks all runs to stop when the time is nearly over, ends them when it is, and says which ones can be finished."""

    def __init__(self, seconds: float | None) -> None:
        self._last = math.inf if seconds is None else time.monotonic() + seconds
        self._end = self._last if seconds is None else self._last - min(LEAVE * seconds, LEAVE_SECONDS)
        self.expected: dict[Path, float | None] = {}  # seconds of a run, by its directory

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end

    def tick(self) -> None:
        if self.is_over:
            stop_requested.set()
        if time.monotonic() >= self._last:  # whoever writes for long, or hangs, has its last checkpoint
            raise Stopped

    def fits(self, job: Job) -> bool:
        wanted = self.expected.get(job.directory)
        return wanted is None or time.monotonic() + wanted <= self._end

    def total(self, jobs: Sequence[Job]) -> float | None:
        """Of one after another; None where nothing is known of one of them."""
        known = [self.expected[job.directory] for job in jobs]
        return None if None in known else sum(seconds for seconds in known if seconds is not None)


def expected(job: Job, table: TableRuns, ledger: Ledger) -> float | None:
    """Seconds, from the lines most like it: of the same cell, of the same column, of the same recipe."""
    cells = {cell for cell, directory in table.runs.items() if directory == job.directory.parent}
    columns = {column for _, column in cells}

    def per_round(lines: Sequence[Line]) -> float | None:
        return fmean(line.seconds / line.rounds for line in lines) if lines else None

    own = [line for line in ledger if line.recipe == table.recipe.name and line.seconds]
    seconds = (
        per_round([line for line in own if (line.row, line.column) in cells])
        or per_round([line for line in own if line.column in columns])
        or per_round(own)
    )
    done = len({line["round"] for line in read_timing(job.directory)})  # of a run that will go on
    return None if seconds is None else seconds * (job.config.rounds - done)


def work(blocks: Sequence[Block], request: Request, budget: float | None = None) -> Progress:
    """Run what is missing, the most wanted first, until it is done or so many seconds are over; as `reproduce` does.

    What the ledger lacks of a block is found out when its turn comes: with many of them that alone takes a while.
    """
    clock, folder = Budget(budget), Path(request.ledger or PLACE)
    waiting = [block.table(request) for block in blocks]  # first of all, so that a mistake in the last one is told now
    seen: list[TableRuns] = []
    failures: dict[Path, str] = {}
    with data_at(request.root), alone(folder):
        ledger = Ledger(folder)
        bookkeeper = Bookkeeper([], ledger)
        while waiting and not clock.is_over:
            tables: list[TableRuns] = []
            while waiting and not clock.is_over and sum(len(table.jobs) for table in tables) < AT_LEAST:
                tables.append(waiting.pop(0))
                leave_what_is_missing(tables[-1], ledger)
            bookkeeper.tables = tables
            failures |= _run(tables, request, bookkeeper, clock)
            seen += tables
    jobs = list({job.directory: job for table in seen for job in table.jobs}.values())
    left = [job for job in jobs if not has_finished(job.directory)]
    return Progress(
        written=bookkeeper.written,
        left=len(left),
        blocks_left=len(waiting),
        seconds_left=clock.total(left),
        failures={str(job): failures[job.directory] for job in jobs if job.directory in failures},
        skipped=list(dict.fromkeys(reason for table in seen for reason in table.skipped)),
    )


@contextmanager
def alone(folder: Path, what: str = "queue") -> Iterator[None]:
    """One queue at a time: two would do the same runs."""
    with explained(folder, ""):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FedkeelError(f"Another {what} is at work for '{folder}': wait until it is over.") from None
        yield
    finally:
        os.close(handle)


def _run(tables: Sequence[TableRuns], request: Request, bookkeeper: Bookkeeper, clock: Budget) -> Mapping[Path, str]:
    observer = request.observer or JobsObserver()
    jobs = list({job.directory: job for table in tables for job in table.jobs}.values())
    bookkeeper.write_all()  # what was finished just when the last slice was cut off
    for job in jobs:
        if has_finished(job.directory) and any(table.is_outdated(job.directory) for table in tables):
            observer.note(f"'{job.directory}' is of other code: it is trained anew, and kept as {set_aside(job)}.")
    ledger = bookkeeper.ledger
    clock.expected |= {job.directory: expected(job, table, ledger) for table in tables for job in table.jobs}
    at_once = request.jobs or (ON_A_CARD if uses_gpu(job.config for job in jobs) else None)
    failures: Mapping[Path, str] = {}
    try:
        failures = run_missing(jobs, at_once, JobsObservers([observer, bookkeeper, clock]), clock.fits)
    except Stopped:
        if not clock.is_over:
            raise
        stop_requested.clear()
    else:
        for table in tables if not clock.is_over else ():
            table.diagnose()
        bookkeeper.write_all()  # also what only a diagnostic knows
    return failures


def set_aside(job: Job) -> str:
    names = (f"{job.directory.name}-{number}" for number in count(2))
    free = next(path for name in names if not (path := job.directory.with_name(name)).exists())
    job.directory.rename(free)
    return free.name
