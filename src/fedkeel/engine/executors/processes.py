"""All CPU cores: one worker process per core, one thread each; the images are shared, not copied.

Workers are forked from the process that holds the federation, so they see its images, models and methods
without any copying or pickling. Tensors travel through memory that is shared too: a broadcast is written once and
read by all, and each worker has two segments of its own for the rest; a word over a pipe says that they are ready.
A worker that dies, or hangs, takes only the client it was running with it: that client's update is missing, a new
worker takes its place.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from fedkeel.core.evaluation import Evaluation, merged
from fedkeel.core.messages import Answer, Broadcast, Missing, Update
from fedkeel.core.state import Tensors
from fedkeel.engine.evaluation import split_indices
from fedkeel.engine.executors.allocation import keep_freed_memory
from fedkeel.engine.executors.executor import EXECUTORS, ClientMemory
from fedkeel.engine.executors.heartbeat import Heart
from fedkeel.engine.executors.shared_memory import Segment
from fedkeel.engine.local import ClientFailure, Worker
from fedkeel.engine.threads import available_cores
from fedkeel.errors import FedkeelError, ShortageError, TrainingError, death, shortage
from fedkeel.stopping import Stopped, stop_requested, undisturbed

TICK = 0.2  # seconds, after which the parent looks around even if no worker has answered
PART = 4  # batches of an evaluation that one worker does at a time

T = TypeVar("T")
Header = dict[str, Any]
Groups = dict[str, Tensors]


@dataclass
class _Seat:
    """A worker process, the pipe to it, and the memory that the two share.

    Two segments take turns: while one holds an answer that is still to be read, the next job is under way in the other.
    """

    process: BaseProcess
    pipe: Connection
    segments: tuple[Segment, Segment]
    heart: Heart
    turn: int = 0  # of which segment
    job: int | None = None  # what it is at, as a place in the list of jobs
    broadcast: int = -1  # the one it has


@EXECUTORS.register("processes")
class ProcessesExecutor:
    """All CPU cores: one single-threaded worker process per core, sharing the images."""

    new_heart: Callable[[], Heart] = Heart

    def __init__(self, worker: Worker, memory: ClientMemory, workers: int = 0) -> None:
        self.worker = worker
        self.memory = memory
        # Fork shares everything that is in memory; only there do user-defined methods need no importable module.
        self._context = multiprocessing.get_context("fork")
        # The first optimiser makes torch import its compiler, which takes seconds: once here, not in every worker.
        torch.optim.SGD([torch.zeros(1)])
        self._shared = Segment()  # before the workers, which inherit it
        self._broadcasts = 0
        self._seats: list[_Seat] = []
        try:
            for _ in range(workers or available_cores()):
                self._seats.append(self._open_seat((Segment(), Segment())))
        except BaseException:
            self.close()
            raise

    def train(self, clients: Sequence[str], broadcast: Broadcast) -> Iterator[Update | Missing]:
        def read(client: str, header: Header, groups: Groups) -> Update:
            self.memory.keep(client, groups.get("memory", {}))
            kinds = {kind: groups.get(kind, {}) for kind in ("weights", "statistics", "extras")}
            return Update(client, header["samples"], round=header["round"], metrics=header["metrics"], **kinds)

        yield from self._in_order([(client, {"do": "train"}) for client in clients], broadcast, read, Missing)

    def evaluate(
        self, clients: Sequence[str], broadcast: Broadcast, splits: Sequence[str]
    ) -> Iterator[list[Evaluation]]:
        def read(_: str, header: Header, __: Groups) -> list[Evaluation]:
            return [Evaluation(**fields) for fields in header["evaluations"]]

        def lost(client: str, reason: str) -> list[Evaluation]:
            raise TrainingError(f"The evaluation of '{client}' failed twice, the second time because {reason}.")

        # A test set that all clients share is one client's here: its parts keep every worker busy. They are whole
        # batches, as many whatever the number of workers, so that the result does not depend on it.
        at_once = PART * self.worker.config.evaluation_batch
        jobs, parts = [], []
        for client in clients:
            site = self.worker.federation[client]
            starts = range(0, max([len(split_indices(site, split)) for split in splits] + [1]), at_once)
            jobs += [
                (client, {"do": "evaluate", "splits": list(splits), "part": [start, start + at_once]})
                for start in starts
            ]
            parts.append(len(starts))
        results = self._in_order(jobs, broadcast, read, lost, attempts=2)
        for count in parts:
            yield merged(evaluation for group in islice(results, count) for evaluation in group)

    def ask(self, clients: Sequence[str], broadcast: Broadcast, question: str) -> Iterator[Answer | Missing]:
        def read(client: str, header: Header, groups: Groups) -> Answer:
            self.memory.keep(client, groups.get("memory", {}))
            return Answer(client, header["samples"], groups.get("answer", {}))

        job = {"do": "ask", "question": question}
        yield from self._in_order([(client, job) for client in clients], broadcast, read, Missing)

    def close(self) -> None:
        with undisturbed():
            for seat in self._seats:
                seat.process.kill()  # one that hangs hears nothing else, and none has anything to put in order
            for seat in self._seats:
                seat.process.join(timeout=5)
                seat.pipe.close()
            self._seats = []

    # -- the pool --------------------------------------------------------------------------------------------
    def _in_order(
        self,
        jobs: Sequence[tuple[str, Header]],
        broadcast: Broadcast,
        read: Callable[[str, Header, Groups], T],
        lost: Callable[[str, str], Any],
        attempts: int = 1,
    ) -> Iterator[Any]:
        """Run every job, which is a client and what it has to do, and yield the results in their order.

        Clients with the most samples go first, so that none of them is waited for at the end.
        """
        attempts_left = [attempts] * len(jobs)
        for seat in self._seats:
            if seat.job is not None:  # of a round that was given up: it still reads the last broadcast
                self._replace(seat)
        self._write(broadcast)
        waiting = sorted(range(len(jobs)), key=lambda job: -self.worker.federation[jobs[job][0]].samples)
        results: dict[int, Any] = {}
        turn = 0
        while turn < len(jobs):
            for seat in self._seats:
                if seat.job is None and waiting:
                    job = waiting.pop(0)
                    self._send(seat, job, *jobs[job])
            for seat, job, lost_because in self._hear():
                client = jobs[job][0]
                if lost_because:
                    attempts_left[job] -= 1
                    if attempts_left[job]:
                        waiting.append(job)
                    else:
                        results[job] = lost(client, lost_because)
                    continue
                answered = seat.segments[seat.turn]
                if waiting:  # at once: the worker need not wait until its answer is read
                    following = waiting.pop(0)
                    self._send(seat, following, *jobs[following])
                header, groups = answered.read()
                if "error" in header:
                    raise RuntimeError(f"Client '{client}' failed in its worker process:\n{header['error']}")
                if "mistake" in header:
                    raise FedkeelError(header["mistake"])
                failure = header.get("failure")
                results[job] = lost(client, failure) if failure else read(client, header, groups)
            if stop_requested.is_set():
                raise Stopped
            while turn in results:
                yield results.pop(turn)
                turn += 1

    def _hear(self) -> Iterator[tuple[_Seat, int, str]]:
        """The seats whose worker has answered, or will not any more: with the job, and with what became of it."""
        busy = [seat for seat in self._seats if seat.job is not None]
        ready = wait([seat.pipe for seat in busy], timeout=TICK)
        for seat in busy:
            job = seat.job
            assert job is not None
            if seat.pipe in ready:
                try:
                    problem = seat.pipe.recv_bytes().decode()
                except (EOFError, OSError):
                    yield seat, job, f"its worker process {self._replace(seat, dying=True)}"
                    continue
                if problem:
                    raise ShortageError(problem)
                seat.job = None
                yield seat, job, ""
            elif seat.heart.is_silent():
                self._replace(seat)
                yield seat, job, "its worker process hung and was ended"

    def _write(self, broadcast: Broadcast) -> None:
        """Put the broadcast where all workers can read it."""
        self._broadcasts += 1
        groups = {"weights": broadcast.weights, "statistics": broadcast.statistics, "extras": broadcast.extras}
        self._shared.write(groups, round=broadcast.round, rounds=broadcast.rounds)

    def _send(self, seat: _Seat, job: int, client: str, what: Header) -> None:
        if not seat.process.is_alive():
            self._replace(seat)  # it died while it had nothing to do: nobody's loss
        seat.job, seat.turn = job, 1 - seat.turn
        fresh = seat.broadcast != self._broadcasts
        seat.segments[seat.turn].write({"memory": self.memory.of(client)}, client=client, fresh=fresh, **what)
        try:
            seat.pipe.send_bytes(bytes([seat.turn]))
            seat.broadcast = self._broadcasts
        except OSError:
            pass  # the worker is dead: reading from it says so, and why

    def _open_seat(self, segments: tuple[Segment, Segment]) -> _Seat:
        here, there = self._context.Pipe()
        heart = self.new_heart()
        arguments = (self.worker, there, here, self._shared, segments, heart)
        process = self._context.Process(target=_work, args=arguments, daemon=True)
        try:
            with undisturbed():
                process.start()
        except OSError as error:
            raise ShortageError(
                f"A worker process cannot be started ({error.strerror}): give fewer --workers, or stop what else runs "
                "here."
            ) from error
        there.close()
        return _Seat(process, here, segments, heart)

    def _replace(self, seat: _Seat, *, dying: bool = False) -> str:
        """Put a new worker in the seat of one that is dead, hangs or is not wanted; returns how the old one ended."""
        if dying:
            seat.process.join(timeout=5)  # what it dies of by itself
        seat.process.kill()
        seat.process.join(timeout=5)
        seat.pipe.close()
        fresh = self._open_seat(seat.segments)
        end = death(seat.process.exitcode, "--workers")
        seat.process, seat.pipe, seat.heart = fresh.process, fresh.pipe, fresh.heart
        seat.job, seat.broadcast = None, -1
        return end


def _work(
    worker: Worker,
    pipe: Connection,
    parents_end: Connection,
    shared: Segment,
    segments: tuple[Segment, Segment],
    heart: Heart,
) -> None:
    """The life of a worker process: jobs in, replies out, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parents_end.close()
    torch.set_num_threads(1)
    keep_freed_memory()
    with suppress(EOFError, OSError):  # the parent is gone
        try:
            heart.start()
            _answer_jobs(worker, pipe, shared, segments)
        except (MemoryError, RuntimeError) as error:
            if not (lack := shortage(error)):
                raise
            pipe.send_bytes(lack.encode())


