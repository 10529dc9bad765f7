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
from fedkeel.runs.run import Run


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
        text = f"{of_rounds(rounds_done, job.config.rounds)}{known}"
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
        if self._notebook is not None:
            self.tick()  # what is shown stays there

    def tick(self) -> None:
        share, text = self._share(), self._standing()
        self._bars.update(self._overall, completed=share, text=text)
        self.draw()
        if not self._live and self.reaches_tenth(share):
            self.say(text)

    def _share(self) -> float:
        return fmean(self._shares.values())

    def _is_over(self, label: str) -> bool:
        return all(job in self._over for job in self._jobs if job.label == label)

    def _mean(self, label: str) -> float | None:
        """Over seeds; of the trials of a search, the best."""
        known = [result for job, result in self._results.items() if job.label == label]
        count = max if self._jobs[0].competes else fmean
        return count(known) if known else None

    def _standing(self) -> str:
        labels = dict.fromkeys(job.label for job in self._jobs)
        means = {label: mean for label in labels if (mean := self._mean(label)) is not None}
        best = max(means, key=means.__getitem__, default=None)
        so_far = f"  best so far {best} {percent(means[best])} %" if best else ""
        done = f"methods {sum(map(self._is_over, labels))}/{len(labels)}  runs {len(self._over)}/{len(self._jobs)}"
        return f"{done}{so_far}  left {self.time_left(self._share())}"


def _result(job: Job) -> float | None:
    """What the table will show of it, which need not be the accuracy of its last round."""
    try:
        return Run(job.directory).accuracy
    except (FedkeelError, KeyError, TypeError, ValueError):  # gone, or no run's own
        return None
