"""All CPU cores: one worker process per core, one thread each; the images are shared, not copied.

Workers are forked from the process that holds the federation, so they see its images, models and methods without any
copying or pickling. Tensors travel through memory that is shared too: a broadcast is written once and read by all, and
each worker has two places of its own for the rest; a word over a pipe says that they are ready. A worker that dies, or
hangs, takes only the client it was running with it: that client's update is missing, a new worker takes its place.
"""

import ctypes
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

import torch

from fedkeel.config import Config
from fedkeel.core.evaluation import Evaluation, Outputs, merged
from fedkeel.core.messages import Answer, Broadcast, Message, Missing, Update
from fedkeel.core.state import Tensors
from fedkeel.engine.children import Child, end, heard
from fedkeel.engine.evaluation import split_indices
from fedkeel.engine.executors.executor import EXECUTORS, Executor, Part
from fedkeel.engine.executors.shared_memory import SharedTensors
from fedkeel.engine.failures import ClientFailure
from fedkeel.engine.local import Worker
from fedkeel.engine.memory import ClientMemory
from fedkeel.engine.optimizers import import_beforehand
from fedkeel.engine.threads import available_cores
from fedkeel.errors import FedkeelError, ShortageError, TrainingError, shortage
from fedkeel.stopping import Stopped, stop_requested

PART = 4  # batches of an evaluation that one worker does at a time
KEPT_BYTES = 1 << 30
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # M_... in <malloc.h>

Header = dict[str, Any]
Groups = dict[str, Tensors]
Places = tuple[SharedTensors, SharedTensors]
Task = tuple[str, Header]  # a client, and what it has to do


@dataclass
class _Seat:
    """A worker process, and the memory that it shares with this one.

    Two places take turns: while one holds an answer that is still to be read, the next task is under way in the other.
    """

    child: Child
    places: Places
    turn: int = 0  # of which place
    task: int | None = None  # what it is at, as a place in the list of tasks


