"""All CPU cores: one worker process per core, one thread each; the images are shared, not copied.

Workers are forked from the process that holds the federation, so they see its images, models and methods
without any copying or pickling. Tensors travel through memory that is shared too: a broadcast is written once and
read by all, and each worker has two segments of its own for the rest; a line of JSON over a pipe says what is where.
A worker that dies takes only the client it was running with it: that client's update is missing, a new worker takes
its place.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from fedkeel.engine.allocation import keep_freed_memory
from fedkeel.engine.evaluation import Evaluation, merged, split_indices
from fedkeel.engine.execution import EXECUTORS, ClientMemory
from fedkeel.engine.local import ClientFailure, Worker
from fedkeel.engine.segment import Segment
from fedkeel.engine.threads import available_cores
from fedkeel.errors import FedkeelError, TrainingError
from fedkeel.messages import Answer, Broadcast, Missing, Update
from fedkeel.state import Tensors
from fedkeel.stopping import Stopped, stop_requested

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
    turn: int = 0  # of which segment
    job: int | None = None  # what it is at, as a place in the list of jobs
    broadcast: int = -1  # the one it has


@EXECUTORS.register("processes")
class ProcessesExecutor:
    """All CPU cores: one single-threaded worker process per core, sharing the images."""

    def __init__(self, worker: Worker, memory: ClientMemory, workers: int = 0) -> None:
        self.worker = worker
        self.memory = memory
        # Fork shares everything that is in memory; only there do user-defined methods need no importable module.
        self._context = multiprocessing.get_context("fork")
        # The first optimiser makes torch import its compiler, which takes seconds: once here, not in every worker.
        torch.optim.SGD([torch.zeros(1)])
        self._shared = Segment()  # before the workers, which inherit it
        self._broadcasts = 0
        self._seats = [self._open_seat((Segment(), Segment())) for _ in range(workers or available_cores())]

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
        for seat in self._seats:
            seat.pipe.close()
            seat.process.terminate()
        for seat in self._seats:
            seat.process.join(timeout=5)
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
                seat.process.kill()
                self._replace(seat)
        message = self._write(broadcast)
        waiting = sorted(range(len(jobs)), key=lambda job: -self.worker.federation[jobs[job][0]].samples)
        results: dict[int, Any] = {}
        turn = 0
        while turn < len(jobs):
            for seat in self._seats:
                if seat.job is None and waiting:
                    job = waiting.pop(0)
                    self._send(seat, job, *jobs[job], message)
            busy = {seat.pipe: seat for seat in self._seats if seat.job is not None}
            for pipe in wait(list(busy), timeout=0.2):
                seat = busy[pipe]  # type: ignore[index]
                assert seat.job is not None
                job, client = seat.job, jobs[seat.job][0]
                try:
                    header = json.loads(seat.pipe.recv_bytes())
                except (EOFError, OSError):
                    reason = self._replace(seat)
                    attempts_left[job] -= 1
                    if attempts_left[job]:
                        waiting.append(job)
                    else:
                        results[job] = lost(client, reason)
                else:
                    seat.job, answered = None, seat.segments[seat.turn]
                    if waiting:  # at once: the worker need not wait until its answer is read
                        following = waiting.pop(0)
                        self._send(seat, following, *jobs[following], message)
                    if "error" in header:
                        raise RuntimeError(f"Client '{client}' failed in its worker process:\n{header['error']}")
                    if "mistake" in header:
                        raise FedkeelError(header["mistake"])
                    failure = header.get("failure")
                    if failure:
                        results[job] = lost(client, failure)
                    else:
                        results[job] = read(client, header, answered.read(header.pop("tensors", [])))
            if stop_requested.is_set():
                raise Stopped
            while turn in results:
                yield results.pop(turn)
                turn += 1

    def _write(self, broadcast: Broadcast) -> Header:
        """Put the broadcast where all workers can read it."""
        self._broadcasts += 1
        groups = {"weights": broadcast.weights, "statistics": broadcast.statistics, "extras": broadcast.extras}
        return {"round": broadcast.round, "rounds": broadcast.rounds, "tensors": self._shared.write(groups)}

    def _send(self, seat: _Seat, job: int, client: str, what: Header, message: Header) -> None:
        if not seat.process.is_alive():
            self._replace(seat)  # it died while it had nothing to do: nobody's loss
        seat.job, seat.turn = job, 1 - seat.turn
        fresh = seat.broadcast != self._broadcasts
        memory = seat.segments[seat.turn].write({"memory": self.memory.of(client)})
        parts = {"client": client, "broadcast": message if fresh else None, "memory": memory, "segment": seat.turn}
        try:
            seat.pipe.send_bytes(json.dumps({**what, **parts}).encode())
            seat.broadcast = self._broadcasts
        except OSError:
            pass  # the worker is dead: reading from it says so, and why

    def _open_seat(self, segments: tuple[Segment, Segment]) -> _Seat:
        here, there = self._context.Pipe()
        arguments = (self.worker, there, here, self._shared, segments)
        process = self._context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        there.close()
        return _Seat(process, here, segments)

    def _replace(self, seat: _Seat) -> str:
        """Put a new worker in a dead one's seat; returns what became of the old one."""
        seat.process.join(timeout=5)
        code = seat.process.exitcode
        cause = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        seat.pipe.close()
        fresh = self._open_seat(seat.segments)
        seat.process, seat.pipe, seat.job, seat.broadcast = fresh.process, fresh.pipe, None, -1
        return f"its worker process died ({cause})"


def _work(
    worker: Worker, pipe: Connection, parents_end: Connection, shared: Segment, segments: tuple[Segment, Segment]
) -> None:
    """The life of a worker process: jobs in, replies out, until the pipe closes."""
    parents_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    keep_freed_memory()
    broadcast: Broadcast | None = None
    while True:
        try:
            job = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        if message := job["broadcast"]:
            groups = shared.look(message["tensors"])
            kinds = {kind: groups.get(kind, {}) for kind in ("weights", "statistics", "extras")}
            broadcast = Broadcast(message["round"], message["rounds"], **kinds)
        assert broadcast is not None
        own = segments[job["segment"]]
        memory = own.read(job["memory"]).get("memory", {})
        header, reply = _reply(worker, job, broadcast, memory)
        pipe.send_bytes(json.dumps({**header, "tensors": own.write(reply)}).encode())


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
    except Exception:
        return {"error": traceback.format_exc()}, {}
