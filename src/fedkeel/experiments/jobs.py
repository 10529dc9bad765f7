"""Several runs at once, each in a process and with a core of its own, or one after another in this process.

On a GPU several runs share the card. Each has its own context, and the card takes turns between them, unless NVIDIA's
Multi-Process Service lets them run side by side.

A job that crashes takes only its own run with it.
"""

import json
import logging
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from fedkeel import simulation as running
from fedkeel.config import Config
from fedkeel.core.evaluation import Scores
from fedkeel.engine.executors.heartbeat import Heart
from fedkeel.engine.spawning import NAME, SENTENCE, UNGUARDED, main_that_can_be_imported
from fedkeel.errors import FedkeelError, death
from fedkeel.observer import Observer
from fedkeel.runs.trackers import tracked
from fedkeel.stopping import Stopped, stop_requested, undisturbed

log = logging.getLogger("fedkeel")


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
    """A run to be made."""

    config: Config
    track: str | None = None  # the tracker that gets its curves, in whichever process it runs


class JobsObserver:
    """Is told how the jobs are going. Every method does nothing by default, but notes go to the log."""

    def planned(self, jobs: Sequence[Job], finished: Sequence[Job]) -> None:
        """All runs of the comparison, and those that were finished before."""

    def job_started(self, job: Job, first_round: int) -> None: ...

    def job_progress(self, job: Job, rounds_done: float, accuracy: float | None) -> None:
        """`accuracy` is None where nothing was evaluated since the last report."""

    def job_finished(self, job: Job, problem: str) -> None:
        """`problem` is empty when all went well."""

    def tick(self) -> None:
        """Called a few times a second."""

    def note(self, text: str) -> None:
        log.warning(text)


class JobsObservers(JobsObserver):
    """Passes everything on to several, in their order."""

    def __init__(self, observers: Sequence[JobsObserver]) -> None:
        self._observers = observers

    def planned(self, jobs: Sequence[Job], finished: Sequence[Job]) -> None:
        for observer in self._observers:
            observer.planned(jobs, finished)

    def job_started(self, job: Job, first_round: int) -> None:
        for observer in self._observers:
            observer.job_started(job, first_round)

    def job_progress(self, job: Job, rounds_done: float, accuracy: float | None) -> None:
        for observer in self._observers:
            observer.job_progress(job, rounds_done, accuracy)

    def job_finished(self, job: Job, problem: str) -> None:
        for observer in self._observers:
            observer.job_finished(job, problem)

    def tick(self) -> None:
        for observer in self._observers:
            observer.tick()

    def note(self, text: str) -> None:
        self._observers[0].note(text)  # one is enough to tell it


def run_all(
    todo: Sequence[Job], processes: int, observer: JobsObserver, fits: Callable[[Job], bool] = lambda _: True
) -> dict[Job, str]:
    """Run the jobs; returns what went wrong with those that failed. Raises `Stopped` when asked to stop.

    In their order, but for those that do not fit into the time that is left: they wait as long as others do.
    """
    waiting = _Waiting(todo, fits)
    if processes > 1:
        return _Pool(processes, observer, uses_gpu(job.config for job in todo)).run(waiting)
    failures: dict[Job, str] = {}
    while waiting:
        if stop_requested.is_set():
            raise Stopped
        job = waiting.next()
        try:
            execute(job, _Reporter(partial(_pass_on, observer, job)))
        except Stopped:
            raise
        except Exception as error:
            failures[job] = _explain(error, job)
        observer.job_finished(job, failures.get(job, ""))
    return failures


class _Waiting:
    def __init__(self, todo: Sequence[Job], fits: Callable[[Job], bool]) -> None:
        self._jobs, self._fits = list(todo), fits

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def next(self) -> Job:
        job = next((job for job in self._jobs if self._fits(job)), self._jobs[0])
        self._jobs.remove(job)
        return job


def uses_gpu(configs: Iterable[Config]) -> bool:
    return any(config.device != "cpu" for config in configs) and torch.cuda.is_available()


def execute(job: Job, observer: Observer) -> None:
    with tracked(job.track, job.directory, observer, title=str(job)) as observer:
        if (job.directory / "config.toml").exists():
            running.resume(job.directory, observer=observer)
        else:
            running.simulate(job.config, directory=job.directory, observer=observer)


def beside_others(config: Config) -> Config:
    """The run as it is when others take place at the same time: on a CPU it has one core, and no workers of its own."""
    return config if uses_gpu([config]) else config.replace(executor="serial")


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
    observer.tick()