@EXECUTORS.register("processes")
class ProcessesExecutor(Executor):
    """All CPU cores: one single-threaded worker process per core, sharing the images."""

    rank = 2
    single_threaded = True
    seconds_of = "Worker-seconds, added up over {workers} worker processes that run at the same time."

    @classmethod
    def cannot_run(cls, device: torch.device) -> str:
        if device.type != "cpu":
            return "uses CPU cores: give '--device cpu', or the executor 'serial'."
        return "" if hasattr(os, "fork") else "needs a system that can fork: choose 'serial'."

    @classmethod
    def suits(cls, config: Config) -> bool:
        return cls.worker_processes(config) > 1 and config.threads <= 1

    @classmethod
    def worker_processes(cls, config: Config) -> int:
        return config.workers or available_cores()

    def __init__(self, worker: Worker, memory: ClientMemory, workers: int = 0) -> None:
        self.worker = worker
        self.memory = memory
        import_beforehand(worker.config)
        # A second thread would have little to do here, and would wait for it by spinning on a core that a worker needs.
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._shared = SharedTensors()  # before the workers, which inherit it
        self._seats: list[_Seat] = []
        try:
            for _ in range(workers or available_cores()):
                places = SharedTensors(), SharedTensors()
                self._seats.append(_Seat(self._start(places), places))
        except BaseException:
            self.close()
            raise

    def train(self, clients: Sequence[str], broadcast: Broadcast) -> Iterator[Update | Missing]:
        tasks = [(client, {"do": "train"}) for client in clients]
        return self._in_order(tasks, broadcast, partial(self._remembering, Update), Missing)

    def ask(self, clients: Sequence[str], broadcast: Broadcast, question: str) -> Iterator[Answer | Missing]:
        tasks = [(client, {"do": "ask", "question": question}) for client in clients]
        return self._in_order(tasks, broadcast, partial(self._remembering, Answer), Missing)

    def _remembering(self, kind: type[Message], client: str, header: Header, groups: Groups) -> Message:
        self.memory.keep(client, groups.get("memory", {}))
        return kind.of(header, groups)

    def evaluate(
        self, clients: Sequence[str], broadcast: Broadcast, splits: Sequence[str], *, detailed: bool = False
    ) -> Iterator[list[Evaluation]]:
        parts = parts_of(self.worker, clients, splits)
        whole = [part for of_one in parts for part in of_one]
        results = self.evaluate_parts(whole, broadcast, splits, detailed=detailed)
        for of_one in parts:
            yield merged(evaluation for group in islice(results, len(of_one)) for evaluation in group)

    def evaluate_parts(
        self, parts: Sequence[Part], broadcast: Broadcast, splits: Sequence[str], *, detailed: bool = False
    ) -> Iterator[list[Evaluation]]:
        def lost(client: str, reason: str) -> list[Evaluation]:
            raise TrainingError(f"The evaluation of '{client}' failed twice, the second time because {reason}.")

        def read(_: str, header: Header, groups: Groups) -> list[Evaluation]:
            return evaluations_from(header["evaluations"], groups)

        task = {"do": "evaluate", "splits": list(splits), "detailed": detailed}
        tasks = [(client, task | {"part": [part.start, part.stop] if part else [None]}) for client, part in parts]
        return self._in_order(tasks, broadcast, read, lost, attempts=2)

    def close(self) -> None:
        end([seat.child for seat in self._seats])
        self._seats = []
        torch.set_num_threads(self._threads)

    # -- the pool --------------------------------------------------------------------------------------------
    def _in_order(
        self,
        tasks: Sequence[Task],
        broadcast: Broadcast,
        read: Callable[[str, Header, Groups], Any],
        lost: Callable[[str, str], Any],
        attempts: int = 1,
    ) -> Iterator[Any]:
        """Run every task and yield the results in their order.

        Clients with the most samples go first, so that none of them is waited for at the end.
        """
        attempts_left = [attempts] * len(tasks)
        for seat in self._seats:
            if seat.task is not None:  # of a round that was given up: it still reads the last broadcast
                self._replace(seat)
        self._shared.write(broadcast.groups, **broadcast.header)
        waiting = sorted(range(len(tasks)), key=lambda task: -self.worker.federation[tasks[task][0]].samples)
        results: dict[int, Any] = {}
        turn = 0
        while turn < len(tasks):
            for seat in self._seats:
                if seat.task is None and waiting:
                    self._send(seat, waiting.pop(0), tasks)
            for seat, task, lost_because in self._hear():
                client = tasks[task][0]
                self.attendance.end(client)
                if lost_because:
                    attempts_left[task] -= 1
                    if attempts_left[task]:
                        waiting.append(task)
                    else:
                        results[task] = lost(client, lost_because)
                    continue
                answered = seat.places[seat.turn]
                if waiting:  # at once: the worker need not wait until its answer is read
                    self._send(seat, waiting.pop(0), tasks)
                header, groups = answered.read()
                if self.worker.clock is not None:
                    self.worker.clock.add(header.pop("times"))
                if stop_requested.is_set():  # first: a worker that was forked after Ctrl-C answers with that
                    raise Stopped
                if "error" in header:
                    raise RuntimeError(f"Client '{client}' failed in its worker process:\n{header['error']}")
                if "mistake" in header:
                    raise FedkeelError(header["mistake"])
                failure = header.get("failure")
                results[task] = lost(client, failure) if failure else read(client, header, groups)
            if stop_requested.is_set():
                raise Stopped
            while turn in results:
                yield results.pop(turn)
                turn += 1

    def _hear(self) -> Iterator[tuple[_Seat, int, str]]:
        """The seats whose worker has answered, or will not any more: with the task, and with what became of it."""
        busy = {seat.child: (seat, seat.task) for seat in self._seats if seat.task is not None}
        for child, said in heard(busy):
            seat, task = busy[child]
            seat.task = None
            if said is None:
                self._replace(seat)
            yield seat, task, "" if said is not None else f"its worker process {child.became}"

    def _send(self, seat: _Seat, task: int, tasks: Sequence[Task]) -> None:
        if not seat.child.process.is_alive():
            self._replace(seat)  # it died while it had nothing to do: nobody's loss
        seat.task, seat.turn = task, 1 - seat.turn
        client, what = tasks[task]
        if what["do"] == "train":
            self.attendance.begin(client)
        seat.places[seat.turn].write({"memory": self.memory.of(client)}, client=client, **what)
        with suppress(OSError):  # the worker is dead: reading from it says so, and why
            seat.child.pipe.send_bytes(bytes([seat.turn]))

    def _start(self, places: Places) -> Child:
        try:
            return Child(_work, self.worker, self._shared, places, fewer="--workers", daemon=True)
        except OSError as error:
            raise ShortageError(
                f"A worker process cannot be started ({error.strerror}): give fewer --workers, or stop what else runs "
                "here."
            ) from error

    def _replace(self, seat: _Seat) -> None:
        """Put a new worker in the seat of one that is dead, hangs or is not wanted."""
        end([seat.child])
        seat.child, seat.task = self._start(seat.places), None


