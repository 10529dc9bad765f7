"""Several runs at once, each in a process and with a core of its own, or one after another in this process.

On a GPU several runs share the card. Each has its own context, and the card takes turns between them, unless NVIDIA's
Multi-Process Service lets them run side by side. A job that ends its process takes only its own run with it.
"""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from fedkeel import simulation as running
from fedkeel.config import Config
from fedkeel.core import imports
from fedkeel.core.evaluation import Scores
from fedkeel.engine.executors.executor import available_cores, runs_elsewhere
from fedkeel.engine.executors.processes import end_with_parent
from fedkeel.engine.executors.ray import shared
from fedkeel.errors import FedkeelError, death
from fedkeel.observer import Observer, Several
from fedkeel.options import described
from fedkeel.runs.trackers import tracked
from fedkeel.stopping import LOOK, Stopped, stop_requested, undisturbed

log = logging.getLogger("fedkeel")
STOPPED, OVER = "stopped", "over"
Given = Mapping[str, Mapping[str, Any]]  # by label: objects in place of what the configuration names


@dataclass(frozen=True)
class Trial:
    """A method, as the table calls it, with one seed, and the directory of its run."""

    label: str
    seed: int
    directory: Path

    def __str__(self) -> str:
        return f"{self.label} seed {self.seed}"


@dataclass(frozen=True)
class Job(Trial):
    """A run to be made; its directory says which it is."""

    config: Config = field(compare=False)
    track: str | None = None  # the tracker that gets its curves, in whichever process it runs

    def run(self, observer: Observer, objects: Mapping[str, Any]) -> None:
        if (self.directory / "config.toml").exists():
            running.resume(self.directory, observer=observer, verbose=False, **objects)
        else:
            running.simulate(self.config, directory=self.directory, observer=observer, verbose=False, **objects)


class JobsObserver:
    """Is told how the jobs are going. Every method does nothing by default, but notes go to the log."""

    def planned(self, jobs: Sequence[Job], finished: Sequence[Job]) -> None:
        """All runs of the comparison, and those that were finished before."""

    def job_started(self, job: Job, first_round: int) -> None: ...

    def job_progress(self, job: Job, rounds_done: float, accuracy: float | None) -> None:
        """`accuracy` is None where nothing was evaluated since the last report."""

    def job_finished(self, job: Job, problem: str) -> None:
        """`problem` is empty when all went well."""

    def note(self, text: str) -> None:
        log.warning(text)


class JobsObservers(Several, JobsObserver):
    """Several who want to know."""


def run_all(todo: Sequence[Job], processes: int, observer: JobsObserver, given: Given | None = None) -> dict[Job, str]:
    """Run the jobs; returns what went wrong with those that failed. Raises `Stopped` when asked to stop."""
    given, failures = given or {}, dict[Job, str]()
    remote = next((job.config for job in todo if runs_elsewhere(job.config)), None)
    with nullcontext() if remote is None else shared(remote.ray_address):
        if processes > 1:
            spawned = remote is not None or uses_gpu(job.config for job in todo)
            return _side_by_side(todo, processes, observer, given, spawned=spawned)
        for job in todo:
            problem = _attempt(job, _Reporter(partial(_pass_on, observer, job)), given.get(job.label, {}))
            if problem == STOPPED:
                raise Stopped
            failures |= {job: problem} if problem else {}
            observer.job_finished(job, problem)
    return failures


def uses_gpu(configs: Iterable[Config]) -> bool:
    return any(config.device != "cpu" for config in configs) and torch.cuda.is_available()


def choose_jobs(jobs: int | None, configs: Iterable[Config]) -> int:
    if jobs is not None and (not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 1):
        raise FedkeelError(f"'jobs' is {described(jobs)}: give a whole number, at least 1.")
    configs = list(configs)
    if any(map(runs_elsewhere, configs)):
        if (jobs or 1) > 1 and not all(config.ray_actors for config in configs):
            raise FedkeelError(f"'jobs' is {jobs}, and each run takes the whole Ray cluster: give --ray-actors, too.")
        return jobs or 1
    if not hasattr(os, "fork"):
        if (jobs or 1) > 1:
            raise FedkeelError(f"'jobs' is {jobs}, and this system cannot fork processes: leave it out.")
        return 1
    return jobs or (1 if uses_gpu(configs) else available_cores())


def beside_others(config: Config) -> Config:
    """The run as it is when others take place at the same time: on a CPU it has one core, and no workers of its own."""
    return config if uses_gpu([config]) or runs_elsewhere(config) else config.replace(executor="serial")


