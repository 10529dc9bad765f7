"""One client after another, on any device: the reference that every other executor must agree with."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from fedkeel.core.evaluation import Evaluation
from fedkeel.core.messages import Answer, Broadcast, Missing, Update
from fedkeel.core.state import Tensors
from fedkeel.engine.executors.executor import EXECUTORS, Executor, Part
from fedkeel.engine.failures import ClientFailure
from fedkeel.engine.local import Worker
from fedkeel.engine.memory import ClientMemory

T = TypeVar("T")


@EXECUTORS.register("serial")
class SerialExecutor(Executor):
    """One client after another in this process, on CPU or GPU: the reference."""

    rank = 1

    def __init__(self, worker: Worker, memory: ClientMemory, workers: int = 1) -> None:
        self.worker = worker
        self.memory = memory
        self._threads = torch.get_num_threads()
        if worker.config.threads:
            torch.set_num_threads(worker.config.threads)

    def train(self, clients: Sequence[str], broadcast: Broadcast) -> Iterator[Update | Missing]:
        for client in clients:
            self.attendance.begin(client)
            one = [*self._remembering([client], lambda client, memory: self.worker.train(client, broadcast, memory))]
            self.attendance.end(client)
            yield from one

    def ask(self, clients: Sequence[str], broadcast: Broadcast, question: str) -> Iterator[Answer | Missing]:
        return self._remembering(
            clients, lambda client, memory: self.worker.answer(client, broadcast, memory, question)
        )

    def _remembering(
        self, clients: Sequence[str], work: Callable[[str, Tensors], tuple[T, Tensors]]
    ) -> Iterator[T | Missing]:
        for client in clients:
            try:
                result, memory = work(client, self.memory.of(client))
            except ClientFailure as failure:
                yield Missing(client, str(failure))
            else:
                self.memory.keep(client, memory)
                yield result

    def evaluate(
        self, clients: Sequence[str], broadcast: Broadcast, splits: Sequence[str], *, detailed: bool = False
    ) -> Iterator[list[Evaluation]]:
        return self.evaluate_parts([(client, None) for client in clients], broadcast, splits, detailed=detailed)

    def evaluate_parts(
        self, parts: Sequence[Part], broadcast: Broadcast, splits: Sequence[str], *, detailed: bool = False
    ) -> Iterator[list[Evaluation]]:
        for client, part in parts:
            yield self.worker.evaluate(client, broadcast, self.memory.of(client), list(splits), part, detailed=detailed)

    def close(self) -> None:
        torch.set_num_threads(self._threads)
