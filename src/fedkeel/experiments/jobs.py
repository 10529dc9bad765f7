"""Several runs at once, each in a process of a pool and with a core of its own, or one after another in this process.

On a GPU several runs share the card. Each has its own context, and the card takes turns between them, unless NVIDIA's
Multi-Process Service lets them run side by side. A job that ends its process takes only its own run with it.
"""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import torch

from fedkeel import simulation as running
from fedkeel.config import Config
from fedkeel.core import imports
from fedkeel.core.evaluation import Scores
from fedkeel.engine.executors.executor import available_cores, runs_elsewhere
from fedkeel.engine.executors.processes import end_with_parent, has_shared_memory
from fedkeel.engine.executors.ray import shared
from fedkeel.errors import FedkeelError, death, first_line
from fedkeel.observer import Observer, Several
from fedkeel.options import described
from fedkeel.runs.trackers import require, tracked
from fedkeel.stopping import LOOK, Stopped, stop_requested, undisturbed

log = logging.getLogger("fedkeel")
STOPPED = "stopped"
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
    competes = False  # whether of those with one label the best counts, and not their mean

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

    def tick(self) -> None:
        """Called a few times a second."""

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
            return _Pool(todo, processes, observer, given).run(spawned=remote is not None)
        for job in todo:
            problem = _attempt(job, _Reporter(partial(_pass_on, observer, job)), given)
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
    if not hasattr(os, "fork") or not has_shared_memory():
        if (jobs or 1) > 1:
            raise FedkeelError(f"'jobs' is {jobs}, and several processes need fork and /dev/shm: leave it out.")
        return 1
    return jobs or (1 if uses_gpu(configs) else available_cores())


def beside_others(config: Config) -> Config:
    """The run as it is when others take place at the same time: on a CPU it has one core, and no workers of its own."""
    return config if uses_gpu([config]) or runs_elsewhere(config) else config.replace(executor="serial")


def homes(jobs: Sequence[Job], given: Given) -> list[Path]:
    """The files that a new Python must import to know what these name; refused where none can."""
    if thing := next((name for job in jobs for name in given.get(job.label, ())), ""):
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


# -- one job -----------------------------------------------------------------------------------------------------------
def execute(job: Job, observer: Observer, objects: Mapping[str, Any]) -> None:
    with tracked(job.track, job.directory, observer, title=str(job)) as observer:
        job.run(observer, objects)


def _attempt(job: Job, observer: Observer, given: Given) -> str:
    """What went wrong; nothing where all went well."""
    if stop_requested.is_set():
        return STOPPED
    try:
        execute(job, observer, given.get(job.label, {}))
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
    observer.tick()


