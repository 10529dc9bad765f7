"""All CPU cores: one worker process per core, one thread each; the images are shared, not copied.

Workers are forked from the process that holds the federation, so they see its images, models and methods
without any copying or pickling; messages travel as safetensors over pipes. A worker that dies takes only the
client it was running with it: that client's update is missing, a new worker takes its place.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from fedkeel.engine import local
from fedkeel.engine.evaluation import Evaluation
from fedkeel.engine.execution import EXECUTORS, ClientMemory
from fedkeel.engine.local import ClientFailure, Stopped, Worker
from fedkeel.errors import FedkeelError, TrainingError
from fedkeel.messages import (
    Answer,
    Broadcast,
    Missing,
    Update,
    broadcast_from_bytes,
    broadcast_to_bytes,
    pack,
    unpack,
    update_from_bytes,
    update_to_bytes,
)
from fedkeel.state import Tensors

T = TypeVar("T")
Reply = tuple[dict[str, Any], bytes, bytes]


@dataclass
class _Seat:
    """A worker process and the pipe to it."""

    process: BaseProcess
    pipe: Connection
    client: str | None = None  # whom it is running
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
        self._seats = [self._open_seat() for _ in range(workers or os.cpu_count() or 1)]
        self._broadcasts = 0

    def train(self, clients: Sequence[str], broadcast: Broadcast) -> Iterator[Update | Missing]:
        def read(client: str, reply: Reply) -> Update:
            _, update, memory = reply
            self.memory.keep(client, unpack(memory)[1].get("memory", {}))
            return update_from_bytes(update)

        yield from self._in_order(clients, broadcast, {"do": "train"}, read, Missing)

    def evaluate(
        self, clients: Sequence[str], broadcast: Broadcast, splits: Sequence[str]
    ) -> Iterator[list[Evaluation]]:
        def read(_: str, reply: Reply) -> list[Evaluation]:
            return [Evaluation(**fields) for fields in reply[0]["evaluations"]]

        def lost(client: str, reason: str) -> list[Evaluation]:
            raise TrainingError(f"The evaluation of '{client}' failed twice, the second time because {reason}.")

        job = {"do": "evaluate", "splits": list(splits)}
        yield from self._in_order(clients, broadcast, job, read, lost, attempts=2)

    def ask(self, clients: Sequence[str], broadcast: Broadcast, question: str) -> Iterator[Answer | Missing]:
        def read(client: str, reply: Reply) -> Answer:
            header, answer, memory = reply
            self.memory.keep(client, unpack(memory)[1].get("memory", {}))
            return Answer(client, header["samples"], unpack(answer)[1].get("tensors", {}))

        yield from self._in_order(clients, broadcast, {"do": "ask", "question": question}, read, Missing)

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
        clients: Sequence[str],
        broadcast: Broadcast,
        job: dict[str, Any],
        read: Callable[[str, Reply], T],
        lost: Callable[[str, str], Any],
        attempts: int = 1,
    ) -> Iterator[Any]:
        """Run `job` for every client, long ones first, and yield the results in the order of `clients`."""
        attempts_left = dict.fromkeys(clients, attempts)
        self._broadcasts += 1
        message = broadcast_to_bytes(broadcast)
        sizes = {client.name: client.samples for client in self.worker.federation}
        waiting = sorted(clients, key=lambda name: -sizes[name])
        results: dict[str, Any] = {}
        turn = 0
        while turn < len(clients):
            for seat in self._seats:
                if seat.client is None and waiting:
                    self._send(seat, waiting.pop(0), message, job)
            busy = {seat.pipe: seat for seat in self._seats if seat.client is not None}
            for pipe in wait(list(busy), timeout=0.2):
                seat = busy[pipe]  # type: ignore[index]
                client = seat.client
                assert client is not None
                try:
                    reply = self._receive(seat)
                except (EOFError, OSError):
                    reason = self._replace(seat)
                    attempts_left[client] -= 1
                    if attempts_left[client]:
                        waiting.append(client)
                    else:
                        results[client] = lost(client, reason)
                else:
                    seat.client = None
                    header = reply[0]
                    if "error" in header:
                        raise RuntimeError(f"Client '{client}' failed in its worker process:\n{header['error']}")
                    if "mistake" in header:
                        raise FedkeelError(header["mistake"])
                    failure = header.get("failure")
                    results[client] = lost(client, failure) if failure else read(client, reply)
            if local.stop_requested.is_set():
                raise Stopped
            while turn < len(clients) and clients[turn] in results:
                yield results.pop(clients[turn])
                turn += 1

    def _send(self, seat: _Seat, client: str, message: bytes, job: dict[str, Any]) -> None:
        seat.client = client
        fresh = seat.broadcast != self._broadcasts
        try:
            seat.pipe.send_bytes(json.dumps({**job, "client": client, "fresh": fresh}).encode())
            if fresh:
                seat.pipe.send_bytes(message)
                seat.broadcast = self._broadcasts
            seat.pipe.send_bytes(pack({}, memory=self.memory.of(client)))
        except OSError:
            pass  # the worker is dead: reading from it says so, and why

    @staticmethod
    def _receive(seat: _Seat) -> Reply:
        header = json.loads(seat.pipe.recv_bytes())
        return header, seat.pipe.recv_bytes(), seat.pipe.recv_bytes()

    def _open_seat(self) -> _Seat:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_work, args=(self.worker, there, here), daemon=True)
        process.start()
        there.close()
        return _Seat(process, here)

    def _replace(self, seat: _Seat) -> str:
        """Put a new worker in a dead one's seat; returns what became of the old one."""
        seat.process.join(timeout=5)
        code = seat.process.exitcode
        cause = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        seat.pipe.close()
        fresh = self._open_seat()
        seat.process, seat.pipe, seat.client, seat.broadcast = fresh.process, fresh.pipe, None, -1
        return f"its worker process died ({cause})"


def _work(worker: Worker, pipe: Connection, parents_end: Connection) -> None:
    """The life of a worker process: jobs in, replies out, until the pipe closes."""
    parents_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    broadcast: Broadcast | None = None
    while True:
        try:
            job = json.loads(pipe.recv_bytes())
            if job["fresh"]:
                broadcast = broadcast_from_bytes(pipe.recv_bytes())
            memory = unpack(pipe.recv_bytes())[1].get("memory", {})
        except (EOFError, OSError):
            return
        assert broadcast is not None
        for part in _reply(worker, job, broadcast, memory):
            pipe.send_bytes(part)


def _reply(worker: Worker, job: dict[str, Any], broadcast: Broadcast, memory: Tensors) -> tuple[bytes, bytes, bytes]:
    client = job["client"]
    try:
        if job["do"] == "train":
            update, memory = worker.train(client, broadcast, memory)
            return b"{}", update_to_bytes(update), pack({}, memory=memory)
        if job["do"] == "ask":
            answer, memory = worker.answer(client, broadcast, memory, job["question"])
            header = json.dumps({"samples": answer.samples}).encode()
            return header, pack({}, tensors=answer.tensors), pack({}, memory=memory)
        evaluations = worker.evaluate(client, broadcast, memory, job["splits"])
        return json.dumps({"evaluations": [asdict(e) for e in evaluations]}).encode(), b"", b""
    except ClientFailure as failure:
        return json.dumps({"failure": str(failure)}).encode(), b"", b""
    # A mistake in a method stops the run here as it does in one process; the parent tells of it.
    except FedkeelError as mistake:
        return json.dumps({"mistake": str(mistake)}).encode(), b"", b""
    except Exception:
        return json.dumps({"error": traceback.format_exc()}).encode(), b"", b""
