"""Several runs at once, each in a process and with a core of its own, or one after another in this process.

On a GPU several runs share the card. Each has its own context, and the card takes turns between them, unless NVIDIA's
Multi-Process Service lets them run side by side. A job that crashes takes only its own run with it.
"""

import logging
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import torch

from fedkeel import simulation as running
from fedkeel.config import Config
from fedkeel.core import imports
from fedkeel.core.evaluation import Scores
from fedkeel.engine.executors.executor import runs_elsewhere
from fedkeel.engine.executors.processes import end_with_parent
from fedkeel.engine.executors.ray import shared
from fedkeel.errors import FedkeelError, death, first_line
from fedkeel.observer import Observer, Several
from fedkeel.runs.trackers import MLflow, require, tracked
from fedkeel.stopping import LOOK, Stopped, stop_requested, undisturbed

log = logging.getLogger("fedkeel")
STOPPED = "stopped"
AGAIN = 10.0  # seconds after which a process that was asked to stop is asked once more


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
    # Objects in place of what the configuration names: federation, model, method.
    given: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Attempt(Job):
    """A run of a search: of those of a method the best counts."""

    number: int = 0

    def __str__(self) -> str:
        return f"{self.label} trial {self.number}"


class Enough(Exception):
    """Raised by an observer that is told of a job's progress: this run need not go on. What it has stays."""


class JobsObserver:
    """Is told how the jobs are going. Every method does nothing by default, but notes go to the log."""

    def planned(self, jobs: Sequence[Job], finished: Sequence[Job]) -> None:
        """All runs of the comparison, and those that were finished before."""

    def job_started(self, job: Job, first_round: int) -> None: ...

    def job_progress(self, job: Job, rounds_done: float, accuracy: float | None) -> None:
        """`accuracy` is None where nothing was evaluated since the last report. May raise `Enough`."""

    def job_finished(self, job: Job, problem: str) -> None:
        """`problem` is empty when all went well."""

    def tick(self) -> None:
        """Called a few times a second."""

    def note(self, text: str) -> None:
        log.warning(text)


class JobsObservers(Several, JobsObserver):
    """Several who want to know."""


class Waiting(Protocol):
    """Jobs that can be begun now; true while there are any. Others may follow when one is finished."""

    def __bool__(self) -> bool: ...

    def next(self) -> Job: ...


def run_all(todo: Sequence[Job], processes: int, observer: JobsObserver) -> dict[Job, str]:
    """Run the jobs; returns what went wrong with those that failed. Raises `Stopped` when asked to stop."""
    return run_waiting(_Waiting(todo), todo, processes, observer)


def run_waiting(waiting: Waiting, like: Sequence[Job], processes: int, observer: JobsObserver) -> dict[Job, str]:
    """As `run_all`, of jobs that are not all known beforehand: `like` are some that need no more than these do."""
    remote = next((job.config for job in like if runs_elsewhere(job.config)), None)
    with nullcontext() if remote is None else shared(remote.ray_address):
        if processes == 1:
            return _run_here(waiting, observer)
        spawned = remote is not None or uses_gpu(job.config for job in like)
        own = homes(like) if spawned else []
        return _run_at_once(waiting, lambda job: _Child(_work, job, own, spawned=spawned), processes, observer)


def _run_here(waiting: Waiting, observer: JobsObserver) -> dict[Job, str]:
    """One after another, in this process."""
    failures: dict[Job, str] = {}
    while waiting:
        if stop_requested.is_set():
            raise Stopped
        job = waiting.next()
        try:
            execute(job, _Reporter(partial(_pass_on, observer, job)))
        except Stopped:
            raise
        except Enough:
            pass
        except Exception as error:
            failures[job] = _explain(error, job)
        observer.job_finished(job, failures.get(job, ""))
    return failures


class _Waiting:
    def __init__(self, todo: Sequence[Job]) -> None:
        self._jobs = list(todo)

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def next(self) -> Job:
        return self._jobs.pop(0)


def uses_gpu(configs: Iterable[Config]) -> bool:
    return any(config.device != "cpu" for config in configs) and torch.cuda.is_available()


def homes(jobs: Sequence[Job]) -> list[Path]:
    """The files that a new Python must import to know what these name; refused where none can."""
    if thing := next((name for job in jobs for name in job.given), ""):
        raise FedkeelError(
            f"The {thing} is an object, which processes that share a GPU cannot be given: give jobs=1, or a name to it "
            "with fedkeel.register in a file that you import."
        )
    used = [thing for job in jobs for thing in imports.used(job.config)]
    if typed := next((entry.name for _, entry in used if not imports.file_of(entry)), ""):
        raise FedkeelError(
            f"'{typed}' was typed into a notebook or a shell, which processes that share a GPU cannot "
            "import: put it into a file and import that, or give jobs=1."
        )
    return list(dict.fromkeys(file for job in jobs for file in imports.files(job.config)))


