"""What a person sees while runs go on and when they are done.

Progress and notes go to stderr, live on a terminal and as a plain line now and then elsewhere; results go to stdout.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from fedkeel.config import Config, from_one
from fedkeel.core.evaluation import Scores
from fedkeel.core.naming import visible
from fedkeel.errors import FedkeelError
from fedkeel.experiments.jobs import Job, JobsObserver
from fedkeel.experiments.tables import DASH, Results, percent
from fedkeel.observer import Observer
from fedkeel.runs.run import Run

WIDE = 1000  # a pipe has no edge: a table there is never cut


class PlainConsole(Console):
    """Names are data: nothing in a text is markup, and nothing in it reaches the terminal but letters."""

    def render_str(self, text: str, **options: Any) -> Text:  # every text and every cell passes here
        return super().render_str("\n".join(map(visible, text.split("\n"))), **options)


def console(stream: IO[str]) -> Console:
    """A console that keeps tables whole when nobody's terminal limits them."""
    plain = not stream.isatty()
    return PlainConsole(
        file=stream, width=WIDE if plain else None, highlight=False, markup=False, emoji=False, soft_wrap=False
    )


def lettered(text: object, style: str = "") -> Text:
    """A cell of a table or a heading of it: one line, in which nothing is markup."""
    return Text(visible(str(text)), style=style)


def results_table(results: Results) -> Table:
    """Method by domain, the best of each column in bold."""
    table = Table(box=box.SIMPLE_HEAD, caption=results.caption, caption_justify="left", pad_edge=False)
    for heading in results.headings:
        table.add_column(lettered(heading), justify="left" if heading == "method" else "right")
    for row in results.rows:
        cells = [lettered(cell or DASH, "bold" if best else "") for cell, best in results.marked(row)]
        table.add_row(lettered(results.name(row)), *cells, *map(lettered, results.traffic(row)))
    return table