def _explain(error: Exception, job: Job) -> str:
    if isinstance(error, FedkeelError):
        return str(error)
    log.exception("%s crashed.", job)  # a bug: its traceback is wanted
    return f"{type(error).__name__}: {error}"


# -- in processes of their own --------------------------------------------------------------------------------
@dataclass
class _Running:
    job: Job
    process: BaseProcess
    pipe: Connection
    heart: Heart | None
    outcome: str | None = None  # "" when done; None until the job says so


class _Pool:
    """As many processes as asked for, a new one for each job."""

    def __init__(self, processes: int, observer: JobsObserver, on_gpu: bool) -> None:
        self.processes = processes
        self.observer = observer
        self.failures: dict[Job, str] = {}
        self._running: list[_Running] = []
        # Fork shares what is in memory: the images, and methods that were never put into a module. CUDA allows none.
        self._forks = not on_gpu
        self._context: BaseContext = multiprocessing.get_context("fork" if self._forks else "spawn")
        # The first optimizer makes torch import its compiler, which takes seconds: once here, not in every job.
        torch.optim.SGD([torch.zeros(1)])

    def run(self, waiting: _Waiting) -> dict[Job, str]:
        stopping = False
        try:
            while self._running or (waiting and not stopping):
                stopping = stopping or stop_requested.is_set()
                for running in self._running if stopping else []:
                    # Each stops after its current step, see _work; told again, in case that was too early.
                    running.process.terminate()
                while waiting and len(self._running) < self.processes and not stopping:
                    self._running.append(self._start(waiting.next()))
                ready = wait([running.pipe for running in self._running], timeout=0.2)
                for running in [running for running in self._running if running.pipe in ready]:
                    self._receive(running)
                for running in self._running:
                    if running.heart is not None and running.outcome is None and running.heart.is_silent():
                        running.outcome = "its process hung and was ended; the same command again goes on with it"
                        running.process.kill()  # which closes its pipe
                self.observer.tick()
        finally:
            with undisturbed():
                for running in self._running:  # only after an exception, such as a second Ctrl-C
                    running.process.kill()
                for running in self._running:
                    running.process.join()
        if stopping:
            raise Stopped
        return self.failures

    def _start(self, job: Job) -> _Running:
        here, there = self._context.Pipe(duplex=False)
        not_its_own = [here, *(running.pipe for running in self._running)] if self._forks else []
        heart = Heart() if self._forks else None  # memory is shared by forking alone
        # Not a daemon: a run may have worker processes of its own.
        process = self._context.Process(  # type: ignore[attr-defined]
            target=_work, args=(job, there, not_its_own, heart), daemon=False, name=f"{NAME}: {job}"
        )
        with main_that_can_be_imported(), undisturbed():
            process.start()
        there.close()
        return _Running(job, process, here, heart)

    def _receive(self, running: _Running) -> None:
        try:
            event, *details = json.loads(running.pipe.recv_bytes())
        except (EOFError, OSError):
            self._finish(running)
            return
        if event == "over":
            (running.outcome,) = details
        else:
            _pass_on(self.observer, running.job, event, *details)

    def _finish(self, running: _Running) -> None:
        running.process.join()
        running.pipe.close()
        self._running.remove(running)
        code = running.process.exitcode
        if running.outcome is None and code == UNGUARDED:
            raise FedkeelError(SENTENCE) from None
        outcome = f"its process {death(code, '--jobs')}" if running.outcome is None else running.outcome
        if outcome == "stopped":
            return
        if outcome:
            self.failures[running.job] = outcome
        self.observer.job_finished(running.job, outcome)


class _LogToObserver(logging.Handler):
    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def emit(self, record: logging.LogRecord) -> None:
        self._observer.note(self.format(record))


def _work(job: Job, pipe: Connection, not_its_own: Sequence[Connection], heart: Heart | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop_requested.set())
    if heart is not None:
        heart.start()
    # A sibling's open end would keep a dead parent's pipe alive, and this process would never notice.
    for other in not_its_own:
        other.close()
    torch.set_num_threads(1)

    def tell(*event: Any) -> None:
        pipe.send_bytes(json.dumps(event).encode())

    reporter = _Reporter(tell)
    log.handlers, log.propagate = [_LogToObserver(reporter)], False
    try:
        execute(job, reporter)
        problem = ""
    except Stopped:
        problem = "stopped"
    except BrokenPipeError:
        return  # the parent is gone; the run can be resumed
    except Exception as error:
        problem = _explain(error, job)
    tell("over", problem)
