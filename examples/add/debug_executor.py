"""One client after another; where one breaks, the error says which it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fedkeel.config import Config
from fedkeel.core.messages import Broadcast, Missing
from fedkeel.engine.executors.executor import EXECUTORS, Executor
from fedkeel.engine.local import Worker
from fedkeel.engine.tasks import Result, Task


@EXECUTORS.register("debug")
class DebugExecutor(Executor):
    """One client after another on the CPU; an error says whose it is."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    @classmethod
    def cannot_run(cls, config: Config, device: torch.device) -> str:  # noqa: ARG003 (nothing of it matters here)
        return "" if device.type == "cpu" else "is for the CPU: give '--device cpu'."

    def map(self, tasks: Sequence[Task], broadcast: Broadcast) -> Iterator[Result[Any] | Missing]:
        for task in tasks:
            try:
                result = self.worker.do(task, broadcast)
            except Exception as error:
                samples = self.worker.federation[task.client].samples
                text = f"Round {broadcast.round}, client '{task.client}' with {samples} samples: {error}"
                raise RuntimeError(text) from error
            yield result
