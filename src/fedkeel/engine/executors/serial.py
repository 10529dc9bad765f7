"""One client after another, on any device: the reference that every other executor must agree with."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fedkeel.config import Config
from fedkeel.core.messages import Broadcast, Missing
from fedkeel.engine.executors.executor import EXECUTORS, Executor
from fedkeel.engine.local import Worker
from fedkeel.engine.tasks import Result, Task


@EXECUTORS.register("serial")
class SerialExecutor(Executor):
    """One client after another in this process, on CPU or GPU: the reference."""

    @classmethod
    def rank(cls, config: Config) -> int:  # noqa: ARG003
        return 1

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._threads = torch.get_num_threads()
        if worker.config.threads:
            torch.set_num_threads(worker.config.threads)

    def map(self, tasks: Sequence[Task], broadcast: Broadcast) -> Iterator[Result[Any] | Missing]:
        return (self.worker.do(task, broadcast) for task in tasks)

    def close(self) -> None:
        torch.set_num_threads(self._threads)