def execute(job: Job, observer: Observer) -> None:
    with tracked(job.track, job.directory, observer, title=str(job)) as observer:
        if (job.directory / "config.toml").exists():
            running.resume(job.directory, observer=observer, verbose=False, **job.given)
        else:
            running.simulate(job.config, directory=job.directory, observer=observer, verbose=False, **job.given)


def beside_others(config: Config) -> Config:
    """The run as it is when others take place at the same time: on a CPU it has one core, and no workers of its own."""
    return config if uses_gpu([config]) or runs_elsewhere(config) else config.replace(executor="serial")


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
class _Child:
    """A process of its own and the pipe through which it speaks; not a daemon, since a run may have workers."""

    def __init__(self, work: Callable[..., None], *arguments: Any, spawned: bool = False) -> None:
        context: Any = multiprocessing.get_context("spawn" if spawned else "fork")
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=work, args=(theirs, *arguments))
        with undisturbed():
            self.process.start()
        theirs.close()
        self.outcome: str | None = None  # its problem, or "" where there is none; None while it is to go on
        self._asked: list[float] = []

    def ask_to_stop(self) -> None:
        """After its current step: one signal, and a second `AGAIN` later, if the first came before it could listen."""
        now = time.monotonic()
        if not self._asked or (len(self._asked) == 1 and now - self._asked[0] >= AGAIN):
            self._asked.append(now)
            self.process.terminate()

    def heard(self) -> Any:
        """What it says; None at its end."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return None


def _run_at_once(
    waiting: Waiting, start: Callable[[Job], _Child], processes: int, observer: JobsObserver
) -> dict[Job, str]:
    """As many processes as asked for, a new one for each job."""
    stopping, at_work, failures = False, dict[_Child, Job](), dict[Job, str]()
    try:
        while at_work or (waiting and not stopping):
            stopping = stopping or stop_requested.is_set()
            for child in at_work:
                if stopping or child.outcome is not None:
                    child.ask_to_stop()
            while waiting and len(at_work) < processes and not stopping:
                job = waiting.next()
                at_work[start(job)] = job
            ready = wait([child.pipe for child in at_work], timeout=LOOK)
            for child in [child for child in at_work if child.pipe in ready]:
                job, said = at_work[child], child.heard()
                if said is None:
                    del at_work[child]
                    # Told to stop before it could listen, it dies of that.
                    died = STOPPED if stopping else f"its process {death(child.process.exitcode, '--jobs')}"
                    outcome = died if child.outcome is None else child.outcome
                    if outcome != STOPPED:
                        observer.job_finished(job, outcome)
                        failures |= {job: outcome} if outcome else {}
                elif child.outcome is None and said[0] == "over":
                    child.outcome = said[1]
                elif child.outcome is None:
                    try:
                        _pass_on(observer, job, *said)
                    except Enough:
                        child.outcome = ""
            observer.tick()
    finally:
        for child in at_work:  # only after an exception, such as a second Ctrl-C
            child.process.kill()
            child.process.join()
    if stopping:
        raise Stopped
    return failures


class _LogToObserver(logging.Handler):
    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def emit(self, record: logging.LogRecord) -> None:
        self._observer.note(self.format(record))


def _work(pipe: Connection, job: Job, own: Sequence[Path]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop_requested.set())
    torch.set_num_threads(1)
    threading.Thread(target=end_with_parent, daemon=True).start()

    reporter = _Reporter(lambda *event: pipe.send(event))
    log.handlers, log.propagate = [_LogToObserver(reporter)], False
    try:
        for file in own:
            if file.name not in imports.imported():
                imports.load(file)
        execute(job, reporter)
        problem = ""
    except Stopped:
        problem = STOPPED
    except BrokenPipeError:
        return  # the parent is gone; the run can be resumed
    except Exception as error:
        problem = _explain(error, job)
    pipe.send(("over", problem))


def share_tracker(name: str | None) -> None:
    """Before several runs at once: a new database of MLflow gets its tables a single time, since the runs would trip
    over each other. In a process of its own, so that no connection of it is inherited by the runs' processes."""
    require(name)
    if name != "mlflow":
        return
    problem = _Child(_try_database).heard()
    if problem is None or problem:
        raise FedkeelError(f"{MLflow.kind} does not take these runs: {problem or 'its process died.'}")


def _try_database(pipe: Connection) -> None:
    import mlflow

    try:
        mlflow.MlflowClient().search_experiments(max_results=1)
        pipe.send("")
    except Exception as error:
        pipe.send(f"{first_line(error)}.")