def homes(jobs: Sequence[Job], given: Given) -> list[Path]:
    """The files that a new Python must import to know what these name; refused where none can."""
    used = [entry for job in jobs for _, entry in imports.used(job.config)]
    there = [thing for job in jobs for thing in given.get(job.label, ())]
    if here := [*there, *(entry.name for entry in used if not imports.file_of(entry))]:
        raise FedkeelError(
            f"'{here[0]}' is an object, or was typed into a notebook, which processes on a GPU cannot be given: "
            "register it in a file and import that, or give jobs=1."
        )
    return list(dict.fromkeys(file for job in jobs for file in imports.files(job.config)))


# -- one job -----------------------------------------------------------------------------------------------------------
def execute(job: Job, observer: Observer, objects: Mapping[str, Any]) -> None:
    with tracked(job.track, job.directory, observer, title=str(job)) as observer:
        job.run(observer, objects)


def _attempt(job: Job, observer: Observer, objects: Mapping[str, Any]) -> str:
    """What went wrong; nothing where all went well."""
    if stop_requested.is_set():
        return STOPPED
    try:
        execute(job, observer, objects)
    except Stopped:
        return STOPPED
    except FedkeelError as error:
        return str(error)
    except Exception as error:
        log.exception("%s crashed.", job)  # a bug: its traceback is wanted
        return f"{type(error).__name__}: {error}"
    return ""


class _Reporter(Observer):
    """What a run tells, as what a `JobsObserver` is told of its job."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell

    def started(self, config: Config, first_round: int) -> None:
        self._tell("job_started", first_round)

    def client_done(self, round: int, done: int, total: int) -> None:
        self._tell("job_progress", round + done / total, None)

    def round_done(self, round: int, rounds: int, scores: Scores | None, loss: float) -> None:
        self._tell("job_progress", round + 1, None if scores is None else scores.average)

    def note(self, text: str) -> None:
        self._tell("note", text)


def _pass_on(observer: JobsObserver, job: Job, event: str, *details: Any) -> None:
    if event == "note":
        observer.note(f"{job}: {details[0]}")
    else:
        getattr(observer, event)(job, *details)


# -- side by side ------------------------------------------------------------------------------------------------------
def _side_by_side(
    todo: Sequence[Job], processes: int, observer: JobsObserver, given: Given, *, spawned: bool
) -> dict[Job, str]:
    """So many at a time, each in a process of its own, with a pipe through which it tells how it goes."""
    context: Any = multiprocessing.get_context("spawn" if spawned else "fork")
    files = homes(todo, given) if spawned else []
    left, failures, stopping = list(todo), dict[Job, str](), False
    running: dict[Any, tuple[Job, Any]] = {}
    try:
        while running or (left and not stopping):
            while left and len(running) < processes and not stopping:
                job, (heard, told) = left.pop(0), context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(told, job, given.get(job.label, {}), files))
                with undisturbed():
                    process.start()
                    running[heard] = job, process
                told.close()  # so that the pipe ends with the process
            ready: list[Any] = wait([*running], LOOK)
            for heard in ready:
                job, process = running[heard]
                try:
                    said: tuple[Any, ...] = heard.recv()
                except EOFError:
                    process.join()
                    said = OVER, f"its process {death(process.exitcode, '--jobs')}"
                if said[0] != OVER:
                    _pass_on(observer, job, *said)
                    continue
                del running[heard]
                process.join()
                if not stopping:
                    failures |= {job: said[1]} if said[1] else {}
                    observer.job_finished(job, said[1])
            stopping = stopping or stop_requested.is_set()
            for _, process in running.values() if stopping else ():
                process.terminate()
    finally:
        for _, process in running.values():  # an exception, such as a second Ctrl-C
            process.kill()
    if stopping:
        raise Stopped
    return {job: failures[job] for job in todo if job in failures}


class _Notes(logging.Handler):
    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def emit(self, record: logging.LogRecord) -> None:
        self._observer.note(self.format(record))


def _work(told: Any, job: Job, objects: Mapping[str, Any], files: Sequence[Path]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: stop_requested.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.set_num_threads(1)
    threading.Thread(target=end_with_parent, daemon=True).start()
    for file in files:
        if file.name not in imports.imported():
            imports.load(file)
    reporter = _Reporter(lambda *event: told.send(event))
    log.handlers, log.propagate = [_Notes(reporter)], False
    told.send((OVER, _attempt(job, reporter, objects)))