# -- in a pool ---------------------------------------------------------------------------------------------------------
class _Pool:
    """Runs jobs in processes. A pool that breaks, because one of them died, is made again, and what was under way in
    it is done one by one: so the one that breaks it has a name."""

    def __init__(self, todo: Sequence[Job], processes: int, observer: JobsObserver, given: Given) -> None:
        self.todo, self.processes, self.observer, self.given = todo, processes, observer, given
        self.failures: dict[Job, str] = {}
        self.under_way: set[Job] = set()

    def run(self, *, spawned: bool) -> dict[Job, str]:
        spawned = spawned or uses_gpu(job.config for job in self.todo)
        context: Any = multiprocessing.get_context("spawn" if spawned else "fork")
        files = homes(self.todo, self.given) if spawned else []
        with undisturbed():
            manager = SyncManager(ctx=context)
            manager.start(_begin_manager)
        with manager:
            self.events, self.stop = manager.Queue(), manager.Event()
            shared_with_all = self.events, self.stop, files, self.given
            begin = {"mp_context": context, "initializer": _begin, "initargs": shared_with_all}
            left = list(self.todo)
            while left:
                left = self._together(left, self.processes, begin)
                for job in [job for job in left if job in self.under_way]:  # one of them broke it
                    left.remove(job)
                    if self._together([job], 1, begin):
                        self._finish(job, f"its process {death(self.exit_code, '--jobs')}")
        return {job: self.failures[job] for job in self.todo if job in self.failures}

    def _together(self, jobs: Sequence[Job], processes: int, begin: Mapping[str, Any]) -> list[Job]:
        """Run these; returns those that a pool that broke has taken with it."""
        others, stopping, lost = set(multiprocessing.active_children()), False, list[Job]()
        self.under_way.clear()
        pool = ProcessPoolExecutor(min(processes, len(jobs)), **begin)
        with undisturbed():
            futures = {pool.submit(_work, place, job): job for place, job in enumerate(jobs)}
        waiting: set[Future[str]] = set(futures)
        workers = set(multiprocessing.active_children()) - others
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=LOOK, return_when=FIRST_COMPLETED)
                self._hear(jobs)
                lost += [futures[future] for future in done if not self._ended(futures[future], future)]
                if stop_requested.is_set() and not stopping:
                    stopping = True
                    self.stop.set()
                    for future in futures:
                        future.cancel()
                self.observer.tick()
        finally:
            workers |= set(multiprocessing.active_children()) - others
            for worker in workers if waiting else ():  # an exception, such as a second Ctrl-C
                worker.kill()
            pool.shutdown()
        if stopping:
            raise Stopped
        self.exit_code = next((worker.exitcode for worker in workers if worker.exitcode), None)
        return lost

    def _hear(self, jobs: Sequence[Job]) -> None:
        while not self.events.empty():
            place, *said = self.events.get()
            self.under_way.add(jobs[place])
            if said[0] != "begun":
                _pass_on(self.observer, jobs[place], *said)

    def _ended(self, job: Job, future: Future[str]) -> bool:
        try:
            problem = future.result()
        except CancelledError:
            return True
        except BrokenProcessPool:
            return False
        self.under_way.discard(job)
        if problem != STOPPED:
            self._finish(job, problem)
        return True

    def _finish(self, job: Job, problem: str) -> None:
        self.failures |= {job: problem} if problem else {}
        self.observer.job_finished(job, problem)


_here: dict[str, Any] = {}
"""In a process of the pool: where `events` go, and the objects that were `given`."""


def _begin_manager() -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()


def _begin(events: Any, stop: Any, files: Sequence[Path], given: Given) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    threading.Thread(target=end_with_parent, daemon=True).start()
    threading.Thread(target=_stop_when, args=(stop,), daemon=True).start()
    for file in files:
        if file.name not in imports.imported():
            imports.load(file)
    _here.update(events=events, given=given)


def _stop_when(stop: Any) -> None:
    stop.wait()
    stop_requested.set()


class _Notes(logging.Handler):
    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def emit(self, record: logging.LogRecord) -> None:
        self._observer.note(self.format(record))


def _work(place: int, job: Job) -> str:
    reporter = _Reporter(lambda *event: _here["events"].put((place, *event)))
    log.handlers, log.propagate = [_Notes(reporter)], False
    _here["events"].put((place, "begun"))
    return _attempt(job, reporter, _here["given"])


# -- trackers ----------------------------------------------------------------------------------------------------------
def share_tracker(name: str | None) -> None:
    """Before several runs at once: a new database of MLflow gets its tables a single time, since the runs would trip
    over each other. In a process of its own, so that no connection of it is inherited by the runs' processes."""
    require(name)
    if name != "mlflow":
        return
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        try:
            problem = pool.submit(_try_database).result()
        except BrokenProcessPool:
            problem = "its process died."
    if problem:
        raise FedkeelError(f"MLflow does not take these runs: {problem}")


def _try_database() -> str:
    import mlflow

    try:
        mlflow.MlflowClient().search_experiments(max_results=1)
    except Exception as error:
        return f"{first_line(error)}."
    return ""