def parts_of(worker: Worker, clients: Sequence[str], splits: Sequence[str], batches: int = PART) -> list[list[Part]]:
    """The parts in which each client is evaluated.

    A test set that all clients share is one client's here: its parts keep every worker busy. They are whole batches, as
    many whatever the number of workers, so that the result does not depend on it.
    """
    at_once = batches * worker.config.evaluation_batch
    found: list[list[Part]] = []
    for client in clients:
        site = worker.federation[client]
        starts = range(0, max([len(split_indices(site, split)) for split in splits] + [1]), at_once)
        found.append([(client, slice(start, start + at_once)) for start in starts])
    return found


def evaluations_to(found: Sequence[Evaluation]) -> tuple[list[Header], Groups]:
    """Evaluations on their way between processes: a table of each, and the tensors of those with outputs."""
    outputs = {f"{n}": one.outputs._asdict() for n, one in enumerate(found) if one.outputs is not None}
    return [asdict(replace(one, outputs=None)) for one in found], outputs


def evaluations_from(tables: Sequence[Header], groups: Groups) -> list[Evaluation]:
    return [
        replace(Evaluation(**table), outputs=Outputs(**groups[f"{n}"]) if f"{n}" in groups else None)
        for n, table in enumerate(tables)
    ]


# -- a worker process --------------------------------------------------------------------------------------------------
def _work(pipe: Connection, worker: Worker, shared: SharedTensors, places: Places) -> None:
    """The life of a worker process: tasks in, replies out, until the pipe closes."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    keep_freed_memory()
    if worker.clock is not None:
        worker.clock.take()  # the parent's
    with suppress(EOFError, OSError):  # the parent is gone
        while True:
            own = places[pipe.recv_bytes()[0]]
            task, given = own.read()
            sent, groups = shared.look()
            broadcast = Broadcast.of(sent, groups)
            header, reply = _reply(worker, task, broadcast, given.get("memory", {}))
            if worker.clock is not None:
                header["times"] = worker.clock.take()
            own.write(reply, **header)
            pipe.send_bytes(b"")


def _reply(worker: Worker, task: Header, broadcast: Broadcast, memory: Tensors) -> tuple[Header, Groups]:
    client = task["client"]
    try:
        if task["do"] == "evaluate":
            part, detailed = slice(*task["part"]), task["detailed"]
            found = worker.evaluate(client, broadcast, memory, task["splits"], part, detailed=detailed)
            tables, outputs = evaluations_to(found)
            return {"evaluations": tables}, outputs
        result: Message
        if task["do"] == "train":
            result, memory = worker.train(client, broadcast, memory)
        else:
            result, memory = worker.answer(client, broadcast, memory, task["question"])
        return result.header, result.groups | {"memory": memory}
    except ClientFailure as failure:
        return {"failure": str(failure)}, {}
    # A mistake in a method stops the run here as it does in one process; the parent tells of it.
    except FedkeelError as mistake:
        return {"mistake": str(mistake)}, {}
    except Exception as error:
        if shortage(error):
            raise MemoryError(str(error)) from error
        return {"error": traceback.format_exc()}, {}


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
