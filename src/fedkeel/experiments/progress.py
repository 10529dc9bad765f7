"""How a comparison is going, where a person looks; see `fedkeel.runs.progress`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from rich.progress import TaskID

from fedkeel.core.naming import visible
from fedkeel.core.readable import percent
from fedkeel.errors import FedkeelError
from fedkeel.experiments.jobs import Job, JobsObserver, JobsObservers
from fedkeel.options import described
from fedkeel.runs.progress import Display, is_shown, of_rounds


@contextmanager
def watched(observer: JobsObserver | None, verbose: bool | None) -> Iterator[JobsObserver]:
    """The observer, and beside it the progress where it is to be shown."""
    if observer is not None and not isinstance(observer, JobsObserver):
        raise FedkeelError(
            f"'observer' is {described(observer)}: give an object of a fedkeel.experiments.jobs.JobsObserver."
        )
    if not is_shown(verbose):
        yield observer or JobsObserver()
        return
    with ComparisonProgress() as progress:
        yield progress if observer is None else JobsObservers([observer, progress])


class ComparisonProgress(Display, JobsObserver):
    """The progress of a comparison: one bar for all of it, and one for each run under way."""

    def planned(self, jobs: Sequence[Job], finished: Sequence[Job]) -> None:
        self._jobs, self._over = jobs, {*finished}
        self._shares = {job: float(job in self._over) for job in jobs}
        self._accuracy: dict[Job, float] = {}  # of the last round that was evaluated
        self._tasks: dict[Job, TaskID] = {}
        self.reaches_tenth(self._share())
        if finished:
            self.say(f"{len(finished)} of {len(jobs)} runs were finished before.")
        self.start(self._share())
        for before in self._bars.task_ids:  # of a plan that is over
            self._bars.remove_task(before)
        self._overall = self._bars.add_task("all runs", total=1.0, text="")
        self._show()

    def job_started(self, job: Job, first_round: int) -> None:
        options: dict[str, Any] = {"total": job.config.rounds, "completed": first_round, "text": ""}
        self._tasks[job] = self._bars.add_task(visible(str(job)), **options)

    def job_progress(self, job: Job, rounds_done: float, accuracy: float | None) -> None:
        self._shares[job] = min(0.999, rounds_done / job.config.rounds)  # all of it once it is finished
        if accuracy is not None:
            self._accuracy[job] = accuracy
        known = f"  {percent(self._accuracy[job])} %" if job in self._accuracy else ""
        text = f"{of_rounds(rounds_done, job.config.rounds)}{known}"
        self._bars.update(self._tasks[job], completed=rounds_done, text=text)
        self._show()

    def job_finished(self, job: Job, problem: str) -> None:
        self._over.add(job)
        self._shares[job] = 1.0
        if job in self._tasks:
            self._bars.remove_task(self._tasks.pop(job))
        if problem:
            self.note(f"{job} failed: {problem}")
        self._show()

    def _show(self) -> None:
        share = self._share()
        text = f"runs {len(self._over)}/{len(self._jobs)}  left {self.time_left(share)}"
        self._bars.update(self._overall, completed=share, text=text)
        self.draw()
        if not self._live and self.reaches_tenth(share):
            self.say(text)

    def _share(self) -> float:
        return fmean(self._shares.values())
