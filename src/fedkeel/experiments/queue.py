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

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from fedkeel.config import read_table
from fedkeel.errors import FedkeelError
from fedkeel.experiments.jobs import Job, JobsObserver, JobsObservers, uses_gpu
from fedkeel.experiments.ledger import PLACE, Ledger, Line
from fedkeel.experiments.recipes import load
from fedkeel.experiments.reproduce import Bookkeeper, TableRuns, run_missing
from fedkeel.experiments.request import Request, data_at, select
from fedkeel.options import described
from fedkeel.runs.store import has_finished
from fedkeel.stopping import Stopped, stop_requested

FILE = "queue.toml"  # in the ledger's folder
ON_A_CARD = 6  # runs at the same time, if not told otherwise
AT_LEAST = 24  # runs that are planned together, so that a card stays full from one block to the next
UNITS = {"s": 1, "m": 60, "h": 3600}
LEAVE_SECONDS = 5.0  # before the end: for the runs under way to write down where they are


@dataclass(frozen=True)
class Block:
    """Cells of a recipe with as many seeds as are wanted."""

    recipe: str
    only: Sequence[str] = ()
    seeds: int | Sequence[int] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join([self.recipe, *self.only])


@dataclass(frozen=True)
class Progress:
    """What a slice did."""

    written: int = 0  # cells that are in the ledger now and were not
    left: int = 0  # runs, of the blocks that were looked into
    blocks_left: int = 0  # that there was no time to look into
    seconds_left: float | None = 0.0  # of these runs together, as the ledger knows runs like them, if it does
    failures: Mapping[str, str] = field(default_factory=dict)
    skipped: Sequence[str] = ()

    def then(self, more: Progress, blocks_left: int) -> Progress:
        known = self.seconds_left is not None and more.seconds_left is not None
        return Progress(
            self.written + more.written,
            self.left + more.left,
            blocks_left,
            (self.seconds_left or 0.0) + (more.seconds_left or 0.0) if known else None,
            {**self.failures, **more.failures},
            list(dict.fromkeys([*self.skipped, *more.skipped])),
        )


def read_queue(path: str | Path) -> list[Block]:
    """The blocks of a file, the most wanted first."""
    table, _ = read_table(path, "queue")
    blocks = []
    for entry in table.get("block", ()):
        entry = dict(entry)
        changes = entry.pop("with", {})
        if unknown := entry.keys() - {"recipe", "only", "seeds"} or "recipe" not in entry:
            raise FedkeelError(f"A block of '{path}' needs a recipe, and may have only, seeds and with: not {unknown}.")
        blocks.append(Block(**entry, changes=changes))
    if not blocks:
        raise FedkeelError(f"'{path}' has no [[block]]: add one, with a recipe.")
    return blocks


def read_seconds(text: str) -> float:
    """`25m`, `1h30m` or `90s` as seconds.

    >>> read_seconds("1h30m")
    5400.0
    """
    if not re.fullmatch(r"(\d+(\.\d+)?[hms])+", text):
        raise FedkeelError(f"'budget' is {described(text)}: give a time like 25m, 90s or 1h30m.")
    return sum(float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+)([hms])", text))


def missing(block: Block, ledger: Ledger, request: Request) -> TableRuns:
    """The runs of a block whose cells the ledger lacks, or has only from before something changed."""
    recipe = load(block.recipe)
    own = Request(directory=request.directory, only=block.only, seeds=block.seeds, changes=block.changes)
    table = TableRuns(recipe, own, *select(recipe, block.only))
    table.plan()
    changes = dict(block.changes)
    fresh, _ = ledger.of(recipe)
    there = {(*line.cell, line.seed) for line in fresh if line.is_whole and line.changes == changes}
    lacking = {
        (table.runs[row, column], seed)
        for row, column in table.runs
        for seed in table.seeds
        if (recipe.name, row, column, seed) not in there
    }
    table.jobs = [job for job in table.jobs if (job.directory.parent, job.seed) in lacking]
    # Seed by seed: methods can be compared as soon as each has one.
    table.jobs.sort(key=lambda job: table.seeds.index(job.seed))
    return table


class Budget(JobsObserver):
    """Asks all runs to stop when the time is over, and says which ones can still be finished."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + max(seconds - LEAVE_SECONDS, 0.0)
        self.expected: Mapping[Path, float | None] = {}  # seconds of a run, by its directory

    @property
    def is_over(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def tick(self) -> None:
        if self.is_over:
            stop_requested.set()

    def fits(self, job: Job) -> bool:
        if self._end is None:
            return True
        wanted = self.expected[job.directory]
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
    return None if seconds is None else seconds * job.config.rounds


def work(blocks: Sequence[Block], request: Request, budget: float | None = None) -> Progress:
    """Run what is missing, the most wanted first, until it is done or so many seconds are over; as `reproduce` does.

    Blocks are looked into as far as there is time for: with many of them that alone takes a while.
    """
    clock, ledger = Budget(budget), Ledger(request.ledger or PLACE)
    waiting, done = list(blocks), Progress(blocks_left=len(blocks))
    with data_at(request.root):
        while waiting and not clock.is_over:
            tables: list[TableRuns] = []
            while waiting and not clock.is_over and sum(len(table.jobs) for table in tables) < AT_LEAST:
                tables.append(missing(waiting.pop(0), ledger, request))
            done = done.then(_run(tables, request, ledger, clock), len(waiting))
    return done


def _run(tables: Sequence[TableRuns], request: Request, ledger: Ledger, clock: Budget) -> Progress:
    observer = request.observer or JobsObserver()
    jobs = list({job.directory: job for table in tables for job in table.jobs}.values())
    before, bookkeeper = len(ledger), Bookkeeper(tables, ledger)
    bookkeeper.write_all()  # what was finished just when the last slice was cut off
    for job in jobs:
        if has_finished(job.directory) and any(table.is_outdated(job.directory) for table in tables):
            observer.note(f"'{job.directory}' is of other code: it is trained anew, and kept as {set_aside(job)}.")
    clock.expected = {job.directory: expected(job, table, ledger) for table in tables for job in table.jobs}
    at_once = request.jobs or (ON_A_CARD if uses_gpu(job.config for job in jobs) else None)
    failures: Mapping[Path, str] = {}
    try:
        failures = run_missing(jobs, at_once, JobsObservers([observer, bookkeeper, clock]), clock.fits)
    except Stopped:
        if not clock.is_over:
            raise
        stop_requested.clear()
    else:
        for table in tables:
            table.diagnose()
        bookkeeper.write_all()  # also what only a diagnostic knows
    left = [job for job in jobs if not has_finished(job.directory)]
    return Progress(
        written=len(ledger) - before,
        left=len(left),
        seconds_left=clock.total(left),
        failures={str(job): failures[job.directory] for job in jobs if job.directory in failures},
        skipped=list(dict.fromkeys(reason for table in tables for reason in table.skipped)),
    )


def set_aside(job: Job) -> str:
    names = (f"{job.directory.name}-{number}" for number in count(2))
    free = next(path for name in names if not (path := job.directory.with_name(name)).exists())
    job.directory.rename(free)
    return free.name