def plain_table(headings: Sequence[str], rows: Sequence[Sequence[Any]], *, caption: str | None = None) -> Table:
    """A table of anything; numbers to the right."""
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left", pad_edge=False)
    for column, heading in enumerate(headings):
        cells = [cell for cell in (str(row[column]) for row in rows) if cell != DASH]
        numbers = bool(cells) and all(cell.replace(".", "").replace("-", "0").isdigit() for cell in cells)
        table.add_column(lettered(heading), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(lettered, row))
    return table


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Clock:
    """Time left, from the share of the work that was done since it started."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._first = 0.0

    def start(self, first: float) -> None:
        """The work begins at this share, e.g. when a run is resumed."""
        self._began, self._first = time.monotonic(), first

    def left(self, share: float) -> str:
        if share <= self._first:
            return "-:--"
        return duration((time.monotonic() - self._began) * (1 - share) / (share - self._first))


class Milestones:
    """Every tenth of the way, once."""

    def __init__(self) -> None:
        self._passed = 0

    def reached(self, share: float) -> bool:
        tenth = int(share * 10 + 1e-9)
        if tenth <= self._passed:
            return False
        self._passed = tenth
        return True


def _bar(target: Console) -> Progress:
    described, standing = (
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.fields[text]}", markup=False),
    )
    columns = (described, BarColumn(bar_width=24), standing)
    # Drawn when something happens, not by a thread: processes are forked meanwhile, and a lock that the thread
    # holds at that moment would stay locked in the child for ever.
    return Progress(*columns, console=target, auto_refresh=False, transient=True)


class RunProgress(Observer, AbstractContextManager["RunProgress"]):
    """The progress of one run."""

    def __init__(self, stream: IO[str] | None = None, *, quiet: bool = False) -> None:
        self._console = console(stream or sys.stderr)
        self._quiet = quiet
        self._bar = _bar(self._console) if self._console.is_terminal and not quiet else None
        self._task: TaskID | None = None
        self._clock, self._milestones = Clock(), Milestones()
        self._rounds, self._accuracy = 1, "-"

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def started(self, config: Config, first_round: int) -> None:
        self._rounds = config.rounds
        self._clock.start(first_round / config.rounds)
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(visible(config.method), total=config.rounds, completed=first_round, text="")
            self._draw(first_round)

    def client_done(self, round: int, done: int, total: int) -> None:
        self._draw(round + done / total)

    def round_done(self, round: int, rounds: int, scores: Scores | None, loss: float) -> None:
        if scores is not None:
            self._accuracy = f"{percent(scores.average)} %"
        self._draw(round + 1)
        share = (round + 1) / rounds
        if self._bar is None and not self._quiet and self._milestones.reached(share):
            told = f"{loss:.3f}" if math.isfinite(loss) else DASH
            line = f"round {from_one(round)}/{rounds}  accuracy {self._accuracy}  loss {told}"
            self._console.print(f"{line}  left {self._clock.left(share)}", markup=False)

    def note(self, text: str) -> None:
        self._console.print(f"fedkeel: {text}", markup=False)

    def _draw(self, rounds_done: float) -> None:
        if self._bar is None or self._task is None:
            return
        text = f"round {min(from_one(int(rounds_done)), self._rounds)}/{self._rounds}  accuracy {self._accuracy}"
        text += f"  left {self._clock.left(rounds_done / self._rounds)}"
        self._bar.update(self._task, completed=rounds_done, text=text, refresh=True)


class ComparisonProgress(JobsObserver, AbstractContextManager["ComparisonProgress"]):
    """The progress of a comparison: one bar for all of it, and a line for each run under way."""

    def __init__(self, stream: IO[str] | None = None, *, quiet: bool = False) -> None:
        self._console = console(stream or sys.stderr)
        self._quiet = quiet
        self._bar = _bar(self._console) if self._console.is_terminal and not quiet else None
        self._clock, self._milestones = Clock(), Milestones()
        self._jobs: list[Job] = []
        self._shares: dict[Job, float] = {}
        self._over: set[Job] = set()
        self._accuracy: dict[Job, float] = {}  # of the last round that was evaluated
        self._results: dict[Job, float] = {}  # of runs that are over, by the rule that their configuration names
        self._overall: TaskID | None = None
        self._lines: dict[Job, TaskID] = {}

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def planned(self, jobs: Sequence[Job], finished: Sequence[Job]) -> None:
        self._jobs, self._over = list(jobs), set(finished)
        self._shares = {job: float(job in self._over) for job in jobs}
        self._results = {job: result for job in finished if (result := _result(job)) is not None}
        self._clock.start(self._share())
        self._milestones.reached(self._share())
        if finished:
            self._say(f"{len(finished)} of {len(jobs)} runs were finished before.")
        if self._bar is not None:
            self._bar.start()
            self._overall = self._bar.add_task("all runs", total=1.0, text="")
            self.tick()

    def job_started(self, job: Job, first_round: int) -> None:
        if self._bar is not None:
            self._lines[job] = self._bar.add_task(
                visible(str(job)), total=job.config.rounds, completed=first_round, text=""
            )

    def job_progress(self, job: Job, rounds_done: float, accuracy: float | None) -> None:
        self._shares[job] = rounds_done / job.config.rounds
        if accuracy is not None:
            self._accuracy[job] = accuracy
        if self._bar is not None:
            known = f"  {percent(self._accuracy[job])} %" if job in self._accuracy else ""
            text = f"round {min(from_one(int(rounds_done)), job.config.rounds)}/{job.config.rounds}{known}"
            self._bar.update(self._lines[job], completed=rounds_done, text=text)

    def job_finished(self, job: Job, problem: str) -> None:
        self._over.add(job)
        self._shares[job] = 1.0
        if self._bar is not None and job in self._lines:
            self._bar.remove_task(self._lines.pop(job))
        if problem:
            self.note(f"{job} failed: {problem}")
        elif (result := _result(job)) is not None:
            self._results[job] = result
        siblings = [other for other in self._jobs if other.label == job.label]
        known = [self._results[other] for other in siblings if other in self._results]
        if known and all(other in self._over for other in siblings):
            self._say(f"{job.label:<12} {percent(_mean(known))} %")

    def tick(self) -> None:
        share = self._share()
        if self._bar is not None and self._overall is not None:
            self._bar.update(self._overall, completed=share, text=self._standing(), refresh=True)
        elif not self._quiet and self._milestones.reached(share):
            self._say(f"{self._standing()}")

    def note(self, text: str) -> None:
        self._console.print(f"fedkeel: {text}", markup=False)

    def _share(self) -> float:
        return sum(self._shares.values()) / len(self._shares)

    def _standing(self) -> str:
        labels = dict.fromkeys(job.label for job in self._jobs)
        done = sum(all(job in self._over for job in self._jobs if job.label == label) for label in labels)
        runs = f"methods {done}/{len(labels)}  runs {len(self._over)}/{len(self._jobs)}"
        means = {label: [result for job, result in self._results.items() if job.label == label] for label in labels}
        best = max((label for label in labels if means[label]), key=lambda label: _mean(means[label]), default=None)
        so_far = f"  best so far {best} {percent(_mean(means[best]))} %" if best else ""
        return f"{runs}{so_far}  left {self._clock.left(self._share())}"

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, markup=False)


def _result(job: Job) -> float | None:
    """What the table will show of it, which need not be the accuracy of its last round."""
    try:
        return Run(job.directory).accuracy
    except (FedkeelError, KeyError, TypeError, ValueError):  # gone, or no run's own
        return None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
