"""All CPU cores: one worker process per core, one thread each; the images are shared, not copied.

Workers are forked from the process that holds the federation, so they see its images, models and methods without any
copying or pickling. The broadcast is a file that all of them read, and what comes back are the bytes that would travel
over a network. A pool that breaks, because a worker died, is made again and what was left of its tasks is done one by
one: so the one that breaks it has a name, and only its update is missing.
"""

import ctypes
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedkeel.config import Config
from fedkeel.core.messages import Broadcast, Missing, broadcast_from_bytes, broadcast_to_bytes
from fedkeel.engine import optimizers
from fedkeel.engine.executors.executor import EXECUTORS, Executor, available_cores
from fedkeel.engine.executors.parts import explained, memory_from_bytes, memory_to_bytes, packed, results, unpacked
from fedkeel.engine.local import Worker
from fedkeel.engine.tasks import Result, Task
from fedkeel.stopping import LOOK, Stopped, stop_requested

KEPT_BYTES = 1 << 30
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # M_... in <malloc.h>
Packed = tuple[Result[Any] | Missing, bytes]
DIED = "its worker process died: it may need more memory than there is, give fewer --workers"


def has_shared_memory() -> bool:
    """Without it no pool of processes has its locks."""
    try:
        multiprocessing.get_context("fork").Lock()
    except OSError:
        return False
    return True


@EXECUTORS.register("processes")
class ProcessesExecutor(Executor):
    """All CPU cores: one single-threaded worker process per core, sharing the images."""

    single_threaded = True

    @classmethod
    def rank(cls, config: Config) -> int:
        return 2 if (config.workers or available_cores()) > 1 else 0

    @classmethod
    def cannot_run(cls, config: Config, device: torch.device) -> str:
        if device.type != "cpu":
            return "uses CPU cores: give '--device cpu', or the executor 'serial'."
        if config.threads > 1:
            return f"has one thread in each process, and 'threads' is {config.threads}: choose 'serial'."
        if not hasattr(os, "fork"):
            return "needs a system that can fork: choose 'serial'."
        return "" if has_shared_memory() else "needs shared memory, and this system has no /dev/shm: choose 'serial'."

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        optimizers.import_beforehand(worker.config)
        # A second thread would have little to do here, and would wait for it by spinning on a core that a worker needs.
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._folder = tempfile.TemporaryDirectory(prefix="fedkeel-")
        self._broadcasts = 0
        try:
            self._begin()
        except OSError:
            self.close()
            raise

    def _begin(self) -> None:
        count, others = self.worker.config.workers or available_cores(), set(multiprocessing.active_children())
        self._pool = ProcessPoolExecutor(
            count, multiprocessing.get_context("fork"), initializer=_begin, initargs=(self.worker,)
        )
        try:
            self._pool.submit(int)  # with the first task all of them are forked
        finally:
            self._workers = set(multiprocessing.active_children()) - others

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()  # what it is still at, or hangs in, nobody waits for
        self._pool.shutdown()
        self._folder.cleanup()
        torch.set_num_threads(self._threads)

    def map(self, tasks: Sequence[Task], broadcast: Broadcast) -> Iterator[Result[Any] | Missing]:
        self._broadcasts += 1
        file = Path(self._folder.name) / f"{self._broadcasts}.safetensors"
        file.write_bytes(broadcast_to_bytes(broadcast))
        try:
            yield from results(tasks, self.worker, partial(self._attempt, file), DIED)
        finally:
            file.unlink(missing_ok=True)

    def _attempt(
        self, file: Path, tasks: Mapping[int, Task], alone: bool
    ) -> Iterator[tuple[int, Result[Any] | Missing | None]]:
        """A pool that breaks ends all that is under way in it, and is made again."""
        for numbers in ([number] for number in tasks) if alone else [tasks]:
            left = set(numbers)
            try:
                futures = {self._pool.submit(_work, as_bytes(tasks[number]), file): number for number in numbers}
                for future in as_completed(futures):
                    number, (result, memory) = futures[future], future.result()
                    left.remove(number)
                    yield number, unpacked(tasks[number], result, memory_from_bytes(memory))
            except BrokenProcessPool:
                self._pool.shutdown()
                self._begin()
                yield from ((number, None) for number in left)


def as_bytes(task: Task) -> Task:
    """What its client remembers goes with it in the form of a network."""
    return replace(task, memory=partial(memory_from_bytes, memory_to_bytes(task.memory)))


def as_completed(futures: Iterable[Future[Packed]]) -> Iterator[Future[Packed]]:
    """As they come, with a look now and then at whether the run is to stop."""
    waiting = set(futures)
    while waiting:
        if stop_requested.is_set():
            raise Stopped
        done, waiting = wait(waiting, timeout=LOOK, return_when=FIRST_COMPLETED)
        yield from done


# -- a worker process --------------------------------------------------------------------------------------------------
_here: dict[str, Any] = {}
"""In a worker process: its `worker`, and the last broadcast's `file` and `broadcast`."""


def _begin(worker: Worker) -> None:
    """Forked, so nothing was copied on the way. Ctrl-C is the parent's to handle, which ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    keep_freed_memory()
    _here.update(worker=worker)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(task: Task, file: Path) -> Packed:
    with explained(lambda: task.client):
        if _here.get("file") != file:
            _here.update(file=file, broadcast=broadcast_from_bytes(file.read_bytes()))
        return packed(_here["worker"].do(task, _here["broadcast"]))


def keep_freed_memory() -> bool:
    """Keep freed memory for the next step instead of handing it back to the system; whether that could be set.

    A step frees activations of megabytes and the next one wants them again. Handed back, each page comes in anew with
    a page fault: some six hundred a step of `simple_cnn` at batch 32, a sixth of its time. Only glibc can be told.
    """
    try:
        tell = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or none that can be asked
        return False
    return bool(tell(TRIM_THRESHOLD, KEPT_BYTES) and tell(MMAP_THRESHOLD, KEPT_BYTES))
