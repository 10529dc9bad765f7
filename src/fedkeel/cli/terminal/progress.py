"""How runs are going, on stderr: live on a terminal, a plain line every tenth of the way elsewhere."""

import math
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from statistics import fmean
from typing import IO, Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fedkeel.cli.terminal.console import console
from fedkeel.cli.terminal.output import duration
from fedkeel.config import Config, from_one
from fedkeel.core.evaluation import Scores
from fedkeel.core.naming import visible
from fedkeel.errors import FedkeelError
from fedkeel.experiments.jobs import Job, JobsObserver
from fedkeel.experiments.tables import DASH, percent
from fedkeel.observer import Observer
from fedkeel.runs.run import Run


class Display(AbstractContextManager[Any]):
    """Bars on a terminal, lines elsewhere; when quiet, notes alone. How far the work is, is a share of it."""

    def __init__(self, stream: IO[str] | None = None, *, quiet: bool = False) -> None:
        self._console, self._quiet = console(stream or sys.stderr), quiet
        self._live = self._console.is_terminal and not quiet
        label, text = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[text]"))
        # Drawn when something happens, not by a thread: processes are forked meanwhile, and a lock that the thread
        # holds at that moment would stay locked in the child for ever.
        options: dict[str, Any] = {"auto_refresh": False, "transient": True, "disable": not self._live}
        self._bars = Progress(label, BarColumn(bar_width=24), text, console=self._console, **options)
        self._tenths = 0

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def note(self, text: str) -> None:
        self._console.print(f"fedkeel: {text}")

    def say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text)

    def start(self, first: float) -> None:
        """The work begins at this share, e.g. when a run is resumed."""
        self._began, self._first = time.monotonic(), first
        self._bars.start()

    def time_left(self, share: float) -> str:
        if share <= self._first:
            return "-:--"
        return duration((time.monotonic() - self._began) * (1 - share) / (share - self._first))

    def reaches_tenth(self, share: float) -> bool:
        """Every tenth of the way, once."""
        before, self._tenths = self._tenths, max(self._tenths, int(share * 10 + 1e-9))
        return self._tenths > before


class RunProgress(Display, Observer):
    """The progress of one run."""

    def started(self, config: Config, first_round: int) -> None:
        self._rounds, self._accuracy = config.rounds, "-"
        self.start(first_round / config.rounds)
        self._task = self._bars.add_task(visible(config.method), total=config.rounds, text="")
        self._draw(first_round)

    def client_done(self, round: int, done: int, total: int) -> None:
        self._draw(round + done / total)

    def round_done(self, round: int, rounds: int, scores: Scores | None, loss: float) -> None:
        if scores is not None:
            self._accuracy = f"{percent(scores.average)} %"
        self._draw(round + 1)
        share = (round + 1) / rounds
        if not self._live and self.reaches_tenth(share):
            known = f"accuracy {self._accuracy}  loss {f'{loss:.3f}' if math.isfinite(loss) else DASH}"
            self.say(f"round {from_one(round)}/{rounds}  {known}  left {self.time_left(share)}")

    def _draw(self, rounds_done: float) -> None:
        left = self.time_left(rounds_done / self._rounds)
        text = f"{_round(rounds_done, self._rounds)}  accuracy {self._accuracy}  left {left}"
        self._bars.update(self._task, completed=rounds_done, text=text, refresh=True)


class ComparisonProgress(Display, JobsObserver):
    """The progress of a comparison: one bar for all of it, and one for each run under way."""

    def planned(self, jobs: Sequence[Job], finished: Sequence[Job]) -> None:
        self._jobs, self._over = jobs, {*finished}
        self._shares = {job: float(job in self._over) for job in jobs}
        self._accuracy: dict[Job, float] = {}  # of the last round that was evaluated
        # Of runs that are over, by the rule that their configuration names.
        self._results = {job: result for job in finished if (result := _result(job)) is not None}
        self._tasks: dict[Job, TaskID] = {}
        self.reaches_tenth(self._share())
        if finished:
            self.say(f"{len(finished)} of {len(jobs)} runs were finished before.")
        self.start(self._share())
        for before in self._bars.task_ids:  # of a plan that is over
            self._bars.remove_task(before)
        self._overall = self._bars.add_task("all runs", total=1.0, text="")
        self.tick()

    def job_started(self, job: Job, first_round: int) -> None:
        options: dict[str, Any] = {"total": job.config.rounds, "completed": first_round, "text": ""}
        self._tasks[job] = self._bars.add_task(visible(str(job)), **options)

    def job_progress(self, job: Job, rounds_done: float, accuracy: float | None) -> None:
        self._shares[job] = rounds_done / job.config.rounds
        if accuracy is not None:
            self._accuracy[job] = accuracy
        known = f"  {percent(self._accuracy[job])} %" if job in self._accuracy else ""
        text = f"{_round(rounds_done, job.config.rounds)}{known}"
        self._bars.update(self._tasks[job], completed=rounds_done, text=text)

    def job_finished(self, job: Job, problem: str) -> None:
        self._over.add(job)
        self._shares[job] = 1.0
        if job in self._tasks:
            self._bars.remove_task(self._tasks.pop(job))
        if problem:
            self.note(f"{job} failed: {problem}")
        elif (result := _result(job)) is not None:
            self._results[job] = result
        if self._is_over(job.label) and (mean := self._mean(job.label)) is not None:
            self.say(f"{job.label:<12} {percent(mean)} %")

    def tick(self) -> None:
        share, text = self._share(), self._standing()
        self._bars.update(self._overall, completed=share, text=text, refresh=True)
        if not self._live and self.reaches_tenth(share):
            self.say(text)

    def _share(self) -> float:
        return fmean(self._shares.values())

    def _is_over(self, label: str) -> bool:
        return all(job in self._over for job in self._jobs if job.label == label)

    def _mean(self, label: str) -> float | None:
        known = [result for job, result in self._results.items() if job.label == label]
        return fmean(known) if known else None

    def _standing(self) -> str:
        labels = dict.fromkeys(job.label for job in self._jobs)
        means = {label: mean for label in labels if (mean := self._mean(label)) is not None}
        best = max(means, key=means.__getitem__, default=None)
        so_far = f"  best so far {best} {percent(means[best])} %" if best else ""
        done = f"methods {sum(map(self._is_over, labels))}/{len(labels)}  runs {len(self._over)}/{len(self._jobs)}"
        return f"{done}{so_far}  left {self.time_left(self._share())}"


def _round(rounds_done: float, rounds: int) -> str:
    return f"round {min(from_one(int(rounds_done)), rounds)}/{rounds}"


def _result(job: Job) -> float | None:
    """What the table will show of it, which need not be the accuracy of its last round."""
    try:
        return Run(job.directory).accuracy
    except (FedkeelError, KeyError, TypeError, ValueError):  # gone, or no run's own
        return None