def _answer_jobs(worker: Worker, pipe: Connection, shared: Segment, segments: tuple[Segment, Segment]) -> None:
    broadcast: Broadcast | None = None
    while True:
        own = segments[pipe.recv_bytes()[0]]
        job, given = own.read()
        if job["fresh"]:
            sent, groups = shared.look()
            kinds = {kind: groups.get(kind, {}) for kind in ("weights", "statistics", "extras")}
            broadcast = Broadcast(sent["round"], sent["rounds"], **kinds)
        assert broadcast is not None
        header, reply = _reply(worker, job, broadcast, given.get("memory", {}))
        own.write(reply, **header)
        pipe.send_bytes(b"")


def _reply(worker: Worker, job: Header, broadcast: Broadcast, memory: Tensors) -> tuple[Header, Groups]:
    client = job["client"]
    try:
        if job["do"] == "train":
            update, memory = worker.train(client, broadcast, memory)
            header = {"samples": update.samples, "round": update.round, "metrics": update.metrics}
            groups = {"weights": update.weights, "statistics": update.statistics, "extras": update.extras}
            return header, {**groups, "memory": memory}
        if job["do"] == "ask":
            answer, memory = worker.answer(client, broadcast, memory, job["question"])
            return {"samples": answer.samples}, {"answer": answer.tensors, "memory": memory}
        evaluations = worker.evaluate(client, broadcast, memory, job["splits"], slice(*job["part"]))
        return {"evaluations": [asdict(evaluation) for evaluation in evaluations]}, {}
    except ClientFailure as failure:
        return {"failure": str(failure)}, {}
    # A mistake in a method stops the run here as it does in one process; the parent tells of it.
    except FedkeelError as mistake:
        return {"mistake": str(mistake)}, {}
    except Exception as error:
        if shortage(error):
            raise MemoryError(str(error)) from error
        return {"error": traceback.format_exc()}, {}
