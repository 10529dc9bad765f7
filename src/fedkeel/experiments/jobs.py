"""Several runs at once, each in a process and with a core of its own, or one after another in this process.

On a GPU several runs share the card. Each has its own context, and the card takes turns between them, unless NVIDIA's
Multi-Process Service lets them run side by side.

A job that crashes takes only its own run with it.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
class Job:
    """One run of a comparison: a method, as the table calls it, with one seed."""

    label: str
    seed: int
    config: Config
    directory: Path
    track: str | None = None  # the tracker that gets its curves, in whichever process it runs

    def __str__(self) -> str:
        return f"{self.label} seed {self.seed}"


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


def run_all(todo: Sequence[Job], processes: int, observer: JobsObserver) -> dict[Job, str]:
    """Run the jobs; returns what went wrong with those that failed. Raises `Stopped` when asked to stop."""
    if processes == 1:
        return _one_after_another(todo, observer)
    return _Crew(processes, observer, uses_gpu([job.config for job in todo])).run(todo)


def uses_gpu(configs: Iterable[Config]) -> bool:
    return any(config.device != "cpu" for config in configs) and torch.cuda.is_available()


def execute(job: Job, observer: Observer) -> None:
    """Start this run, or go on with it."""
    with tracked(job.track, job.directory, observer, title=str(job)) as told:
        if (job.directory / "config.toml").exists():
            running.resume(job.directory, observer=told)
        else:
            running.simulate(job.config, directory=job.directory, observer=told)


def beside_others(config: Config) -> Config:
    """The run as it is when others take place at the same time: on a CPU it has one core, and no workers of its own."""
    return config if uses_gpu([config]) else config.replace(executor="serial")


class _Reporter(Observer):
    """Passes on what a run tells, as the message of a job."""

    def tell(self, kind: str, **details: Any) -> None:
        raise NotImplementedError

    def started(self, config: Config, first_round: int) -> None:
        self.tell("started", first_round=first_round)

    def client_done(self, round: int, done: int, total: int) -> None:
        self.tell("progress", rounds_done=round + done / total, accuracy=None)

    def round_done(self, round: int, rounds: int, scores: Scores | None, loss: float) -> None:
        self.tell("progress", rounds_done=round + 1, accuracy=None if scores is None else scores.average)

    def note(self, text: str) -> None:
        self.tell("note", text=text)


def _pass_on(observer: JobsObserver, job: Job, kind: str, details: dict[str, Any]) -> None:
    if kind == "started":
        observer.job_started(job, details["first_round"])
    elif kind == "progress":
        observer.job_progress(job, details["rounds_done"], details["accuracy"])
    elif kind == "note":
        observer.note(f"{job}: {details['text']}")


# -- in this process ------------------------------------------------------------------------------------------
class _Direct(_Reporter):
    def __init__(self, job: Job, observer: JobsObserver) -> None:
        self._job, self._observer = job, observer

    def tell(self, kind: str, **details: Any) -> None:
        _pass_on(self._observer, self._job, kind, details)
        self._observer.tick()


def _one_after_another(todo: Sequence[Job], observer: JobsObserver) -> dict[Job, str]:
    failures: dict[Job, str] = {}
    for job in todo:
        try:
            execute(job, _Direct(job, observer))
        except Stopped:
            raise
        except Exception as error:
            failures[job] = _explain(error, job)
        observer.job_finished(job, failures.get(job, ""))
    return failures


def _explain(error: Exception, job: Job) -> str:
    if isinstance(error, FedkeelError):
        return str(error)
    log.exception("%s crashed.", job)  # a bug: its traceback is wanted
    return f"{type(error).__name__}: {error}"


# -- in processes of their own --------------------------------------------------------------------------------
@dataclass
class _Seat:
    job: Job
    process: BaseProcess
    pipe: Connection
    heart: Heart | None
    outcome: str | None = None  # "" when done; None until the job says so


class _Crew:
    """As many processes as asked for, a new one for each job."""

    def __init__(self, processes: int, observer: JobsObserver, on_gpu: bool) -> None:
        self.processes = processes
        self.observer = observer
        self.failures: dict[Job, str] = {}
        self._seats: list[_Seat] = []
        # Fork shares what is in memory: the images, and methods that were never put into a module. CUDA allows none.
        self._forks = not on_gpu
        self._context: BaseContext = multiprocessing.get_context("fork" if self._forks else "spawn")
        # The first optimiser makes torch import its compiler, which takes seconds: once here, not in every job.
        torch.optim.SGD([torch.zeros(1)])

    def run(self, todo: Sequence[Job]) -> dict[Job, str]:
        waiting = list(todo)
        stopping = False
        try:
            while self._seats or (waiting and not stopping):
                stopping = stopping or stop_requested.is_set()
                for seat in self._seats if stopping else []:
                    # Each stops after its current step, see _work; told again, in case that was too early.
                    seat.process.terminate()
                while waiting and len(self._seats) < self.processes and not stopping:
                    self._seats.append(self._start(waiting.pop(0)))
                for pipe in wait([seat.pipe for seat in self._seats], timeout=0.2):
                    self._hear(next(seat for seat in self._seats if seat.pipe is pipe))
                for seat in self._seats:
                    if seat.heart is not None and seat.outcome is None and seat.heart.is_silent():
                        seat.outcome = "its process hung and was ended; the same command again goes on with it"
                        seat.process.kill()  # which closes its pipe
                self.observer.tick()
        finally:
            with undisturbed():
                for seat in self._seats:  # only after an exception, such as a second Ctrl-C
                    seat.process.kill()
                for seat in self._seats:
                    seat.process.join()
        if stopping:
            raise Stopped
        return self.failures

    def _start(self, job: Job) -> _Seat:
        here, there = self._context.Pipe(duplex=False)
        not_its_own = [here, *(seat.pipe for seat in self._seats)] if self._forks else []
        # Not a daemon: a run may have worker processes of its own.
        heart = Heart() if self._forks else None  # memory is shared by forking alone
        process = self._context.Process(  # type: ignore[attr-defined]
            target=_work, args=(job, there, not_its_own, heart), daemon=False, name=f"{NAME}: {job}"
        )
        with main_that_can_be_imported(), undisturbed():
            process.start()
        there.close()
        return _Seat(job, process, here, heart)

    def _hear(self, seat: _Seat) -> None:
        try:
            message = json.loads(seat.pipe.recv_bytes())
        except (EOFError, OSError):
            self._farewell(seat)
            return
        if message["kind"] == "over":
            seat.outcome = message["problem"]
        else:
            _pass_on(self.observer, seat.job, message["kind"], message)

    def _farewell(self, seat: _Seat) -> None:
        seat.process.join()
        seat.pipe.close()
        self._seats.remove(seat)
        if seat.outcome is None and seat.process.exitcode == UNGUARDED:
            raise FedkeelError(SENTENCE) from None
        if seat.outcome is None:
            seat.outcome = f"its process {death(seat.process.exitcode, '--jobs')}"
        if seat.outcome == "stopped":
            return
        if seat.outcome:
            self.failures[seat.job] = seat.outcome
        self.observer.job_finished(seat.job, seat.outcome)


class _Messenger(_Reporter):
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def tell(self, kind: str, **details: Any) -> None:
        self._pipe.send_bytes(json.dumps({"kind": kind, **details}).encode())


class _LogToPipe(logging.Handler):
    def __init__(self, messenger: _Messenger) -> None:
        super().__init__()
        self._messenger = messenger

    def emit(self, record: logging.LogRecord) -> None:
        self._messenger.note(self.format(record))


def _work(job: Job, pipe: Connection, not_its_own: Sequence[Connection], heart: Heart | None) -> None:
    """The life of a job's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop_requested.set())
    if heart is not None:
        heart.start()
    # A sibling's open end would keep a dead parent's pipe alive, and this process would never notice.
    for other in not_its_own:
        other.close()
    torch.set_num_threads(1)
    messenger = _Messenger(pipe)
    log.handlers, log.propagate = [_LogToPipe(messenger)], False
    try:
        execute(job, messenger)
        problem = ""
    except Stopped:
        problem = "stopped"
    except BrokenPipeError:
        return  # the parent is gone; the run can be resumed
    except Exception as error:
        problem = _explain(error, job)
    messenger.tell("over", problem=problem)
