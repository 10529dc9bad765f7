"""One client after another, on any device: the reference that every other executor must agree with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fedkeel.core.evaluation import Evaluation
from fedkeel.core.messages import Answer, Broadcast, Missing, Update
from fedkeel.engine.executors.executor import EXECUTORS, ClientMemory
from fedkeel.engine.local import ClientFailure, Worker


@EXECUTORS.register("serial")
class SerialExecutor:
    """One client after another in this process, on CPU or GPU: the reference."""

    def __init__(self, worker: Worker, memory: ClientMemory, workers: int = 1) -> None:
        self.worker = worker
        self.memory = memory
        self._threads = torch.get_num_threads()
        if worker.config.threads:
            torch.set_num_threads(worker.config.threads)

    def train(self, clients: Sequence[str], broadcast: Broadcast) -> Iterator[Update | Missing]:
        for client in clients:
            try:
                update, memory = self.worker.train(client, broadcast, self.memory.of(client))
            except ClientFailure as failure:
                yield Missing(client, str(failure))
            else:
                self.memory.keep(client, memory)
                yield update

    def evaluate(
        self, clients: Sequence[str], broadcast: Broadcast, splits: Sequence[str]
    ) -> Iterator[list[Evaluation]]:
        for client in clients:
            yield self.worker.evaluate(client, broadcast, self.memory.of(client), list(splits))

    def ask(self, clients: Sequence[str], broadcast: Broadcast, question: str) -> Iterator[Answer | Missing]:
        for client in clients:
            try:
                answer, memory = self.worker.answer(client, broadcast, self.memory.of(client), question)
            except ClientFailure as failure:
                yield Missing(client, str(failure))
            else:
                self.memory.keep(client, memory)
                yield answer

    def close(self) -> None:
        torch.set_num_threads(self._threads)
